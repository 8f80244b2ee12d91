"""ckptkit generate, logits, bench: commands that run a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .common import (
    CONTEXT,
    PATH,
    TEXT_FILE,
    Command,
    check_together,
    json_option,
    loaded,
    precision,
    reading,
    running,
    say,
    show,
    show_json,
    write,
)


def parse_ids(_ctx: Any, _param: Any, text: str | None) -> list[int] | None:
    """Token ids separated by commas."""
    try:
        return None if text is None else [int(i) for i in text.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter("ids are whole numbers separated by commas") from None


def parse_bias(_ctx: Any, _param: Any, entries: tuple[str, ...]) -> dict[int, float]:
    """ID+1.5 or ID-2, as llama.cpp takes them; ID-inf forbids a token."""
    found = {}
    for entry in entries:
        parts = re.fullmatch(r"(\d+)([+-].+)", entry)
        try:
            found[int(parts[1])] = float(parts[2])  # type: ignore[index]
        except (TypeError, ValueError):
            raise click.BadParameter(f"{entry!r} is not ID+BIAS or ID-BIAS") from None
    return found


def parse_counts(_ctx: Any, _param: Any, entries: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers of tokens, each given by itself or several separated by commas, as llama-bench takes them."""
    try:
        counts = tuple(int(count) for entry in entries for count in entry.split(","))
    except ValueError:
        counts = (-1,)
    if min(counts, default=0) < 0:
        raise click.BadParameter("numbers of tokens, such as 512 or 128,512")
    return counts


def prompt_of(model: Any, prompt: str | None, file: Path | None, ids: list[int] | None, special: bool) -> list[int]:
    """Token ids from whichever of the three ways was used."""
    from ..errors import UnsupportedError

    given = [x for x in (prompt, file, ids) if x is not None]
    if len(given) != 1:
        raise click.UsageError("give a prompt by one of -p TEXT, -f FILE, --ids 1,2,3")
    if ids is not None:
        return ids
    if model.tokenizer is None:
        raise UnsupportedError("the model has no tokenizer", hint="give one with --tokenizer, or ids with --ids")
    text: str | bytes = file.read_bytes() if file is not None else prompt or ""
    found: list[int] = model.tokenizer.encode_prompt(text, special=special, warn=lambda m: say(f"note: {m}"))
    return found


prompting = (
    click.option("-p", "--prompt", help="Text to continue."),
    click.option("-f", "--file", type=TEXT_FILE, help="File with the text to continue, its last newline included."),
    click.option("--ids", callback=parse_ids, metavar="1,2,3", help="Token ids to continue."),
)


def with_prompt(command: Any) -> Any:
    """Add -p, -f and --ids."""
    for option in reversed(prompting):
        command = option(command)
    return command


EXCLUDES = {
    "prompts": ("prompt", "file", "ids", "chat", "chat_input", "left_pad"),
    "chat": ("file", "ids"),
    "left_pad": ("ctx_size",),
}
NEEDS = {"batch": ("prompts",), "chat_input": ("chat",)}


@click.command(context_settings=CONTEXT)
@click.argument("model", type=PATH)
@with_prompt
@click.option("--prompts", type=TEXT_FILE, help="File with a prompt a line, continued side by side.")
@click.option("-b", "--batch", type=click.IntRange(1), default=8, show_default=True, help="Prompts at a time.")
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(-1),
    default=-1,
    show_default=True,
    help="Tokens to generate; -1: until it ends.",
)
@click.option("-c", "--ctx-size", type=click.IntRange(1), help="Context to allocate.  [default: as trained]")
@click.option("--temp", type=float, default=0.8, show_default=True, help="Temperature; 0 takes the likeliest token.")
@click.option("--top-k", type=int, default=40, show_default=True, help="0: all.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="1: all.")
@click.option("--min-p", type=float, default=0.05, show_default=True, help="0: off.")
@click.option("--typical", type=float, default=1.0, show_default=True, help="1: off.")
@click.option("--repeat-penalty", type=float, default=1.0, show_default=True, help="1: off.")
@click.option("--repeat-last-n", type=int, default=64, show_default=True, help="Tokens it looks back; -1: all.")
@click.option("-s", "--seed", type=int, help="Same seed, same text; -1: random.  [default: -1]")
@click.option(
    "--logit-bias",
    multiple=True,
    callback=parse_bias,
    metavar="ID+BIAS",
    help="Make a token likelier or, with -, rarer.",
)
@click.option("-r", "--reverse-prompt", multiple=True, metavar="TEXT", help="Stop before this text.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end of text.")
@click.option("--special", is_flag=True, help="Recognise special tokens in the prompt and show them in the output.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--chat-input", default="", metavar="TEXT", help="The input beside an Alpaca instruction.")
@click.option("--left-pad", is_flag=True, help="As nanoeuler generates: the window padded on the left with token 0.")
@precision("exact")
@json_option
@running
@reading
def generate(
    model: Path, prompt: str | None, file: Path | None, ids: list[int] | None, as_json: bool, **given: Any
) -> None:
    """Continue a text. The samplers run in llama.cpp's order: penalty, top-k, typical, top-p, min-p, temperature.

    \b
    Example:
      ckptkit generate model.bin -p "ROMEO:" -n 40 --temp 0
    """
    check_together(EXCLUDES, NEEDS)
    from ..runtime.generate import GenerateOptions
    from ..runtime.generate import generate as run
    from ..runtime.sampler import Sampling

    names = ("temp", "top_k", "top_p", "min_p", "typical", "repeat_penalty", "repeat_last_n", "seed", "logit_bias")
    sampling = Sampling(**{n: given.pop(n) for n in names})
    stop, special = given.pop("reverse_prompt"), given.pop("special")
    chat, chat_input = given.pop("chat"), given.pop("chat_input")
    options = {n: given.pop(n) for n in ("n_predict", "ignore_eos", "left_pad")}
    prompts, batch = given.pop("prompts"), given.pop("batch")
    with loaded(model, given, given.pop("ctx_size")) as m:
        if prompts is not None:
            _batched(
                m, prompts, batch, GenerateOptions(stop=stop, special=special, sampling=sampling, **options), as_json
            )
            return
        if chat:
            from ..runtime.chat import chat_prompt

            if prompt is None:
                raise click.UsageError("--chat needs -p TEXT")
            tokens, stops = chat_prompt(m.tokenizer, prompt, chat_input)
            stop = (*stop, *stops)
        else:
            tokens = prompt_of(m, prompt, file, ids, special)
        waiting = [prompt if prompt and not chat else ""]  # shown with the first text, after what start-up has to say

        def emit(piece: str) -> None:
            write(waiting.pop() + piece if waiting else piece)

        how = GenerateOptions(stop=stop, special=special, sampling=sampling, **options)
        result = run(m, tokens, how, None if as_json else emit)
        if as_json:
            show_json(result.as_dict() | {"precision": m.precision, "device": m.device})
            return
        emit("" if result.text is not None else ",".join(map(str, result.ids)))
        write("\n")
        t = result.timings
        say(f"stopped: {result.stop_reason}")
        decoded = f"decode {t.decode_tokens:,} tokens, {t.decode_rate:,.1f} tok/s"
        say(f"prompt {t.prompt_tokens:,} tokens, {t.prompt_rate:,.1f} tok/s; {decoded}  ({m.device}, {m.precision})")


def _batched(m: Any, prompts: Path, batch: int, options: Any, as_json: bool) -> None:
    """Every line of a file continued; each comes out as it would alone."""
    from ..errors import UnsupportedError
    from ..runtime.batch import generate_batch

    if m.tokenizer is None:
        raise UnsupportedError("the model has no tokenizer", hint="give one with --tokenizer")
    texts = [line for line in prompts.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if line]
    if not texts:
        raise UnsupportedError("no prompts in the file", path=prompts, expected="one a line")
    ids = [m.tokenizer.encode_prompt(text, special=options.special) for text in texts]
    results = generate_batch(m, ids, options, batch)
    if as_json:
        show_json([r.as_dict() for r in results])
        return
    for text, result in zip(texts, results, strict=True):
        show([f"{text}{result.text}", ""])


@click.command(context_settings=CONTEXT)
@click.argument("model", type=PATH)
@with_prompt
@click.option(
    "--out", type=PATH, required=True, metavar="F.npz", help="Where to write `ids` (n,) and `logits` (n, vocab)."
)
@click.option("--special", is_flag=True, help="Recognise special tokens in the prompt.")
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@precision("exact")
@running
@reading
def logits(model: Path, prompt: str | None, file: Path | None, ids: list[int] | None, out: Path, **given: Any) -> None:
    """Write the logits at every position of a text, so that anybody can judge the runtime.

    \b
    Example:
      ckptkit logits model.bin --ids 49,46,44 --out logits.npz
    """
    import numpy as np

    from ..files import check_output, replacing
    from ..runtime.generate import check_prompt

    force, special = given.pop("force"), given.pop("special")
    check_output(out, (model,), force)
    with loaded(model, given) as m:
        check_output(out, m.checkpoint.source.paths, force)
        tokens = check_prompt(m, prompt_of(m, prompt, file, ids, special))
        found = m.forward(tokens, logits="all")
        with replacing(out) as f:
            np.savez(f, ids=np.asarray(tokens, np.int64), logits=found)
        show([f"{out}  ids ({len(tokens)},)  logits {found.shape} float32  ({m.device}, {m.precision})"])


def counts(short: str, flag: str, default: str, says: str) -> Callable[[Command], Command]:
    """An option of one number of tokens or more."""
    return click.option(
        short, flag, multiple=True, default=(default,), callback=parse_counts, metavar="N,...",
        help=f"{says}  [default: {default}]",
    )  # fmt: skip


@click.command(context_settings=CONTEXT)
@click.argument("model", type=PATH)
@counts("-p", "--n-prompt", "512", "Prompt lengths; 0: none.")
@counts("-n", "--n-gen", "128", "Tokens to generate; 0: none.")
@counts("-d", "--n-depth", "0", "Tokens already in the cache.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Runs of each test.")
@click.option(
    "-o", "--output", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True, help="Form of results."
)
@precision("fast")
@running
@reading
def bench(model: Path, output: str, **given: Any) -> None:
    """Measure prompt and decode speed, with the names that llama-bench uses: pp512, tg128, @ d2048.

    \b
    Example:
      ckptkit bench model.gguf -p 512 -n 128 -r 3
    """
    from ..errors import UnsupportedError
    from ..runtime import bench as measured

    render = {"md": measured.to_markdown, "json": measured.to_json, "csv": measured.to_csv}[output]
    repetitions: int = given.pop("repetitions")
    lengths: list[tuple[int, ...]] = [given.pop(name) for name in ("n_prompt", "n_gen", "n_depth")]
    n_prompt, n_gen, n_depth = lengths
    if not any((*n_prompt, *n_gen)):
        raise click.UsageError("nothing to measure: -p and -n are 0")
    longest = max(*n_prompt, *n_gen) + max(n_depth)

    def context(config: Any) -> int:
        if longest > config.context_length and not config.rope_pairing:
            raise UnsupportedError(
                "the model has no positions for so many tokens", path=model,
                expected=f"at most {config.context_length:,}", got=f"{longest:,} (-p or -n, and -d)",
                hint=f"pass -p {config.context_length // 2} -n {config.context_length // 2}",
            )  # fmt: skip
        return longest

    with loaded(model, given, context) as m:
        write(render(measured.bench(m, n_prompt, n_gen, n_depth, repetitions, say)).rstrip("\n") + "\n")

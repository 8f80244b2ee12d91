"""ckptkit ppl."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .common import CONTEXT, PATH, check_together, json_option, loaded, precision, reading, running, show, show_json

MODES = ("llama", "full", "stride", "docs", "all")
SCORING = ("mode", "chunks", "stride", "mtp_head", "per_token", "html", "save_logits", "force")  # of a text
EXCLUDES = {"hellaswag": ("text", "base", *SCORING), "base": SCORING}
NEEDS = {"tasks": ("hellaswag",)}


@contextmanager
def windows() -> Iterator[Callable[[str, int, int, float], None] | None]:
    """A bar over windows with the running estimate, on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def update(mode: str, done: int, count: int, ppl: float) -> None:
            if mode not in tasks:
                tasks[mode] = bar.add_task(mode, total=count)
            bar.update(tasks[mode], completed=done, description=f"{mode} {ppl:,.4f}")

        yield update


@click.command(context_settings=CONTEXT)
@click.argument("model", type=PATH)
@click.option("--text", "-f", type=PATH, help="Text file, or an llm.c token shard.")
@click.option(
    "--mode", type=click.Choice(MODES), default="llama", show_default=True, help="How to cut and what to score."
)
@click.option("-c", "--ctx-size", "n_ctx", type=int, help="Window length.  [default: 512, or the context if shorter]")
@click.option("--chunks", type=int, default=-1, show_default=True, help="Windows to score; -1: all.")
@click.option("--stride", type=int, help="Tokens from window to window in mode stride.  [default: half a window]")
@click.option(
    "-b", "--batch-size", "n_batch", type=click.IntRange(1), default=2048, show_default=True, help="Tokens at a time."
)
@click.option("--mtp-head", type=click.IntRange(0), default=0, show_default=True, help="Score this prediction head.")
@click.option("--per-token", type=PATH, metavar="OUT.jsonl", help="Write what every token got.")
@click.option("--html", type=PATH, metavar="OUT.html", help="Write a page: the text coloured by surprise, and plots.")
@click.option(
    "--save-all-logits", "save_logits", type=PATH, metavar="F", help="Save log-probabilities as llama-perplexity does."
)
@click.option(
    "--kl-divergence-base", "base", type=PATH, metavar="F", help="Compare with log-probabilities saved by either."
)
@click.option("--hellaswag", type=PATH, metavar="F", help="Answer the questions of an llm.c evaluation file.")
@click.option("--tasks", type=click.IntRange(1), help="Questions to answer.  [default: all]")
@click.option("--force", is_flag=True, help="Replace outputs that exist.")
@precision("exact")
@json_option
@running
@reading
def ppl(model: Path, text: Path | None, base: Path | None, hellaswag: Path | None, as_json: bool, **given: Any) -> None:
    """Perplexity of a model on a text, by a stated convention.

    \b
    Example:
      ckptkit ppl model.gguf --text held-out.txt
      ckptkit ppl model.bin --text val.bin --mode full -c 64
    """
    check_together(EXCLUDES, NEEDS)
    from .. import score
    from ..score_text import compared, side_by_side

    names = ("mode", "n_ctx", "chunks", "stride", "n_batch", "mtp_head", "per_token", "html", "save_logits", "force")
    options = score.PplOptions(**{n: given.pop(n) for n in names})
    tasks = given.pop("tasks")
    if text is None and base is None and hellaswag is None:
        raise click.UsageError("give a text with --text FILE (or --hellaswag, --kl-divergence-base)")
    with loaded(model, given, lambda c: (options.n_ctx or None) if c.rope_pairing else None) as m:
        with windows() as progress:
            if hellaswag is not None:
                reports: list[Any] = [score.hellaswag(m, hellaswag, tasks, options.n_batch, progress)]
            elif base is not None:
                reports = [score.kl(m, base, text, options, progress)]
            else:
                assert text is not None
                reports = list(score.run(m, text, options, progress))
        bodies = [r.as_dict() | {"device": m.device} for r in reports]
    if as_json:
        show_json(bodies[0] if len(bodies) == 1 else bodies)
    elif base is not None and hellaswag is None:
        show(compared(bodies[0]))
    elif len(bodies) > 1:
        show(side_by_side(bodies))
    else:
        show(lines(bodies[0]))


def lines(body: dict[str, Any]) -> list[str]:
    """A report for people: the rule first, then every figure that is known."""
    from ..report import number, pairs

    entries: list[tuple[str, Any]] = []
    for key, value in body.items():
        if key in ("rule", "notes", "running", "answers", "precision", "device", "mode") or value is None:
            continue
        if key == "ppl" and isinstance(value, float):
            error = f" +/- {body['stderr']:.4f}" if body.get("stderr") is not None else ""
            entries.append(("perplexity", f"{value:.4f}{error}"))
        elif isinstance(value, dict):
            entries.append((key, "  ".join(f"{k} {number(v)}" for k, v in value.items())))
        elif key == "nll":
            entries.append(("mean nll", f"{value:.6f}"))
        elif key != "stderr":
            entries.append((key.replace("_", " "), value))
    head = f"{body.get('mode', '')}: {body['rule']} ({body['device']}, {body['precision']})".removeprefix(": ")
    return [head, *pairs(entries), *(f"  note: {number(n)}" for n in body.get("notes", ()))]

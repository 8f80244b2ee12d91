"""ckptkit verify."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from .common import (
    CONTEXT,
    PATH,
    TEXT_FILE,
    check_together,
    hardware,
    json_option,
    progress,
    read_options,
    reading,
    say,
    show,
    show_json,
)
from .run import parse_ids

RUN = ("prompt", "file", "ids", "logits")  # how both are run
EXCLUDES = {"state": RUN, "manifest": (*RUN, "device", "threads")}
NEEDS = {"source": ("manifest",)}


@click.command(context_settings=CONTEXT)
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="[B]", type=PATH, required=False)
@click.option("-p", "--prompt", help="Text to run through both.  [default: 64 random tokens, always the same]")
@click.option("-f", "--file", type=TEXT_FILE, help="File with the text to run through both.")
@click.option("--ids", callback=parse_ids, metavar="1,2,3", help="Token ids to run through both.")
@click.option("--logits/--no-logits", default=True, help="Run the same ids through both.  [default: on]")
@hardware
@click.option("--state", type=PATH, help="Compare A's logits and loss with this debug state of llm.c.")
@click.option("--manifest", type=PATH, help="Check A against the manifest that its conversion wrote.")
@click.option("--source", type=PATH, multiple=True, help="File the manifest speaks of.  [default: beside it or A]")
@json_option
@reading
def verify(
    a: Path,
    b: Path | None,
    state: Path | None,
    manifest: Path | None,
    source: tuple[Path, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Prove that two checkpoints say the same, whatever their formats; name the cause where they do not.

    Structure, tensors and logits are compared in one common form. Exit code 0: the same, 1: different. The options
    that fill in what a file does not say are for A, and for B where B does not say it either.

    \b
    Example:
      ckptkit verify model.bin model.gguf
      ckptkit verify model.bin --state model_debug_state.bin
      ckptkit verify model.gguf --manifest model.json
    """
    check_together(EXCLUDES, NEEDS)
    if sum(x is not None for x in (b, state, manifest)) != 1:
        raise click.UsageError("give one of B, --state FILE, --manifest FILE")
    format, options = given.pop("source_format"), read_options(given)
    if manifest is not None:
        report, text = _manifest(a, manifest, source, format, options)
    elif state is not None:
        report, text = _state(a, state, format, options, given)
    else:
        report, text = _pair(a, b, format, options, given)
    if as_json:
        show_json(report.as_dict())
    else:
        show(text)
    if not report.ok:
        raise click.exceptions.Exit(1)


def _pair(a: Path, b: Path | None, format: str, options: Any, given: dict[str, Any]) -> tuple[Any, list[str]]:
    from .. import formats
    from ..verify import Options
    from ..verify import verify as run

    assert b is not None
    with ExitStack() as stack:
        first = stack.enter_context(formats.open(a, format, options))
        second = stack.enter_context(open_second(b, options))
        ids = _ids(first, given)
        begin = stack.enter_context(progress("comparing"))
        report = run(first, second, Options(given["logits"], ids, given["device"], given["threads"]), begin)
    return report, pair_lines(report)


def open_second(path: Path, options: Any) -> Any:
    """Open B: facts given about the model only fill in what B does not store, so that they cannot hide a fault."""
    from .. import formats

    facts = ("norm_eps", "rope_theta", "context_length")
    ck = formats.open(path, options=replace(options, **dict.fromkeys(facts)), strict=False)
    lacking = {
        name: getattr(options, name)
        for name in facts
        if getattr(options, name) is not None
        and any(note.startswith(f"{name} is not stored") for note in ck.source.notes)
    }
    if not lacking:
        return ck
    ck.close()
    return formats.open(path, options=replace(options, **(dict.fromkeys(facts) | lacking)), strict=False)


def _ids(ck: Any, given: dict[str, Any]) -> list[int] | None:
    """Ids from -p, -f or --ids; None if none of them was used."""
    from ..errors import UnsupportedError

    ways = [given[k] for k in ("prompt", "file", "ids") if given[k] is not None]
    if len(ways) > 1:
        raise click.UsageError("give at most one of -p TEXT, -f FILE, --ids 1,2,3")
    if not ways or given["ids"] is not None:
        found: list[int] | None = given["ids"]
        return found
    if ck.tokenizer is None:
        raise UnsupportedError("A has no tokenizer", hint="give one with --tokenizer, or ids with --ids")
    text = given["file"].read_bytes() if given["file"] is not None else given["prompt"]
    return list(ck.tokenizer.encode_prompt(text, warn=lambda m: say(f"note: {m}")))


def _state(a: Path, state: Path, format: str, options: Any, given: dict[str, Any]) -> tuple[Any, list[str]]:
    from .. import formats
    from ..verify import verify_state

    with formats.open(a, format, options) as ck:
        report = verify_state(ck, state, given["device"], given["threads"])
    return report, state_lines(report)


def _manifest(a: Path, manifest: Path, source: tuple[Path, ...], format: str, options: Any) -> tuple[Any, list[str]]:
    from ..verify import verify_manifest

    with progress("hashing") as begin:
        report = verify_manifest(a, manifest, source, format, options, begin)
    return report, manifest_lines(report)


WORD = {True: "ok    ", False: "differ"}


def pair_lines(report: Any) -> list[str]:
    """The report on two files for people."""
    from ..report import number

    s = report.structure
    head = f"{len(s.shared)} of {s.n_a} tensors" + (f", B has {s.n_b}" if s.n_b != s.n_a else "")
    out = [f"structure  {WORD[s.ok]}  {head}"]
    out += [f"             {number(d.what)}: {number(d.a)} in A, {number(d.b)} in B" for d in s.differences[:20]]
    if len(s.differences) > 20:
        out.append(f"             and {len(s.differences) - 20} more")
    out += _tensor_lines(report)
    p = report.logits
    if p is None:
        out.append(f"logits     not run  {number(report.logits_note)}")
    else:
        out.append(f"logits     {WORD[p.ok]}  {_predictions(p)}")
    for cause in report.causes:
        out.append(f"cause      {number(cause.says)}" + _some(cause.tensors))
    if report.unexplained:
        out.append(f"cause      none found for{_some(report.unexplained)}")
    if report.after is not None:
        word = "with that put right the logits agree" if report.after.ok else "with that put right they still differ"
        out.append(f"           {word}: {_predictions(report.after)}")
    return out + [f"note: {number(note)}" for note in s.notes]


def _tensor_lines(report: Any) -> list[str]:
    from ..report import number

    failed = [t for t in report.tensors if not t.ok]
    exact = sum(t.exact for t in report.tensors)
    if exact == len(report.tensors):
        return [f"tensors    {WORD[report.tensors_ok]}  {exact} of {exact} bit for bit"]
    rest = [t for t in report.tensors if not t.exact]
    worst = max(failed or rest, key=lambda t: t.share if t.share == t.share else float("inf"))
    line = f"tensors    {WORD[not failed]}  {exact} of {len(report.tensors)} bit for bit"
    if failed:
        line += f", {len(failed)} beyond the limit"
    pair = worst.type_a.lower() if worst.type_a == worst.type_b else f"{worst.type_b.lower()} vs {worst.type_a.lower()}"
    return [
        line,
        f"             worst {number(worst.name)}: max |d| {worst.max_error:.3g}, rms {worst.rms_error:.3g}  ({pair}, "
        f"limit {worst.limit})",
    ]


def _predictions(p: Any) -> str:
    limit = f"limit {p.limit:g}"
    return (
        f"{p.tokens} tokens: top-1 agrees {p.top1_agree}/{p.tokens}, "
        f"max |d log p| {p.max_dlogp:.2g}{f' ({limit})' if p.exact else ''}, "
        f"KL {p.mean_kl:.2g}{'' if p.exact else f' ({limit})'}"
    )


def _some(names: tuple[str, ...]) -> str:
    from ..errors import some
    from ..report import number

    return "  " + number(some(names, 3)) if names else ""


def state_lines(report: Any) -> list[str]:
    """The report on a debug state for people."""
    from ..report import number

    out = [
        f"logits     {WORD[report.logits_ok]}  {report.batch} x {report.length} tokens: max |d| {report.max_error:.3g} "
        f"(limit {report.limit:g}), rms {report.rms_error:.3g}",
        f"loss       {WORD[report.loss_ok]}  {report.loss:.6f}, the state says {report.loss_stored:.6f} "
        f"(limit {report.loss_limit:g})",
    ]
    out += [f"cause      {number(c.says)}" for c in report.causes]
    if not report.ok and not report.causes:
        out.append("cause      none of the known faults: undoing them one at a time leaves the difference")
    return out + [f"note: {number(note)}" for note in report.notes]


def manifest_lines(report: Any) -> list[str]:
    """The report on a manifest for people."""
    from ..report import number

    out = []
    for check in report.checks:
        out.append(f"{check.what.ljust(9)}  {WORD[check.ok]}  {number(check.says)}")
        out += [f"             {number(line)}" for line in check.details[:20]]
    return out + [f"note: {number(note)}" for note in report.notes]

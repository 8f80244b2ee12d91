"""ckptkit check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .common import CONTEXT, PATH, check_together, json_option, show, show_json

SHOWN = 6  # findings of one rule


@click.command(context_settings=CONTEXT)
@click.argument("file", type=PATH)
@click.option("--values", is_flag=True, help="Read every value too and look for NaN and infinities.")
@click.option("--fix", type=PATH, metavar="OUT", help="Write the file with what can be mended safely.")
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@json_option
@click.pass_context
def check(ctx: click.Context, file: Path, values: bool, fix: Path | None, force: bool, as_json: bool) -> None:
    """Predict what llama.cpp, Ollama and Hugging Face will refuse in a file, or silently get wrong.

    Nothing is run and no template is rendered. Exit code 0: no error found; 1: at least one.

    \b
    Example:
      ckptkit check model.gguf
      ckptkit check model.gguf --values --fix mended.gguf
    """
    check_together({}, {"force": ("fix",)})
    from ..check import check as run
    from ..errors import FormatError

    if not file.exists():
        raise FormatError("cannot be opened: No such file or directory", path=file, hint="check the path")
    report = run(file, values, fix, force)
    if as_json:
        show_json(report.as_dict() | {"fixed": str(fix) if fix else None})
    else:
        show(lines(report, fix))
    if report.refused:
        ctx.exit(1)


def lines(report: Any, fix: Path | None = None) -> list[str]:
    """The report for people."""
    from ..check import JUDGED_BY
    from ..report import number

    counts = report.as_dict()["counts"]
    said = (
        ", ".join(f"{n} {kind}{'s' if n != 1 else ''}" for kind, n in counts.items() if n) or "nothing to complain of"
    )
    out = [
        f"{number(report.path.name)}  {report.format or 'unknown format'}, "
        f"arch {number(report.arch) or 'unknown'}: {said}"
    ]
    shown: dict[str, int] = {}
    for f in report.findings:
        shown[f.rule] = shown.get(f.rule, 0) + 1
        if shown[f.rule] > SHOWN:
            continue
        out.append(f"  {f.severity}: {number(f.what)}  [{f.rule}; {number(f.at)}]")
        out.append(f"    then: {number(f.effect)}")
        if f.mend:
            out.append(f"    mend: {number(f.mend)}" + (" (--fix does it)" if f.fixable else ""))
    out += [f"  and {n - SHOWN:,} more of [{rule}]; --json lists all" for rule, n in shown.items() if n > SHOWN]
    out += [f"  note: {number(note)}" for note in report.notes]
    if fix:
        out.append(f"  wrote {number(fix)}")
    return [*out, f"  judged by {JUDGED_BY}"]

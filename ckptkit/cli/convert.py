"""ckptkit convert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from .common import (
    CONTEXT,
    PATH,
    TEXT_FILE,
    check_together,
    json_option,
    progress,
    read_options,
    reading,
    show,
    show_json,
)

SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_size(_ctx: Any, _param: Any, text: str) -> int:
    """Bytes from 500M or 2G, as llama-gguf-split takes them."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match:
        raise click.BadParameter("a number of bytes such as 500M or 2G")
    return int(match[1]) * SIZES[match[2]]


def parse_set(_ctx: Any, _param: Any, entries: tuple[str, ...]) -> dict[str, str]:
    """key=value pairs."""
    for entry in entries:
        if "=" not in entry:
            raise click.BadParameter(f"{entry!r} is not key=value")
    return dict(entry.split("=", 1) for entry in entries)


@click.command(context_settings=CONTEXT)
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--to", "format", default="", metavar="FORMAT", help="Write this format, whatever the output is called.")
@click.option(
    "--arch", default="", help="Write as this architecture, where the mathematics agree (nanoeuler as qwen2)."
)
@click.option(
    "--type", default="", metavar="TYPE", help="f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1, q2_k to q6_k, q4_k_m ..."
)
@click.option("--pure", is_flag=True, help="Give every matrix the same type.")
@click.option(
    "--mtp",
    type=click.Choice(["sidecar", "drop"]),
    default="sidecar",
    show_default=True,
    help="Extra prediction heads: into a file beside the output, or left out.",
)
@click.option("--drop", multiple=True, metavar="NAME", help="Leave this tensor out, if the target has no place for it.")
@click.option("--version", default="", help="Version of the target format.")
@click.option(
    "--split-max-size", default="0", callback=parse_size, metavar="N[M|G]", help="Write shards of at most this size."
)
@click.option(
    "--write-output", is_flag=True, help="Store a tied output matrix a second time (for llama.cpp before 2025-03)."
)
@click.option("--allow-nonfinite", is_flag=True, help="Convert NaN, infinities and overflows instead of refusing them.")
@click.option("--set", "metadata", multiple=True, callback=parse_set, metavar="KEY=VALUE", help="Set a GGUF key.")
@click.option("--remove", multiple=True, metavar="KEY", help="Leave a GGUF key out.")
@click.option("--chat-template", type=TEXT_FILE, help="Set the chat template to this file's text.")
@click.option("--name", default="", help="Set general.name.")
@click.option("--manifest", type=PATH, help="Write hashes, and where every tensor came from, to this JSON file.")
@click.option(
    "--ollama", type=PATH, metavar="DIR", help="Write a Modelfile for `ollama create` into this directory too."
)
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@json_option
@reading
def convert(
    source: Path, target: Path, as_json: bool, chat_template: Path | None, ollama: Path | None, **given: Any
) -> None:
    """Convert a checkpoint; the formats are found out from the file and from the output's name.

    \b
    Example:
      ckptkit convert model.bin model.gguf --type q8_0
      ckptkit convert model.gguf model.bin
    """
    check_together({}, {"pure": ("type",)})
    from ..conversion import Options
    from ..conversion import convert as run
    from ..formats.options import WriteOptions

    metadata = dict(given.pop("metadata"))
    if chat_template:
        try:
            metadata["tokenizer.chat_template"] = chat_template.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise click.BadParameter(
                f"{str(chat_template)!r} is no UTF-8 text: {e.reason}", param_hint="--chat-template"
            ) from None
    names = ("version", "split_max_size", "write_output", "name", "remove")
    options = Options(
        read=read_options(given), write=WriteOptions(metadata=metadata, **{n: given.pop(n) for n in names}), **given
    )
    if ollama:
        from ..ollama import check_folder, check_target, write_modelfile

        check_target(target, options)
        check_folder(ollama, source, options.force)
    with progress("converting") as begin:
        report = run(source, target, options, begin)
    if ollama:
        write_modelfile(report, ollama, options.force)
    if as_json:
        show_json(report.as_dict())
        return
    show(lines(report))


def lines(report: Any) -> list[str]:
    """The report for people: what was written, in which types, how far it is from the source."""
    from ..report import number, size

    kinds: dict[str, int] = {}
    for t in report.tensors:
        kinds[t.type] = kinds.get(t.type, 0) + 1
    out = [f"{number(p)}  {size(p.stat().st_size)}" for p in report.paths]
    version = f" {report.version}" if report.version else ""
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    route = f"{report.source_format} -> {report.format}{version}, arch {report.arch}"
    out.append(f"  {route}, {len(report.tensors)} tensors: {counts}")
    changed = [t for t in report.tensors if t.stats]
    if changed:
        worst = max(changed, key=lambda t: t.max_error)
        out.append(f"  largest change {worst.max_error:.3g} in {worst.name} (rms {worst.rms_error:.3g})")
        lost = sum(t.stats.underflows for t in changed if t.type in ("F16", "BF16"))
        if lost:
            out.append(f"  {lost:,} values too small for the type became 0")
    out += [f"  {number(line)}" for line in report.done]
    return out + [f"  note: {number(note)}" for note in report.notes]

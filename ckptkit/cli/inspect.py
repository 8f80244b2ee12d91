"""ckptkit inspect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .common import CONTEXT, PATH, check_together, json_option, opened, progress, reading, show, show_json


@click.command(context_settings=CONTEXT)
@click.argument("file", type=PATH)
@click.option("--tensors", is_flag=True, help="List shapes, types and offsets.")
@click.option("--stats", is_flag=True, help="List min, max, mean, deviation, NaN and infinities (reads everything).")
@click.option("--key", metavar="K", help="Print one metadata value, raw.")
@click.option(
    "--diffable", is_flag=True, help="Leave out paths, sizes of files and offsets, so that diff shows changes."
)
@json_option
@reading
def inspect(
    file: Path, tensors: bool, stats: bool, key: str | None, diffable: bool, as_json: bool, **given: Any
) -> None:
    """Say what is in a checkpoint: format, architecture, sizes, types, tokenizer, and what had to be assumed.

    \b
    Example:
      ckptkit inspect model.bin --tensors
      ckptkit inspect model.gguf --key general.architecture
    """
    check_together({"key": ("tensors", "stats", "diffable", "as_json")}, {})
    from ..errors import UnsupportedError
    from ..inspect import describe

    with opened(file, given) as ck:
        if key is not None:
            if key not in ck.source.metadata:
                raise UnsupportedError(
                    "no such key", path=file, at=f"key {key}", expected=", ".join(list(ck.source.metadata)[:8]) + " ..."
                )
            raw(ck.source.metadata[key])
            return
        with progress("reading") as begin:
            step = begin(sum(t.nbytes for t in ck.tensors.values())) if stats else None
            body = describe(ck, tensors, stats, step)
    if diffable:
        body = {k: v for k, v in body.items() if k not in ("paths", "bytes")}
        for row in body.get("tensors", []):
            del row["offset"]
    if as_json:
        show_json(body)
    else:
        show(lines(body))


def raw(value: Any) -> None:
    """A metadata value as it is: text and bytes unescaped, an array one element a line."""
    value = getattr(value, "value", value)
    if isinstance(value, str):
        sys.stdout.buffer.write(value.encode("utf-8", "surrogateescape") + b"\n")
    elif hasattr(value, "__len__"):
        for element in value:
            sys.stdout.buffer.write((element if isinstance(element, bytes) else str(element).encode()) + b"\n")
    else:
        sys.stdout.buffer.write(f"{value}\n".encode())
    sys.stdout.buffer.flush()


def lines(body: dict[str, Any]) -> list[str]:
    """The report for people."""
    from ..report import count, number, pairs, size, table

    c, t = body["config"], body["tokenizer"]
    name = Path(body["paths"][0]).name + "  " if "paths" in body else ""
    head = f"{number(name)}{body['format']} {number(body['version'])}  arch {number(body['arch']) or 'unknown'}"
    padded = body["padded_vocab_size"]
    shown = isinstance(padded, int) and padded not in (0, c["vocab_size"])
    vocab = f"{c['vocab_size']:,}" + (f" (padded to {padded:,})" if shown else "")
    kinds = ", ".join(f"{k} {v['tensors']} tensors {size(v['bytes'])}" for k, v in body["types"].items())
    entries: list[tuple[str, Any]] = [
        (
            "parameters",
            f"{count(body['parameters'])} ({body['parameters']:,})"
            + (f" in {size(body['bytes'])}" if "bytes" in body else ""),
        ),
        ("types", kinds or "no tensors"),
        ("context", c["context_length"]),
        ("layers", c["n_layer"]),
        (
            "heads",
            f"{c['n_head']:,}"
            + (f" ({c['n_kv_head']:,} for keys and values)" if c["n_kv_head"] != c["n_head"] else "")
            + f" of {c['head_dim']:,}",
        ),
        ("widths", f"{c['n_embd']:,} embedding, {c['n_ff']:,} feed-forward"),
        ("vocabulary", vocab),
        ("norm eps", c["norm_eps"]),
    ]
    if c["rope_pairing"]:
        entries.append(
            (
                "rope",
                f"{c['rope_pairing']} pairs, base {c['rope_theta']:,.6g}"
                + (f", scaling {c['rope_scaling']}" if c["rope_scaling"] else ""),
            )
        )
    entries.append(("output", "tied to the embedding" if c["tied_output"] else "its own matrix"))
    if c["n_mtp_head"] > 1:
        entries.append(("prediction heads", c["n_mtp_head"]))
    if t:
        ids = ", ".join(f"{k} {v}" for k, v in t["special_ids"].items()) or "none"
        flags = "".join(f", {k}" for k in ("add_bos", "add_eos") if t[k])
        entries.append(
            (
                "tokenizer",
                f"{t['kind']}, {t['vocab_size']:,} tokens"
                + (f", pre {number(t['pre'])}" if t["pre"] else "")
                + f", special: {ids}{flags}",
            )
        )
        if t["chat_template"]:
            entries.append(
                ("chat template", f"{len(t['chat_template']):,} characters (--key tokenizer.chat_template shows it)")
            )
    else:
        entries.append(("tokenizer", "none"))
    out = [head, *pairs(entries)]
    out += [f"  note: {number(note)}" for note in body["notes"]]
    if "tensors" in body:
        columns = [
            k
            for k in ("name", "shape", "type", "offset", "bytes", "min", "max", "mean", "std", "nan", "inf")
            if body["tensors"] and k in body["tensors"][0]
        ]
        out += ["", *table(columns, [[row[k] for k in columns] for row in body["tensors"]])]
    return out

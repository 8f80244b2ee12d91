"""llm.c GPT-2 checkpoints, versions 1 to 5 (train_gpt2.py write_model and its history; seed 003 reads version 3).

int32[256]: 20240326 | version | context | vocab | layers | heads | embd | padded vocab (from version 3) | zeros
then every tensor, all layers of a kind together, rows (out, in), no gaps, to the end of the file.

version  weights  layer norms  vocabulary  today
1        float32  float32      as it is    read by nobody
2        bfloat16 float32      as it is    norms in place or all six at the end; the header does not tell
3        float32  float32      padded      read by llm.c
4        bfloat16 float32      padded      read by nobody
5        bfloat16 bfloat16     padded      read by llm.c

A padded vocabulary has rows up to a multiple of 128. They are tensors of their own here (token_embd.padding), so that a
writer either proves them zero or keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint, Config, Source
from ..errors import FormatError, UnsupportedError
from ..files import File, reading, replacing
from ..layout import Layout, Place, Row, end_of, places, read_sequential
from ..quant.types import QType
from ..stream import write_tensors
from ..tensor import Tensor
from .llmc_tokenizer import find_tokenizer, write_tokenizer_beside
from .options import ReadOptions, Target, WriteOptions, origin, refuse_version, uniform

NAME = "llmc"
HEEDS_LAYOUT = True
MAGIC, HEADER = 20240326, 1024
PAD = 128
MOST_PADDING = 1 << 16  # rows that another format's note of them is believed for
MIXTURES = ("f32", "bf16")

B = "blk.{i}."
QKV = ("attn_q", "attn_k", "attn_v")
ROWS = (
    Row(("token_embd.weight",), padded="token_embd.padding"),
    Row(("position_embd.weight",)),
    Row((B + "attn_norm.weight",)),
    Row((B + "attn_norm.bias",)),
    Row(tuple(f"{B}{p}.weight" for p in QKV)),
    Row(tuple(f"{B}{p}.bias" for p in QKV)),
    Row((B + "attn_output.weight",)),
    Row((B + "attn_output.bias",)),
    Row((B + "ffn_norm.weight",)),
    Row((B + "ffn_norm.bias",)),
    Row((B + "ffn_up.weight",)),
    Row((B + "ffn_up.bias",)),
    Row((B + "ffn_down.weight",)),
    Row((B + "ffn_down.bias",)),
    Row(("output_norm.weight",)),
    Row(("output_norm.bias",)),
)
IN_PLACE = Layout(ROWS, tied=True)
_F32_NORMS = tuple(replace(r, type=QType.F32) if "norm" in r.ours[0] else r for r in ROWS)
F32_NORMS = Layout(_F32_NORMS, tied=True)
NORMS_LAST = Layout(tuple(sorted(_F32_NORMS, key=lambda r: r.type is not None)), tied=True)
LAYOUTS = {"gpt2": IN_PLACE}


@dataclass(frozen=True)
class Version:
    """What a version number means."""

    type: QType
    padded: bool
    layouts: dict[str, Layout]


VERSIONS = {
    1: Version(QType.F32, False, {"in-place": IN_PLACE}),
    2: Version(QType.BF16, False, {"in-place": F32_NORMS, "norms-last": NORMS_LAST}),
    3: Version(QType.F32, True, {"in-place": IN_PLACE}),
    4: Version(QType.BF16, True, {"in-place": F32_NORMS}),
    5: Version(QType.BF16, True, {"in-place": IN_PLACE}),
}
plan = uniform


def detect(_path: Path, head: bytes, _size: int) -> bool:
    """By the magic number."""
    return head[:4] == MAGIC.to_bytes(4, "little")


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Read the header and place the tensors; FormatError where sizes do not add up to the file."""
    return reading(path, lambda file: _read(file, options))


def _read(file: File, options: ReadOptions) -> Checkpoint:
    header = file.ints(0, HEADER // 4, at="header").tolist()
    if header[1] not in VERSIONS:
        raise UnsupportedError(
            "this version of an llm.c checkpoint is not known",
            path=file.path,
            offset=4,
            expected="1 to 5",
            got=header[1],
        )
    version = VERSIONS[header[1]]
    context, vocab, n_layer, n_head, n_embd = header[2:7]
    padded = header[7] if version.padded else vocab
    config = Config(
        "gpt2",
        context_length=context,
        vocab_size=vocab,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_head,
        n_embd=n_embd,
        n_ff=4 * n_embd,
        head_dim=n_embd // n_head if n_head > 0 else 0,
        norm_eps=options.norm_eps or 1e-5,
        tied_output=True,
    )
    config.check(file.path, 8)
    if n_embd % n_head:
        raise FormatError(
            "channels do not divide into heads",
            path=file.path,
            offset=20,
            expected="embd % heads == 0",
            got=f"{n_embd} % {n_head}",
        )
    if padded < vocab:
        raise FormatError(
            "the padded vocabulary is too small", path=file.path, offset=28, expected=f">= {vocab:,}", got=f"{padded:,}"
        )
    notes: list[str] = []
    first = next(iter(version.layouts.values()))
    end = end_of(first, config, HEADER, version.type, padded - vocab)
    if end != file.size:
        raise _wrong_size(file, header, end)
    if options.layout and options.layout not in version.layouts:
        raise UnsupportedError(
            "no such layout", path=file.path, expected=" or ".join(version.layouts), got=options.layout
        )
    layout, found = "in-place", places(first, config, HEADER, version.type, padded - vocab)[0]
    if len(version.layouts) > 1:
        layout, found = _settle(version, config, file, options.layout, padded - vocab)
        notes.append(
            f"version 2 has two layouts and the header does not tell: took {layout}"
            + (" as given" if options.layout else "")
        )
    if header[7] and not version.padded:
        notes.append(f"header slot 7 is {header[7]} though version {header[1]} has no padded vocabulary; ignored")
    tokenizer, paths, said = find_tokenizer(file.path, config.vocab_size, options.tokenizer)
    metadata = {
        "llmc_version": f"{header[1]}" + ("" if layout == "in-place" else f"-{layout}"),
        "padded_vocab_size": padded,
    }
    source = Source((file.path, *paths), NAME, f"version {header[1]}", metadata, tuple([*notes, *said]))
    return Checkpoint(config, read_sequential(found, config, file), tokenizer, source, (file,))


def _settle(version: Version, config: Config, file: File, given: str, n_padding: int) -> tuple[str, list[Place]]:
    """Choose the layout whose norm gains look like gains: finite, positive but for a few, around one."""
    fits: dict[str, list[Place]] = {}
    for name, layout in version.layouts.items():
        found, _ = places(layout, config, HEADER, version.type, n_padding)
        if name == given:
            return name, found
        gains = [p for p in found if p.row.ours[0].endswith("norm.weight")]
        values = np.concatenate([file.read(p.offset, 4 * config.n_embd, "norm gains").view("<f4") for p in gains])
        # read at the wrong place they are pairs of bfloat16 weights: as often negative as positive
        if np.isfinite(values).all() and (values > 0).mean() > 0.9 and 0.05 < np.median(values) < 20:
            fits[name] = found
    if given or len(fits) != 1:
        raise UnsupportedError(
            "which of version 2's two layouts this is cannot be told from the norms",
            path=file.path,
            offset=HEADER,
            expected="norm gains around 1 in just one layout",
            got=" and ".join(fits) or "none",
            hint="pass --layout in-place or norms-last",
        )
    return next(iter(fits.items()))


def _wrong_size(file: File, header: list[int], end: int) -> FormatError:
    hint = "the file was cut, or its header is wrong"
    for number, version in VERSIONS.items():
        itemsize, other = (4 if v.type == QType.F32 else 2 for v in (VERSIONS[header[1]], version))
        if itemsize != other and (end - HEADER) * other == (file.size - HEADER) * itemsize:
            hint = f"the size fits version {number}, but the header says version {header[1]}"
    return FormatError(
        "the sizes in the header do not add up to the file",
        path=file.path,
        offset=HEADER,
        at="start of parameters",
        expected=f"{end:,} bytes in all",
        got=f"{file.size:,}",
        hint=hint,
    )


def targets(ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """The versions to try, in order: the one the model came from, then what llm.c reads today, narrow before wide."""
    vocab = ck.config.vocab_size
    padded = origin(ck.source, "padded_vocab_size")
    kept = isinstance(padded, int) and vocab <= padded <= vocab + MOST_PADDING
    n_padding = padded - vocab if kept else -vocab % PAD
    known = {
        str(number) + ("" if name == "in-place" else f"-{name}"): Target(
            str(number), layout, QType(version.type).name.lower(), n_padding if version.padded else 0
        )
        for number, version in VERSIONS.items()
        for name, layout in version.layouts.items()
    }
    if options.version:
        if options.version not in known:
            raise refuse_version(ck.source.paths[0], options.version, tuple(known))
        return [known[options.version]]
    came_from = f"{origin(ck.source, 'llmc_version')}"
    return [known[k] for k in dict.fromkeys((came_from, "5", "3")) if k in known]


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> tuple[Path, ...]:
    """Write the version that was planned, and the tokenizer beside it where there is one and none stands there."""
    c = ck.config
    if c.n_ff != 4 * c.n_embd or c.head_dim * c.n_head != c.n_embd:
        raise UnsupportedError(
            "llm.c has no place for these widths",
            path=path,
            expected="n_ff = 4 n_embd and n_embd = heads x head_dim",
            got=f"n_ff {c.n_ff}, n_embd {c.n_embd}, {c.n_head} heads of {c.head_dim}",
        )
    number = int(options.version)
    header = np.zeros(HEADER // 4, "<i4")
    header[:7] = MAGIC, number, c.context_length, c.vocab_size, c.n_layer, c.n_head, c.n_embd
    header[7] = next(iter(stored.values())).n_rows if VERSIONS[number].padded else 0
    with replacing(path) as out:
        out.write(header.tobytes())
        write_tensors(out, stored.values())
    return (path, *write_tokenizer_beside(path, ck.tokenizer))

"""llama2.c checkpoints (karpathy/llama2.c export.py, run.c, runq.c): versions 0, 1 and 2.

v0  int32[7] sizes | float32 tensors, two RoPE tables before the classifier
v1  u32 0x616B3432 | int32 1 | int32[7] sizes | u8 shared classifier | zeros to 256 | float32 tensors
v2  u32 0x616B3432 | int32 2 | int32[7] sizes | u8 shared classifier | int32 group size (at byte 37) | zeros to 256
    | float32 norms | per matrix and layer: int8 values, then a float32 scale for each group

sizes: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len; in version 0 a negative vocab_size says
that a classifier follows, otherwise the embedding is used again.

v0: tok_emb | rms_att | wq | wk | wv | wo | rms_ffn | w1 (gate) | w2 (down) | w3 (up) | rms_final | cos | sin | [wcls]
v1: rms_att | rms_ffn | rms_final | tok_emb | wq | wk | wv | wo | w1 | w2 | w3 | [wcls]; v2 the same

All layers of a kind lie together. Rotary pairs are adjacent; base 10000 and epsilon 1e-5 are the program's. Version 0
has no magic number: it is recognised because its sizes add up to the file exactly.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..checkpoint import Checkpoint, Config, Source
from ..errors import CkptError, FormatError, UnsupportedError
from ..files import Bytes, File, reading, replacing
from ..layout import Layout, Place, Row, end_of, in_order, places, read_sequential, unpack
from ..layout import at as named
from ..quant.types import QType
from ..stream import write_tensors
from ..tensor import Tensor, from_array
from .llama2c_tokenizer import find_tokenizer, write_tokenizer_beside
from .options import ReadOptions, Target, WriteOptions, chosen, origin, refuse_version, uniform

NAME = "llama2c"
MAGIC = 0x616B3432
MIXTURES = ("f32",)
START = {0: 28, 1: 256, 2: 256}
SIZES_AT = {0: 0, 1: 8, 2: 8}
GROUP_AT = 37
EPS, THETA = 1e-5, 10000.0

B = "blk.{i}."
EMBEDDING, OUTPUT, LAST_NORM = Row(("token_embd.weight",)), Row(("output.weight",)), Row(("output_norm.weight",))
NORMS = (Row((B + "attn_norm.weight",)), Row((B + "ffn_norm.weight",)))
ATTENTION = tuple(Row((f"{B}{part}.weight",)) for part in ("attn_q", "attn_k", "attn_v", "attn_output"))
FFN = tuple(Row((f"{B}{part}.weight",)) for part in ("ffn_gate", "ffn_down", "ffn_up"))
V0 = Layout((EMBEDDING, NORMS[0], *ATTENTION, NORMS[1], *FFN, LAST_NORM, OUTPUT), rope_pairing="adjacent")
V1 = Layout((*NORMS, LAST_NORM, EMBEDDING, *ATTENTION, *FFN, OUTPUT), rope_pairing="adjacent")
VERSIONS = {0: V0, 1: V1, 2: V1}
LAYOUTS = {"llama": V0}
plan = uniform


def detect(path: Path, head: bytes, size: int) -> bool:
    """By the magic number; version 0 by the exact size of the file."""
    if head[:4] == MAGIC.to_bytes(4, "little"):
        return True
    if len(head) < START[0]:
        return False
    try:
        config = _config(path, struct.unpack_from("<7i", head), 0, True)
    except CkptError:
        return False
    return _end(0, config) == size


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Read the header and place the tensors; those of version 2 are decoded to float32 when they are read."""
    return reading(path, lambda file: _read(file, options))


def _config(path: Path, sizes: tuple[int, ...], offset: int, signed: bool) -> Config:
    """The config that the seven sizes stand for; in version 0 the sign of the vocabulary says whether it is tied."""
    dim, hidden, n_layer, n_head, n_kv_head, vocab, seq = sizes
    config = Config(
        "llama",
        context_length=seq,
        vocab_size=-vocab if signed and vocab < 0 else vocab,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_embd=dim,
        n_ff=hidden,
        head_dim=dim // n_head if n_head > 0 else 0,
        norm_eps=EPS,
        rope_theta=THETA,
        rope_pairing="adjacent",
        tied_output=vocab > 0,
    )
    config.check(path, offset)
    if dim % n_head:
        raise FormatError(
            "channels do not divide into heads", path=path, offset=offset, expected="dim a multiple of n_heads",
            got=f"dim {dim}, n_heads {n_head}",
        )  # fmt: skip
    return config


def _end(version: int, config: Config) -> int:
    """Where a version 0 or 1 file ends."""
    tables = 4 * config.context_length * config.head_dim if version == 0 else 0
    return end_of(VERSIONS[version], config, START[version], QType.F32) + tables


def _read(file: File, options: ReadOptions) -> Checkpoint:
    path, notes = file.path, list[str]()
    magic, version = file.ints(0, 2, "<u4", "header").tolist()
    version = version if magic == MAGIC else 0
    if version not in VERSIONS or (magic == MAGIC and not version):
        raise UnsupportedError(
            "unknown version of a llama2.c file", path=path, offset=4, expected="1 or 2", got=version
        )
    offset = SIZES_AT[version]
    config = _config(path, tuple(file.ints(offset, 7, at="header").tolist()), offset, version == 0)
    metadata: dict[str, object] = {"llama2c_version": str(version)}
    group = 0
    if version:
        shared = int(file.read(36, 1, "shared classifier")[0])
        if shared > 1:
            raise FormatError(
                "shared_classifier is no truth value", path=path, offset=36, expected="0 or 1", got=shared
            )
        config = replace(config, tied_output=bool(shared))
        used = 37 if version == 1 else 41
        if file.read(used, START[version] - used, "header").any():
            raise FormatError(
                "the rest of the header is not zero", path=path, offset=used, expected=f"zeros to byte {START[version]}"
            )
    else:
        notes.append("no magic number; recognised because the sizes add up")
    if version == 2:
        group = int(file.ints(GROUP_AT, 1, at="group size")[0])
        config.check(path, offset)
        tensors = _read_groups(file, config, group)
        metadata["group_size"] = group
        notes.append(f"int8 in groups of {group}: decoded to float32")
    else:
        if _end(version, config) != file.size:
            raise _wrong_size(file, version, config, _end(version, config))
        found, _ = places(VERSIONS[version], config, START[version], QType.F32)
        if version == 0:
            found = _past_tables(file, config, found, notes)
        tensors = read_sequential(found, config, file)
    eps = chosen(options.norm_eps, EPS, EPS, "norm_eps", notes)
    theta = chosen(options.rope_theta, THETA, THETA, "rope_theta", notes)
    config = replace(config, norm_eps=eps, rope_theta=theta)
    config.check(path)
    tokenizer, paths, said = find_tokenizer(path, config.vocab_size, options.tokenizer)
    source = Source((path, *paths), NAME, f"version {version}", metadata, (*notes, *said))
    return Checkpoint(config, tensors, tokenizer, source, (file,))


def _wrong_size(file: File, version: int, config: Config, end: int) -> FormatError:
    other = _end(version, replace(config, tied_output=not config.tied_output))
    hint = "the file was cut, or its header is wrong"
    if other == file.size:
        hint = f"the size fits a classifier that is {'stored' if config.tied_output else 'shared'}, against the header"
    return FormatError(
        "the sizes in the header do not add up to the file", path=file.path, offset=START[version],
        at="start of parameters", expected=f"{end:,} bytes in all", got=f"{file.size:,}", hint=hint,
    )  # fmt: skip


# ---------------------------------------------------------------- version 0's RoPE tables


def rope_tables(context: int, head_dim: int) -> npt.NDArray[np.float32]:
    """cos, then sin, (2, context, head_dim / 2), rounded to float32 at every step as the exporter does."""
    steps = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    power = np.power(THETA, steps.astype(np.float32).astype(np.float64)).astype(np.float32)
    angles = np.arange(context, dtype=np.float32)[:, None] * (np.float32(1) / power)
    wide = angles.astype(np.float64)
    return np.stack([np.cos(wide), np.sin(wide)]).astype(np.float32)


def _past_tables(file: File, config: Config, found: list[Place], notes: list[str]) -> list[Place]:
    """The places with the classifier moved behind the tables; a note if those are not the program's."""
    context, half = config.context_length, config.head_dim // 2
    start = max(p.offset + 4 * prod(p.shape) for p in found if p.row is not OUTPUT)
    if context > 1:  # the second row shows the base
        rows = [file.read(start + 4 * half * (n * context + 1), 4 * half, "RoPE tables").view("<f4") for n in (0, 1)]
        if not np.allclose(rows, rope_tables(2, config.head_dim)[:, 1], rtol=0, atol=1e-4):
            notes.append("the RoPE tables in the file are not those of base 10,000; run.c ignores them, and so do we")
    moved = 8 * context * half
    return [replace(p, offset=p.offset + moved) if p.row is OUTPUT else p for p in found]


# ---------------------------------------------------------------- version 2


def _read_groups(file: File, config: Config, group: int) -> dict[str, Tensor]:
    """Tensors of version 2: norms as they are, matrices decoded from groups of `group` int8 values."""
    norms = Layout(V1.rows[:3])
    start = end_of(norms, config, START[2], QType.F32)
    rest = Layout(tuple(r for r in V1.rows[3:] if not (r is OUTPUT and config.tied_output)))
    n_values = end_of(rest, config, 0, QType.I8)
    end = start + n_values + (4 * (n_values // group) if group > 0 else 0)
    found, _ = places(norms, config, START[2], QType.F32) if end == file.size else ([], 0)
    sizes = [prod(p.shape) for p in places(rest, replace(config, n_layer=1), 0, QType.I8)[0]]
    if group < 1 or any(n % group for n in sizes) or end != file.size:
        raise FormatError(
            "sizes and group size in the header do not add up to the file", path=file.path, offset=GROUP_AT,
            at="group size", expected=f"{end:,} bytes in all, every matrix a whole number of groups",
            got=f"{file.size:,} bytes, groups of {group}", hint="the file was cut, or its header is wrong",
        )  # fmt: skip
    tensors = read_sequential(found, config, file)
    offset = start
    for p in places(rest, config, 0, QType.I8)[0]:
        n = prod(p.shape)
        name = named(p.row.ours[0], p.index)
        stored = from_groups(file, offset, p.shape, group, name)
        tensors.update(unpack(p.row, config, stored, p.index))
        offset += n + 4 * (n // group)
    return in_order(tensors, config)


def from_groups(file: File, offset: int, shape: tuple[int, ...], group: int, at: str) -> Tensor:
    """A float32 tensor over int8 values at `offset` and the float32 scales behind them, one for each `group` values."""
    width, scales = shape[-1], offset + prod(shape)

    def rows(lo: int, hi: int) -> Bytes:
        first, last = lo * width // group, -(-hi * width // group)  # a group may straddle rows
        q = file.read(offset + first * group, (last - first) * group, at).view(np.int8)
        s = file.read(scales + 4 * first, 4 * (last - first), at).view("<f4")
        values = q.reshape(-1, group).astype(np.float32) * s[:, None]
        skip = lo * width - first * group
        wanted: Bytes = values.reshape(-1)[skip : skip + (hi - lo) * width].copy().view(np.uint8)
        return wanted.reshape(hi - lo, 4 * width)

    origin = {"op": "int8_groups", "file": file.path.name, "offset": offset, "scales": scales, "group": group}
    return Tensor(shape, QType.F32, rows, None, origin | {"shape": list(shape)})


# ---------------------------------------------------------------- writing


def targets(ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """Version 0, which run.c reads, or the one that the model came from or the user named."""
    known = {"0": V0, "1": V1}
    if options.version and options.version not in known:
        raise refuse_version(ck.source.paths[0], options.version, tuple(known))
    found = str(origin(ck.source, "llama2c_version"))
    version = options.version or (found if found in known else "0")
    return [Target(version, known[version], "f32")]


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> tuple[Path, ...]:
    """Write version 0 or 1, and the tokenizer beside it where its file can hold it."""
    c = ck.config
    fixed: dict[str, tuple[object, object]] = {
        "norm_eps": (np.float32(EPS), np.float32(c.norm_eps)),
        "rope_theta": (THETA, c.rope_theta),
        "rope_scaling": (None, c.rope_scaling),
        "head_dim": (c.n_embd // c.n_head, c.head_dim),
        "sliding_window": (0, c.sliding_window),
    }
    for name, (expected, got) in fixed.items():
        if expected != got:
            raise UnsupportedError(f"llama2.c has no place for another {name}", path=path, expected=expected, got=got)
    tied, version = "output.weight" not in stored, int(options.version or 0)
    sizes = [c.n_embd, c.n_ff, c.n_layer, c.n_head, c.n_kv_head, c.vocab_size, c.context_length]
    if version == 0:
        sizes[5] *= 1 if tied else -1
        head = struct.pack("<7i", *sizes)
    else:
        head = struct.pack("<Ii7iB", MAGIC, version, *sizes, tied).ljust(START[version], b"\0")
    with replacing(path) as out:
        out.write(head)
        body = [t for name, t in stored.items() if name != "output.weight"]
        if version == 0:
            body.append(from_array(rope_tables(c.context_length, c.head_dim), QType.F32))
        write_tensors(out, body + ([] if tied else [stored["output.weight"]]))
    return (path, *write_tokenizer_beside(path, ck.tokenizer))

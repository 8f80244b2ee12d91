"""GGUF checkpoints: which keys mean what, and which tensors stand where (docs/gguf.md of ggml; llama.cpp's loader).

The container is in gguf_io, the tokenizer's keys in gguf_tokenizer. Names of tensors are ours but for GPT-2's fused
attn_qkv. Any architecture can be read and rewritten as it stands; those in LAYOUTS can be converted and run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..arch import ARCHS
from ..checkpoint import Checkpoint, Config, RopeScaling, Source
from ..errors import FormatError, UnsupportedError
from ..files import File, replacing
from ..layout import Layout, at, identity, in_order, indices, read_named
from ..quant import policy
from ..quant.types import BLOCKS, QType
from ..stream import write_tensors
from ..tensor import Tensor, from_array
from . import gguf_tokenizer
from .gguf_io import (
    ALIGNMENT,
    MAGIC,
    Header,
    Kind,
    Value,
    header_bytes,
    read_header,
    shard_path,
    tensors,
)
from .gguf_keys import FIELDS, all_keys, number, text, vocabulary_keys, whole
from .gguf_known import NORM_EPS, T
from .options import ReadOptions, Target, WriteOptions, chosen, refuse_version

NAME = "gguf"
VERSION = "3"  # the one that is written
MIXTURES = tuple(name.lower() for name in policy.MIXTURES)
OPTIONS = ("split_max_size", "write_output", "name", "metadata", "remove")

B = "blk.{i}."
FUSED = {f"{B}attn_qkv.{kind}": tuple(f"{B}attn_{p}.{kind}" for p in "qkv") for kind in ("weight", "bias")}
LAYOUTS: dict[str, Layout] = {
    "gpt2": identity("gpt2", fused=FUSED),
    "llama": identity("llama", "adjacent"),
    "qwen2": identity("qwen2", "half"),
    "microgpt": identity("microgpt"),
}
SIDECAR = True  # extra prediction heads lie beside the file
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 9999
MAX_MTP_HEADS = 4096

DEFAULT_EPS = {"qwen2": 1e-6}
DEFAULT_CONTEXT = 2048


def detect(_path: Path, head: bytes, _size: int) -> bool:
    """By the magic number."""
    return head[:4] == MAGIC


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Read the keys and tensor infos of a file, or of all shards of a split one."""
    files: list[File] = []
    try:
        return _read(path, options, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _read(path: Path, options: ReadOptions, files: list[File]) -> Checkpoint:
    headers: list[Header] = []
    found: dict[str, Tensor] = {}
    for shard, header in open_shards(path, files):
        headers.append(header)
        for name, t in tensors(header, shard).items():
            if name in found:
                raise FormatError("two shards hold the same tensor", path=shard.path, got=name)
            found[name] = t
    keys = headers[0].keys
    notes: list[str] = []
    config, arranged = _arrange(keys, found, options, notes, path)
    if options.tokenizer:
        keys = {k: v for k, v in keys.items() if not k.startswith("tokenizer.")}
    tokenizer = gguf_tokenizer.read(keys, path) if "tokenizer.ggml.model" in keys else None
    if tokenizer is None and not options.tokenizer:
        notes.append("no tokenizer in the file; --tokenizer gives one")
    if "general.architecture" not in keys:
        notes.append("general.architecture is missing")
    metadata: dict[str, Any] = {k: v for k, v in keys.items() if not k.startswith("split.")}
    version = f"version {headers[0].version}" + (f", {len(files)} shards" if len(files) > 1 else "")
    source = Source(tuple(f.path for f in files), NAME, version, metadata, tuple(notes), tuple(found))
    return Checkpoint(config, arranged, tokenizer, source, tuple(files))


def open_shards(path: Path, files: list[File]) -> list[tuple[File, Header]]:
    """The file, or every shard that its name and its key split.count promise, opened into `files`; and their headers.

    Names come from the path alone. Raises FormatError where the name does not say which shard this is, or some miss.
    """
    files.append(File(path))
    named = SPLIT_NAME.fullmatch(path.name)
    header = read_header(files[0])
    count = whole(header.keys, "split.count", path) or 1
    if count == 1:
        return [(files[0], header)]
    if not named or int(named[3]) != count or count > MAX_SHARDS:
        raise FormatError(
            "a shard whose name does not say which",
            path=path,
            expected=f"NAME-00001-of-{count:05d}.gguf",
            got=path.name,
            hint="give the shards the names they were written under",
        )
    names = [path.with_name(f"{named[1]}-{k + 1:05d}-of-{count:05d}.gguf") for k in range(count)]
    missing = [n.name for n in names if not n.exists()]
    if missing:
        raise FormatError(f"{len(missing)} of {count} shards are missing", path=path, got=", ".join(missing[:4]))
    files[0].close()
    files[:] = [File(n) for n in names]
    return [(file, read_header(file)) for file in files]


def _arrange(
    keys: dict[str, Value], found: dict[str, Tensor], options: ReadOptions, notes: list[str], path: Path
) -> tuple[Config, dict[str, Tensor]]:
    """Config from the keys and tensors under canonical names; of an unknown arch, as they are."""
    arch = text(keys, "general.architecture")
    stored = {ours: whole(keys, f"{arch}.{key}", path) for ours, key in FIELDS.items() if ours != "rope_theta"}
    theta = number(keys.get(f"{arch}.rope.freq_base"))
    embedding = found.get("token_embd.weight")
    tokens = keys.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens.value) if tokens and tokens.kind == Kind.ARRAY else whole(keys, f"{arch}.vocab_size", path)
    vocab_size = embedding.shape[0] if embedding else n_tokens
    if arch not in LAYOUTS or not found:
        sizes = ("context_length", "n_embd", "n_layer", "n_ff", "n_head", "n_kv_head", "head_dim")
        facts: dict[str, Any] = {k: stored[k] for k in sizes}
        facts["head_dim"] = facts["head_dim"] or (facts["n_embd"] // facts["n_head"] if facts["n_head"] else 0)
        eps = next((v for k in NORM_EPS.values() if (v := number(keys.get(f"{arch}.{k}")))), 0.0)
        return Config(arch, vocab_size=vocab_size, norm_eps=eps, rope_theta=theta or 10000.0, **facts), found
    traits = ARCHS[arch]
    if stored["n_layer"] > len(found):
        raise FormatError(
            "more layers than tensors",
            path=path,
            at=f"key {arch}.block_count",
            expected=f"at most {len(found)}",
            got=f"{stored['n_layer']:,}",
        )
    positions = found.get("position_embd.weight")
    context = positions.shape[0] if positions else DEFAULT_CONTEXT
    rope = traits.position == "rope"
    n_head = stored["n_head"]
    eps = number(keys.get(f"{arch}.{NORM_EPS[traits.norm]}"))
    config = Config(
        arch,
        context_length=chosen(options.context_length, stored["context_length"], context, "context_length", notes),
        vocab_size=vocab_size,
        n_layer=stored["n_layer"],
        n_head=n_head,
        n_kv_head=stored["n_kv_head"] or n_head,
        n_embd=stored["n_embd"],
        n_ff=stored["n_ff"],
        head_dim=stored["head_dim"] or (stored["n_embd"] // n_head if n_head else 0),
        norm_eps=chosen(options.norm_eps, eps, DEFAULT_EPS.get(arch, 1e-5), "norm_eps", notes),
        rope_theta=chosen(options.rope_theta, theta, 10000.0, "rope_theta", notes) if rope else 10000.0,
        rope_pairing=LAYOUTS[arch].rope_pairing,
        sliding_window=stored["sliding_window"],
        n_mtp_head=whole(keys, "ckptkit.mtp_heads", path) or 1,
        tied_output="output.weight" not in found,
    )
    config.check(path)
    if rope:
        config = replace(config, rope_scaling=_scaling(arch, keys, found.get("rope_freqs.weight"), config, path))
    if config.n_mtp_head > MAX_MTP_HEADS:
        raise FormatError("too many prediction heads", path=path, at="key ckptkit.mtp_heads", got=config.n_mtp_head)
    for name in ("rope.dimension_count", "attention.value_length"):
        value = whole(keys, f"{arch}.{name}", path)
        if value and value != config.head_dim:
            raise UnsupportedError(
                "heads of which only a part is rotated, or whose values have another size",
                path=path,
                at=f"key {arch}.{name}",
                expected=config.head_dim,
                got=value,
            )
    layout = LAYOUTS[arch]
    if f"{at(B, 0)}attn_qkv.weight" in found and arch != "gpt2":
        layout = identity(arch, layout.rope_pairing, fused=FUSED)
    used: set[str] = set()

    def fetch(name: str) -> Tensor | None:
        used.add(name)
        return found.get(name)

    _check_fused(layout, config, found, path)
    arranged = read_named(layout, config, fetch)
    return config, in_order(arranged | {n: t for n, t in found.items() if n not in used}, config)


def _check_fused(layout: Layout, config: Config, found: Mapping[str, Tensor], path: Path) -> None:
    """A fused tensor must have all the rows that it will be cut into."""
    n_rows = (config.n_head + 2 * config.n_kv_head) * config.head_dim
    for row in layout.rows:
        for index in indices(row, config) if len(row.ours) > 1 else ():
            t = found.get(at(row.theirs, index))
            if t is not None and t.shape[0] != n_rows:
                raise FormatError(
                    f"tensor {at(row.theirs, index)} has another shape",
                    path=path,
                    expected=f"{n_rows} rows",
                    got=t.shape,
                )


def _published(factors: Tensor, config: Config) -> RopeScaling | None:
    """The rule of Llama 3.1 to 3.3 that gives these divisors; None if none does, and the divisors stay a tensor."""
    if factors.type != QType.F32 or factors.n_elements != config.head_dim // 2:
        return None
    values = factors.read().view("<f4").reshape(-1)
    for factor in (8.0, 32.0):
        scaling = RopeScaling("llama3", factor, 1.0, 4.0, 8192)
        if np.allclose(values, scaling.factors(config.head_dim, config.rope_theta), rtol=1e-6, atol=0):
            return scaling
    return None


def _scaling(
    arch: str, keys: Mapping[str, Value], factors: Tensor | None, config: Config, path: Path
) -> RopeScaling | None:
    kind = text(keys, f"{arch}.rope.scaling.type")
    factor = number(keys.get(f"{arch}.rope.scaling.factor")) or number(keys.get(f"{arch}.rope.scale_linear"))
    if kind in ("", "none") and not (factor and factor != 1):
        return None if factors is None else _published(factors, config)
    if factor and not 0 < factor < float("inf"):
        raise FormatError(
            "the rope scaling cannot be", path=path, at=f"key {arch}.rope.scaling.factor", expected="a positive number",
            got=factor,
        )  # fmt: skip
    original = whole(keys, f"{arch}.rope.scaling.original_context_length", path)
    return RopeScaling(kind or "linear", float(factor or 1), original_context=original)


def notes(ck: Checkpoint) -> list[str]:
    """What other engines will make of a file written from `ck`."""
    found = []
    if ck.config.arch == "microgpt":
        found.append("arch microgpt is known to ckptkit alone: no other engine loads this GGUF")
    if ck.tokenizer is not None and f"{T}model" not in ck.source.metadata:
        found += gguf_tokenizer.notes(ck.tokenizer)
    return found


def check_vocabulary(ck: Checkpoint, options: WriteOptions) -> None:
    """Raise FormatError where the file to write would hold a malformed vocabulary, all keys set and removed."""
    if ck.tokenizer is not None and f"{T}model" not in ck.source.metadata:
        ck.tokenizer.check_vocabulary()
    gguf_tokenizer.check_vocabulary(vocabulary_keys(ck, options), ck.source.paths[0])


def targets(ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """One way: version 3. Without a type asked for, tensors keep theirs, but for vectors, which become F32."""
    if options.version not in ("", VERSION):
        raise refuse_version(ck.source.paths[0], options.version, (VERSION,))
    layout = LAYOUTS.get(ck.config.arch) or Layout(())
    if options.write_output:
        layout = replace(layout, tied=False)
    return [Target(VERSION, layout, options.mixture)]


def plan(config: Config, stored: Mapping[str, Tensor], mixture: str, pure: bool) -> dict[str, QType]:
    """Types by the mixture's rules; without one, as they are. Vectors are F32 in any case: llama.cpp adds no others.

    What no mixture quantises (positions) keeps its type, as with llama-quantize.
    """
    half = (QType.F16, QType.BF16)
    kept = {n: QType.F32 if t.type in half and t.n_elements == t.shape[-1] else t.type for n, t in stored.items()}
    if mixture:
        shapes = [(name, t.shape) for name, t in stored.items()]
        types = policy.plan(
            shapes,
            mixture,
            pure=pure,
            arch=config.arch,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_kv_head=config.n_kv_head,
            stored={n: QType.F32 if type == QType.F64 else type for n, type in kept.items()},
        )
        base = BLOCKS[policy.mixture(mixture).base].elements
        if base > 1 and all(BLOCKS[types[n]].elements == 1 for n, shape in shapes if policy.quantisable(n, shape)):
            widths = sorted({shape[-1] for n, shape in shapes if policy.quantisable(n, shape)})
            raise UnsupportedError(
                f"no matrix of this model can be stored as {mixture}",
                expected=f"rows of a multiple of {base}, or of 32 for what stands in",
                got=f"rows of {', '.join(f'{w:,}' for w in widths[:6])}",
                hint="--type f16 or bf16 stores rows of any length",
            )
        return types
    return kept


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> tuple[Path, ...]:
    """Write version 3, in shards of at most `split_max_size` bytes of tensors if asked; a lone file keeps its name."""
    shards = _shards(ck, stored, path, options)
    stored = {name: t for shard in shards for name, t in shard.items()}
    keys = all_keys(ck, stored, path, options)
    paths = outputs(ck, stored, path, options)
    for k, (shard, where) in enumerate(zip(shards, paths, strict=True)):
        split = {
            "split.no": Value(Kind.U16, k),
            "split.count": Value(Kind.U16, len(shards)),
            "split.tensors.count": Value(Kind.I32, len(stored)),
        }
        try:
            with replacing(where) as out:
                out.write(header_bytes((keys if k == 0 else {}) | (split if len(shards) > 1 else {}), shard))
                write_tensors(out, shard.values(), ALIGNMENT)
        except BaseException:
            for written in paths[:k]:  # shards are one file: without the rest they are of no use
                written.unlink(missing_ok=True)
            raise
    return paths


def outputs(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> tuple[Path, ...]:
    """The files that `write` makes."""
    count = len(_shards(ck, stored, path, options))
    return tuple(shard_path(path, k, count) for k in range(count))


def _shards(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> list[dict[str, Tensor]]:
    """Tensors of every shard; Llama 3.1's rope factors, which llama.cpp reads from a tensor, come first."""
    stored = dict(stored)
    scaling = ck.config.rope_scaling
    if scaling and scaling.type == "llama3" and "rope_freqs.weight" not in stored:
        factors = from_array(scaling.factors(ck.config.head_dim, ck.config.rope_theta), QType.F32)
        stored = {"rope_freqs.weight": factors, **stored}
    shards: list[dict[str, Tensor]] = [{}]
    room = 0
    for name, t in stored.items():
        if options.split_max_size and shards[-1] and room + t.nbytes > options.split_max_size:
            shards.append({})
            room = 0
        shards[-1][name] = t
        room += t.nbytes
    if len(shards) > MAX_SHARDS:
        raise UnsupportedError("too many shards", path=path, expected=f"at most {MAX_SHARDS}", got=len(shards))
    return shards

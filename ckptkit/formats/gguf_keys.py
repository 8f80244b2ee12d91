"""The keys of a GGUF file: those that say what the model is, in llama.cpp's types, and edits of any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arch import ARCHS, majority_type
from ..checkpoint import Checkpoint, Config
from ..errors import FormatError, UnsupportedError
from ..quant import policy
from ..quant.types import PLAIN
from ..tensor import Tensor
from . import gguf_tokenizer
from .gguf_io import DTYPES, Kind, Value
from .gguf_known import CONVENTION, MODEL, NORM_EPS, kind_of
from .options import CARRIED, WriteOptions

NAME = "gguf"
# config field -> key after "{arch}."
FIELDS = {
    "context_length": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_ff": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_kv_head": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}


def number(value: Value | None) -> Any:
    """A number as people write it: a float32 in its shortest decimal form, so that 1e-05 is 1e-05."""
    if value is None or value.kind in (Kind.STRING, Kind.ARRAY):
        return None
    return float(str(np.float32(value.value))) if value.kind == Kind.F32 else value.value


def whole(keys: Mapping[str, Value], key: str, path: Path) -> int:
    """A whole number; 0 where the key is absent or no number, FormatError for a fraction, NaN or infinity."""
    value = number(keys.get(key)) or 0
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise FormatError(f"{key} is no whole number", path=path, at=f"key {key}", expected="a u32", got=value)
    return int(value)


def text(keys: Mapping[str, Any], key: str) -> str:
    """A string key, "" where it is absent or no string."""
    value = keys.get(key)
    return str(value.value) if isinstance(value, Value) and value.kind == Kind.STRING else ""


def config_keys(ck: Checkpoint) -> dict[str, Value]:
    """The keys that say what the model is, in the types that llama.cpp demands."""
    c, arch = ck.config, ck.config.arch
    traits = ARCHS[arch]
    kinds = {**MODEL, **CONVENTION}
    keys = {f"{arch}.{key}": Value(kinds[key], getattr(c, ours)) for ours, key in FIELDS.items()}
    keys[f"{arch}.{NORM_EPS[traits.norm]}"] = Value(Kind.F32, c.norm_eps)
    keys[f"{arch}.vocab_size"] = Value(Kind.U32, c.vocab_size)
    if traits.position == "rope":
        keys[f"{arch}.rope.dimension_count"] = Value(Kind.U32, c.head_dim)
        keys[f"{arch}.attention.value_length"] = Value(Kind.U32, c.head_dim)
    else:
        del keys[f"{arch}.rope.freq_base"], keys[f"{arch}.attention.key_length"]
    if not c.sliding_window:
        del keys[f"{arch}.attention.sliding_window"]
    if c.rope_scaling and c.rope_scaling.type == "linear":
        keys[f"{arch}.rope.scaling.type"] = Value(Kind.STRING, "linear")
        keys[f"{arch}.rope.scaling.factor"] = Value(Kind.F32, c.rope_scaling.factor)
    elif c.rope_scaling and c.rope_scaling.type != "llama3":
        raise UnsupportedError(f"rope scaling {c.rope_scaling.type} cannot be written to GGUF", path=ck.source.paths[0])
    return keys


def all_keys(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> dict[str, Value]:
    """Keys of the file to write: those found stay where they still say the same; what is missing is added."""
    kept = {k: v for k, v in ck.source.metadata.items() if isinstance(v, Value)}
    keys: dict[str, Value] = {}
    if ck.config.arch in ARCHS and (options.complete or not kept):
        keys["general.architecture"] = Value(Kind.STRING, ck.config.arch)
        keys["general.name"] = Value(Kind.STRING, options.name or text(kept, "general.name") or path.stem)
        if stored:
            name = options.mixture or majority_type(dict(stored)).name
            if not options.mixture and "general.file_type" in kept:
                keys["general.file_type"] = kept["general.file_type"]
            elif name.upper() in policy.MIXTURES:
                keys["general.file_type"] = Value(Kind.U32, policy.file_type(name))
            if any(t.type not in PLAIN for t in stored.values()):
                keys["general.quantization_version"] = Value(Kind.U32, 2)
            keys |= config_keys(ck)
            if ck.config.n_mtp_head > 1:
                keys["ckptkit.mtp_heads"] = Value(Kind.U32, ck.config.n_mtp_head)
        keys["ckptkit.source_format"] = Value(Kind.STRING, ck.source.format)
        for fact in CARRIED:
            value = ck.source.metadata.get(fact)
            if value is not None and not isinstance(value, Value):
                kind = Kind.U32 if isinstance(value, int) else Kind.STRING
                keys[f"ckptkit.{fact}"] = Value(kind, value)
        if "ckptkit.source_format" in kept or ck.source.format == NAME:
            del keys["ckptkit.source_format"]
        if ck.source.format == NAME and not options.name:
            keys = {k: v for k, v in keys.items() if k != "general.name" or k in kept}
        other = f"{ck.config.arch}."
        if text(kept, "general.architecture") not in ("", ck.config.arch):
            old = text(kept, "general.architecture") + "."
            kept = {k: v for k, v in kept.items() if not k.startswith(old) or k.startswith(other)}
    merged = {k: keys[k] if k in keys and not _same(keys[k], v) else v for k, v in kept.items()}
    merged |= {k: v for k, v in keys.items() if k not in merged and not (kept and _implied(k, v, merged, ck.config))}
    if ck.tokenizer is not None and "tokenizer.ggml.model" not in merged:
        merged |= gguf_tokenizer.keys(ck.tokenizer)
    if "tokenizer.ggml.model" not in merged and options.complete and ck.config.arch in ARCHS and stored:
        merged["tokenizer.ggml.model"] = Value(Kind.STRING, "no_vocab")
    merged.pop("general.alignment", None)
    layout = [k for k in options.metadata if k == "general.alignment" or k.startswith("split.")]
    if layout:
        raise UnsupportedError(
            "this key says how the file is laid out and cannot be set", path=path, at=f"key {layout[0]}"
        )
    if absent := [k for k in options.remove if k not in merged]:
        raise UnsupportedError("there is no such key to remove", path=path, at=f"key {absent[0]}")
    if options.name:
        merged["general.name"] = Value(Kind.STRING, options.name)
    return _edited(merged, kept, options.metadata, options.remove)


def vocabulary_keys(ck: Checkpoint, options: WriteOptions) -> dict[str, Value]:
    """The tokenizer's keys of the file to write, edits made."""
    kept = {k: v for k, v in ck.source.metadata.items() if isinstance(v, Value) and k.startswith("tokenizer.")}
    made = gguf_tokenizer.keys(ck.tokenizer) if ck.tokenizer is not None and "tokenizer.ggml.model" not in kept else {}
    given = {k: v for k, v in options.metadata.items() if k.startswith("tokenizer.")}
    return _edited(kept | made, kept, given, options.remove)


def _edited(
    keys: Mapping[str, Value], kept: Mapping[str, Value], given: Mapping[str, Any], remove: tuple[str, ...]
) -> dict[str, Value]:
    """Keys set, in the type that they have in `kept`, and left out."""
    values = {k: v if isinstance(v, Value) else _typed(k, v, kept.get(k)) for k, v in given.items()}
    return {k: v for k, v in {**keys, **values}.items() if k not in remove}


def _same(a: Value, b: Value) -> bool:
    """Whether two values say the same, whatever their integer width."""
    if Kind.ARRAY in (a.kind, b.kind) or Kind.STRING in (a.kind, b.kind):
        return a.kind == b.kind and a.kind == Kind.STRING and a.value == b.value
    return bool(number(a) == number(b))


def _implied(key: str, value: Value, keys: Mapping[str, Value], c: Config) -> bool:
    """Whether a file without this key says the same already, so that a rewrite need not add it."""
    arch = c.arch
    implied: dict[str, bool] = {
        f"{arch}.vocab_size": "tokenizer.ggml.tokens" in keys,
        f"{arch}.attention.head_count_kv": c.n_kv_head == c.n_head,
        f"{arch}.attention.key_length": c.head_dim * c.n_head == c.n_embd,
        f"{arch}.attention.value_length": c.head_dim * c.n_head == c.n_embd,
        f"{arch}.rope.dimension_count": arch != "llama",
        "general.file_type": bool(value.value == 0),
    }
    return implied.get(key, False)


def _typed(key: str, given: str, old: Value | None) -> Value:
    """The value of `--set key=value`: in the key's known type, or the one it has, or else the one it looks like."""
    known = kind_of(key)
    if Kind.ARRAY in (known, old.kind if old is not None else None):
        raise UnsupportedError("arrays cannot be set from the command line", at=f"key {key}")
    kind = known if known is not None or old is None else old.kind
    if kind is not None:
        return parse(key, given, kind)
    for likely in (Kind.U32, Kind.I32, Kind.F32):
        try:
            return parse(key, given, likely)
        except UnsupportedError:
            continue
    return parse(key, given, Kind.BOOL) if given in ("true", "false") else Value(Kind.STRING, given)


def parse(key: str, given: str, kind: Kind) -> Value:
    """A value of `kind` from text; UnsupportedError where the text is none."""
    try:
        if kind == Kind.STRING:
            return Value(kind, given)
        if kind == Kind.BOOL:
            return Value(kind, {"true": True, "false": False, "1": True, "0": False}[given])
        if kind in (Kind.F32, Kind.F64):
            return Value(kind, float(given))
        whole, limits = int(given, 0), np.iinfo(DTYPES[kind])
        if not limits.min <= whole <= limits.max:
            raise ValueError
        return Value(kind, whole)
    except (ValueError, KeyError):
        raise UnsupportedError(
            "not a value of the key's type", at=f"key {key}", expected=kind.name.lower(), got=given
        ) from None

"""The mends that cannot change what a model computes: types of keys, sizes that tensors tell, vocabulary, layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..errors import UnsupportedError
from ..files import check_output, replacing
from ..formats import gguf_tokenizer
from ..formats.gguf_io import ALIGNMENT, Kind, Value, header_bytes
from ..formats.gguf_keys import text
from ..formats.gguf_known import ID_KEYS, T
from ..quant.encode import encode
from ..quant.types import QType
from ..stream import write_tensors
from ..tensor import Tensor
from ..tokenizer import ByteBPE, Strings
from ..tokenizer.faults import Vocabulary, empty_name, faults
from .finding import Finding
from .keys import NEEDED, from_tensors, retyped, wanted


def mended_keys(keys: Mapping[str, Value], tensors: Mapping[str, Tensor], path: Path) -> dict[str, Value]:
    """The keys with every safe mend made."""
    arch = text(keys, "general.architecture")
    out = {k: v for k, v in keys.items() if k != "general.alignment" and not k.startswith("split.")}
    for key, kind in wanted(arch).items():
        if key in out and out[key].kind not in (kind, Kind.ARRAY):
            out[key] = retyped(out[key], kind) or out[key]
    for key in NEEDED:
        size = from_tensors(key, tensors)
        if f"{arch}.{key}" not in out and size is not None:
            out[f"{arch}.{key}"] = Value(Kind.U32, size)
    positions = tensors.get("position_embd.weight")
    if positions is not None and f"{arch}.context_length" in out:
        out[f"{arch}.context_length"] = Value(Kind.U32, positions.shape[0])
    out = mended_vocabulary(out)
    if text(out, "tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.merges" not in out:
        tokenizer = gguf_tokenizer.read(out, path)
        if isinstance(tokenizer, ByteBPE):
            out["tokenizer.ggml.merges"] = Value(Kind.ARRAY, tokenizer.merge_texts(), Kind.STRING)
    return out


def mended_vocabulary(keys: Mapping[str, Value]) -> dict[str, Value]:
    """What llama.cpp takes for it, written: names of empty tokens, no ids that no token has, nothing left unread."""
    out, tokens = dict(keys), keys.get(f"{T}tokens")
    if tokens is None or tokens.element != Kind.STRING:
        return out
    n = len(tokens.value)
    empty = {f.index for f in faults(Vocabulary(tokens.value, c_strings=True)) if f.kind == "empty"}
    if empty:
        named = (empty_name(i) if i in empty else token for i, token in enumerate(tokens.value))
        out[f"{T}tokens"] = replace(tokens, value=Strings.of(named))
    for key in ID_KEYS.values():
        if key in out and out[key].kind == Kind.U32 and out[key].value >= n:
            del out[key]
    for key in (f"{T}token_type", f"{T}scores"):
        if key in out and out[key].kind == Kind.ARRAY:
            out[key] = replace(out[key], value=out[key].value[:n])
    return out


def mend(
    keys: Mapping[str, Value], tensors: Mapping[str, Tensor], found: tuple[Finding, ...], sources: tuple[Path, ...],
    target: Path, force: bool = False,
) -> None:  # fmt: skip
    """Write the mended file; refused where the file could not be read whole, or where nothing can be mended."""
    if not any(f.fixable for f in found):
        raise UnsupportedError("nothing here can be mended safely", path=sources[0])
    check_output(target, sources, force)
    half = (QType.F16, QType.BF16)
    stored = {n: encode(t, QType.F32, n) if len(t.shape) == 1 and t.type in half else t for n, t in tensors.items()}
    head = header_bytes(mended_keys(keys, tensors, sources[0]), stored)
    with replacing(target) as out:
        out.write(head)
        write_tensors(out, stored.values(), ALIGNMENT)

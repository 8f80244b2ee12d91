"""Keys of a GGUF: which llama.cpp demands, and in exactly which type (llama-model.cpp, llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..arch import ARCHS
from ..formats.gguf import LAYOUTS
from ..formats.gguf_io import Kind, Value
from ..formats.gguf_keys import NORM_EPS, number, text
from ..formats.gguf_tokenizer import ID_KEYS, T
from ..tensor import Tensor
from .finding import ERROR, NOTE, WARNING, Finding

OURS_ALONE = ("microgpt", "nanoeuler")  # architectures that no other engine knows
# key after "{arch}.": type, whether llama.cpp demands it, whether an array (a number per layer) may stand there
SIZES: Mapping[str, tuple[Kind, bool, bool]] = {
    "context_length": (Kind.U32, True, False),
    "embedding_length": (Kind.U32, True, False),
    "block_count": (Kind.U32, True, False),
    "feed_forward_length": (Kind.U32, True, True),
    "attention.head_count": (Kind.U32, True, True),
    "attention.head_count_kv": (Kind.U32, False, True),
    "attention.key_length": (Kind.U32, False, False),
    "attention.value_length": (Kind.U32, False, False),
    "attention.layer_norm_epsilon": (Kind.F32, False, False),
    "attention.layer_norm_rms_epsilon": (Kind.F32, False, False),
    "rope.dimension_count": (Kind.U32, False, False),
    "rope.freq_base": (Kind.F32, False, False),
    "rope.scaling.factor": (Kind.F32, False, False),
    "rope.scaling.type": (Kind.STRING, False, False),
    "rope.scaling.original_context_length": (Kind.U32, False, False),
}
OTHERS: Mapping[str, Kind] = {
    "general.architecture": Kind.STRING,
    "general.alignment": Kind.U32,
    "general.file_type": Kind.U32,
    f"{T}model": Kind.STRING,
    f"{T}pre": Kind.STRING,
    f"{T}add_bos_token": Kind.BOOL,
    f"{T}add_eos_token": Kind.BOOL,
    f"{T}add_space_prefix": Kind.BOOL,
    f"{T}remove_extra_whitespaces": Kind.BOOL,
    **dict.fromkeys(ID_KEYS.values(), Kind.U32),
}
# where a size that a file does not name stands in its tensors: key, tensor, axis
FROM_TENSORS: Mapping[str, tuple[str, int]] = {
    "embedding_length": ("token_embd.weight", 1),
    "feed_forward_length": ("blk.0.ffn_up.weight", 0),
    "context_length": ("position_embd.weight", 0),
}


def wanted(arch: str) -> dict[str, Kind]:
    """Every key whose type llama.cpp insists on."""
    eps = {v for norm, v in NORM_EPS.items() if arch in ARCHS and norm != ARCHS[arch].norm}  # of the other norm
    return {f"{arch}.{key}": kind for key, (kind, _, _) in SIZES.items() if key not in eps} | dict(OTHERS)


def retyped(value: Value, kind: Kind) -> Value | None:
    """The same number as another type; None where that would change it."""
    if Kind.STRING in (value.kind, kind) or Kind.ARRAY in (value.kind, kind):
        return None
    if kind == Kind.F32 and value.kind == Kind.F64:
        return Value(kind, float(np.float32(value.value))) if abs(value.value) <= np.finfo(np.float32).max else None
    if kind == Kind.U32 and isinstance(value.value, int) and 0 <= value.value < 2**32:
        return Value(kind, int(value.value))
    if kind == Kind.BOOL and value.value in (0, 1):
        return Value(kind, bool(value.value))
    return Value(kind, float(value.value)) if kind == Kind.F32 and abs(value.value) < 2**24 else None


def from_tensors(key: str, tensors: Mapping[str, Tensor]) -> int | None:
    """A missing size as the tensors tell it."""
    if key == "block_count":
        layers = {int(n.split(".")[1]) for n in tensors if n.startswith("blk.") and n.split(".")[1].isdigit()}
        return len(layers) if layers and layers == set(range(len(layers))) else None
    name, axis = FROM_TENSORS.get(key, ("", 0))
    t = tensors.get(name)
    return t.shape[axis] if t is not None and len(t.shape) == 2 else None


def check(keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Missing and wrongly typed keys, and those whose absence changes what a model computes."""
    arch = text(keys, "general.architecture")
    if not arch:
        yield Finding(ERROR, "arch-missing", "key general.architecture", "the file does not name its architecture",
                      "no engine loads it", "convert with --set general.architecture=NAME")  # fmt: skip
        return
    yield from _types(keys, arch)
    if arch in OURS_ALONE:
        yield Finding(ERROR, "arch-unknown", "key general.architecture", f"arch {arch} is known to ckptkit alone",
                      "llama.cpp and Ollama refuse it: unknown model architecture",
                      "convert with --arch, where another arch has the same mathematics")  # fmt: skip
    if arch not in LAYOUTS or arch in OURS_ALONE or not tensors:
        return
    eps = NORM_EPS[ARCHS[arch].norm]
    for key in (*(k for k, (_, needed, _) in SIZES.items() if needed), eps):
        if f"{arch}.{key}" not in keys:
            fixable = from_tensors(key, tensors) is not None
            yield Finding(ERROR, "key-missing", f"key {arch}.{key}", f"{arch}.{key} is missing", "llama.cpp refuses",
                          f"convert with --set {arch}.{key}=N", fixable)  # fmt: skip
    yield from _rope(keys, arch)


def _types(keys: Mapping[str, Value], arch: str) -> Iterator[Finding]:
    arrays = {f"{arch}.{key}" for key, (_, _, array) in SIZES.items() if array}
    for key, kind in wanted(arch).items():
        value = keys.get(key)
        if value is None or value.kind == kind or (value.kind == Kind.ARRAY and key in arrays):
            continue
        fixable = retyped(value, kind) is not None
        yield Finding(ERROR, "key-type", f"key {key}", f"{key} is {value.kind.name.lower()}, not {kind.name.lower()}",
                      "llama.cpp refuses: it takes exactly this type",
                      "store it again in the right type", fixable)  # fmt: skip


def _rope(keys: Mapping[str, Value], arch: str) -> Iterator[Finding]:
    if ARCHS[arch].position != "rope":
        return
    if f"{arch}.rope.freq_base" not in keys:
        yield Finding(WARNING, "rope-base", f"key {arch}.rope.freq_base", "the rotary base is not stored",
                      "llama.cpp computes with 10,000; a model trained with another one talks nonsense",
                      f"convert with --set {arch}.rope.freq_base=BASE")  # fmt: skip
    pairing = text(keys, "ckptkit.rope_pairing")
    meant = LAYOUTS[arch].rope_pairing
    if pairing and pairing != meant:
        yield Finding(ERROR, "rope-pairing", "key ckptkit.rope_pairing", f"pairs are {pairing}, {arch} means {meant}",
                      "it loads and talks nonsense", "convert again from the source")  # fmt: skip
    heads, width = number(keys.get(f"{arch}.attention.head_count")), number(keys.get(f"{arch}.embedding_length"))
    if heads and width and width % heads and f"{arch}.attention.key_length" not in keys:
        yield Finding(NOTE, "head-size", f"key {arch}.attention.key_length", "the head size is not stored",
                      "it is taken as width // heads, which leaves a rest", "store it")  # fmt: skip

"""Keys of a GGUF: which llama.cpp demands, and in exactly which type (llama-model.cpp, llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..arch import ARCHS
from ..formats.gguf import LAYOUTS
from ..formats.gguf_io import Kind, Value
from ..formats.gguf_keys import number, text
from ..formats.gguf_known import GENERAL, MODEL, NORM_EPS, PER_LAYER, TOKENIZER
from ..tensor import Tensor
from .archs import LLAMA_CPP
from .finding import Finding, finding
from .shapes import LAYER

NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
PER_LAYER_KINDS = (Kind.U32, Kind.I32, Kind.BOOL)
# where a size that a file does not name stands in its tensors: key, tensor, axis
FROM_TENSORS: Mapping[str, tuple[str, int]] = {
    "embedding_length": ("token_embd.weight", 1),
    "feed_forward_length": ("blk.0.ffn_up.weight", 0),
    "context_length": ("position_embd.weight", 0),
}


def wanted(arch: str) -> dict[str, Kind]:
    """Every key whose type llama.cpp insists on for this arch."""
    own = dict(MODEL)
    if arch in ARCHS:
        own[NORM_EPS[ARCHS[arch].norm]] = Kind.F32
    if arch == "llama":
        own["vocab_size"] = Kind.U32
    return {f"{arch}.{key}": kind for key, kind in own.items()} | {**GENERAL, **TOKENIZER}


def retyped(value: Value, kind: Kind) -> Value | None:
    """The same number as another type; None where that would change it."""
    if Kind.STRING in (value.kind, kind) or Kind.ARRAY in (value.kind, kind):
        return None
    if kind == Kind.F32 and value.kind == Kind.F64:
        return Value(kind, float(np.float32(value.value))) if abs(value.value) <= np.finfo(np.float32).max else None
    if kind in (Kind.U32, Kind.U16) and isinstance(value.value, int):
        bits = 32 if kind == Kind.U32 else 16
        return Value(kind, int(value.value)) if 0 <= value.value < 2**bits else None
    if kind == Kind.BOOL and value.value in (0, 1):
        return Value(kind, bool(value.value))
    return Value(kind, float(value.value)) if kind == Kind.F32 and abs(value.value) < 2**24 else None


def from_tensors(key: str, tensors: Mapping[str, Tensor]) -> int | None:
    """A missing size as the tensors tell it."""
    if key == "block_count":
        layers = {int(found[1]) for found in map(LAYER.match, tensors) if found}
        return len(layers) if layers and layers == set(range(len(layers))) else None
    name, axis = FROM_TENSORS.get(key, ("", 0))
    t = tensors.get(name)
    return t.shape[axis] if t is not None and len(t.shape) == 2 else None


def check(keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Missing and wrongly typed keys, and those whose absence changes what a model computes."""
    arch = text(keys, "general.architecture")
    if not arch:
        yield finding("arch-missing", "key general.architecture", "the file does not name its architecture",
                      "no engine loads it", "convert with --set general.architecture=NAME")  # fmt: skip
        return
    yield from _types(keys, arch)
    if arch not in LLAMA_CPP:
        yield finding("arch-unknown", "key general.architecture", f"arch {arch[:40]} is not known to llama.cpp",
                      "llama.cpp and Ollama refuse it: unknown model architecture",
                      "convert with --arch, where another arch has the same mathematics")  # fmt: skip
        return
    if not tensors:
        return
    eps = NORM_EPS[ARCHS[arch].norm] if arch in ARCHS else ""
    for key in (*NEEDED, eps) if arch in LAYOUTS else ():
        if f"{arch}.{key}" not in keys:
            fixable = from_tensors(key, tensors) is not None
            yield finding("key-missing", f"key {arch}.{key}", f"{arch}.{key} is missing", "llama.cpp refuses",
                          f"convert with --set {arch}.{key}=N", fixable)  # fmt: skip
    if arch in LAYOUTS and ARCHS[arch].position == "rope" and f"{arch}.rope.freq_base" not in keys:
        yield finding("rope-base", f"key {arch}.rope.freq_base", "the rotary base is not stored",
                      "llama.cpp computes with 10,000; a model trained with another one talks nonsense",
                      f"convert with --set {arch}.rope.freq_base=BASE")  # fmt: skip


def _types(keys: Mapping[str, Value], arch: str) -> Iterator[Finding]:
    arrays = {f"{arch}.{key}" for key in PER_LAYER}
    layers = number(keys.get(f"{arch}.block_count"))
    labels = keys.get(f"{arch}.classifier.output_labels")
    if labels is not None and labels.element not in (None, Kind.STRING):
        yield finding("key-array", f"key {arch}.classifier.output_labels", "labels that are no strings",
                      "llama.cpp refuses: it takes an array of strings", "export the model again")  # fmt: skip
    for key, kind in wanted(arch).items():
        value = keys.get(key)
        if value is None or value.kind == kind:
            continue
        if value.kind == Kind.ARRAY and key in arrays:
            if value.element in PER_LAYER_KINDS and layers in (None, len(value.value)):
                continue
            element = value.element.name.lower() if value.element is not None else ""
            yield finding("key-array", f"key {key}", f"{key} is {len(value.value):,} values of {element}",
                          "llama.cpp refuses: it takes one u32 or i32 for each layer",
                          "export the model again")  # fmt: skip
            continue
        fixable = retyped(value, kind) is not None
        yield finding("key-type", f"key {key}", f"{key} is {value.kind.name.lower()}, not {kind.name.lower()}",
                      "llama.cpp refuses: it takes exactly this type",
                      "store it again in the right type", fixable)  # fmt: skip

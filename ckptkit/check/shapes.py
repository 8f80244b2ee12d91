"""Tensors of a GGUF: which llama.cpp looks for in an architecture, of which shape and type.

Shapes are numpy's, (out, in); axes of 1 in front do not count. A name that no row has is one tensor too many, and the
whole file is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..formats.gguf_io import Value
from ..formats.gguf_keys import number, text
from ..quant.types import QType
from ..tensor import Tensor
from .finding import Finding, finding
from .sizes import MAX_LAYERS, WHOLE_WIDTH, Sizes

E, F, V, P, Q, K, VALUES, QKV, HALF, ONE = (
    "n_embd", "n_ff", "n_vocab", "n_ctx", "q", "k", "values", "qkv", "half", "one",
)  # fmt: skip
Row = tuple[tuple[str, ...], bool]  # axes, whether llama.cpp demands it

COMMON: Mapping[str, Row] = {
    "token_embd.weight": ((V, E), True),
    "output.weight": ((V, E), False),
    "output_norm.weight": ((E,), True),
    "blk.{i}.attn_norm.weight": ((E,), True),
    "blk.{i}.attn_output.weight": ((E, Q), True),
    "blk.{i}.ffn_norm.weight": ((E,), True),
    "blk.{i}.ffn_up.weight": ((F, E), True),
    "blk.{i}.ffn_down.weight": ((E, F), True),
}
GATED: Mapping[str, Row] = {
    **COMMON,
    "blk.{i}.attn_q.weight": ((Q, E), True),
    "blk.{i}.attn_k.weight": ((K, E), True),
    "blk.{i}.attn_v.weight": ((VALUES, E), True),
    "blk.{i}.attn_q.bias": ((Q,), False),
    "blk.{i}.attn_k.bias": ((K,), False),
    "blk.{i}.attn_v.bias": ((VALUES,), False),
    "blk.{i}.ffn_gate.weight": ((F, E), True),
}
LLAMA: Mapping[str, Row] = {
    **GATED,
    "rope_freqs.weight": ((HALF,), False),
    "blk.{i}.attn_output.bias": ((E,), False),
    "blk.{i}.ffn_gate.bias": ((F,), False),
    "blk.{i}.ffn_up.bias": ((F,), False),
    "blk.{i}.ffn_down.bias": ((E,), False),
}
LONG = ("rope_factors_long.weight", "rope_factors_short.weight")  # instead of rope_freqs, with scaling "longrope"
LLAMA_LONG = {n: row for n, row in LLAMA.items() if n != "rope_freqs.weight"} | {n: ((HALF,), False) for n in LONG}
QWEN2: Mapping[str, Row] = {**GATED, "output.bias": ((V,), False)}
GPT2: Mapping[str, Row] = {
    **COMMON,
    "position_embd.weight": ((P, E), True),
    "output_norm.bias": ((E,), True),
    "blk.{i}.attn_norm.bias": ((E,), True),
    "blk.{i}.attn_qkv.weight": ((QKV, E), True),
    "blk.{i}.attn_qkv.bias": ((QKV,), True),
    "blk.{i}.attn_output.bias": ((E,), True),
    "blk.{i}.ffn_norm.bias": ((E,), True),
    "blk.{i}.ffn_up.bias": ((F,), True),
    "blk.{i}.ffn_down.bias": ((E,), True),
}
ROWS: Mapping[str, Mapping[str, Row]] = {"gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2}
LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
SCALE = re.compile(r"(blk\.\d+\.(?:attn_(?:q|k|v|qkv|output)|ffn_(?:gate|up|down)))\.(?:input_)?scale")
NOT_MULTIPLIED = (QType.I8, QType.I16, QType.I32, QType.I64, QType.F64, QType.Q8_1, QType.Q8_K)  # as matrices


def axes(s: Sizes) -> dict[str, int | None]:
    """Axes as the keys tell them; None where they do not."""
    q = None if s.heads is None or s.key is None else s.heads * s.key
    k = None if s.kv_heads is None or s.key is None else s.kv_heads * s.key
    values = None if s.kv_heads is None or s.value is None else s.kv_heads * s.value
    q = s.width if s.arch in WHOLE_WIDTH else q
    qkv = None if q is None or k is None or values is None else q + k + values
    half = None if s.rotated is None else s.rotated // 2
    return {
        E: s.width, F: s.ff, V: s.vocab, P: s.context, Q: q, K: k, VALUES: values, QKV: qkv, HALF: half, ONE: 1,
    }  # fmt: skip


def check(keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Missing, extra and misshapen tensors, and types that llama.cpp cannot compute with."""
    arch = text(keys, "general.architecture")
    rows = LLAMA_LONG if arch == "llama" and text(keys, "llama.rope.scaling.type") == "longrope" else ROWS.get(arch)
    if rows is None or not tensors or number(keys.get(f"{arch}.expert_count")):
        return
    sizes = Sizes.of(keys)
    known = axes(sizes)
    layers = sizes.layers
    if layers and layers <= MAX_LAYERS:
        listed = min(layers, len(tensors) + 1)  # a number of layers that cannot be is told by the first that misses
        for name, (_, needed) in rows.items():
            indices = range(listed) if "{i}" in name else (0,)
            for full in (name.format(i=i) for i in indices):
                fused = re.sub(r"attn_[qkv]\.", "attn_qkv.", full)
                if needed and full not in tensors and fused not in tensors:
                    yield finding("tensor-missing", f"tensor {full}", f"{full} is missing",
                                  "llama.cpp refuses: missing tensor", "export the model again")  # fmt: skip
    for name, t in tensors.items():
        if not _row(name, rows, tensors) or ((match := LAYER.match(name)) and int(match[1]) >= (layers or 1 << 31)):
            yield finding("tensor-extra", f"tensor {name}", f"{name} has no place in this architecture",
                          "llama.cpp refuses: wrong number of tensors",
                          f"convert with --drop {name}, if it may go")  # fmt: skip
        else:
            yield from _one(name, t, _row(name, rows, tensors), known)
    if arch == "qwen2" and not any(".attn_q" in n and n.endswith(".bias") for n in tensors):
        yield finding("bias-missing", "tensor blk.0.attn_q.bias", "q, k and v have no biases",
                      "older llama.cpp refuses qwen2 without them; newer ones load it",
                      "export zeros for them")  # fmt: skip
    if arch == "gpt2" and "output.weight" not in tensors:
        yield finding("tied-output", "tensor output.weight", "the output matrix is the embedding",
                      "llama.cpp before March 2025 refuses; newer ones load it",
                      "for old versions convert with --write-output")  # fmt: skip


def _row(name: str, rows: Mapping[str, Row], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The axes of a tensor that has a place; () for one that has none."""
    row = rows.get(LAYER.sub("blk.{i}.", name))
    if row:
        return row[0]
    if match := SCALE.fullmatch(name):
        return (ONE,) if f"{match[1]}.weight" in tensors else ()
    if LAYER.match(name) and name.endswith((".attn_qkv.weight", ".attn_qkv.bias")):
        return (QKV, E) if name.endswith("weight") else (QKV,)
    return ()


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones in front, which ggml does not tell from axes that are not there."""
    k = next((k for k, n in enumerate(shape) if n != 1), len(shape))
    return shape[k:]


def _one(name: str, t: Tensor, row: tuple[str, ...], known: Mapping[str, int | None]) -> Iterator[Finding]:
    expected = tuple(n for a in row if (n := known[a]) is not None)
    if len(expected) == len(row) and _trimmed(t.shape) != _trimmed(expected):
        rule, mend = "tensor-shape", "correct the keys, or export the model again"
        if row[0] == V and t.shape[1:] == expected[1:]:
            rule, mend = "vocabulary-rows", "cut the padding rows, or give the rows tokens: convert from the source"
        elif row[0] == P and t.shape[1:] == expected[1:]:
            rule, mend = "position-rows", "set context_length to the number of rows"
        yield finding(rule, f"tensor {name}", f"{name} is {t.shape}, the keys say {expected}",
                      "llama.cpp refuses: wrong shape", mend, rule == "position-rows")  # fmt: skip
    if len(row) == 1 and t.type != QType.F32:
        yield finding("vector-type", f"tensor {name}", f"a vector stored as {t.type.name}",
                      "llama.cpp stops the process when it computes", "store it as F32",
                      t.type in (QType.F16, QType.BF16))  # fmt: skip
    if len(row) == 2 and t.type in NOT_MULTIPLIED:
        yield finding("matrix-type", f"tensor {name}", f"a matrix stored as {t.type.name}",
                      "llama.cpp refuses, or stops the process when it computes",
                      "convert again from the source, with --type")  # fmt: skip

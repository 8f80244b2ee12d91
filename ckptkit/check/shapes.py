"""Tensors of a GGUF: which llama.cpp looks for in an architecture, and of which shape.

Shapes are numpy's, (out, in). A name that no row has is one tensor too many, and the whole file is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..formats.gguf_io import Kind, Value
from ..formats.gguf_keys import number, text
from ..quant.types import QType
from ..tensor import Tensor
from .finding import ERROR, NOTE, Finding

E, F, V, P, Q, KV, QKV, HALF = "n_embd", "n_ff", "n_vocab", "n_ctx", "q", "kv", "qkv", "half"
Row = tuple[tuple[str, ...], bool]  # axes, whether llama.cpp demands it

LLAMA: Mapping[str, Row] = {
    "token_embd.weight": ((V, E), True),
    "output.weight": ((V, E), False),
    "output_norm.weight": ((E,), True),
    "rope_freqs.weight": ((HALF,), False),
    "blk.{i}.attn_norm.weight": ((E,), True),
    "blk.{i}.attn_q.weight": ((Q, E), True),
    "blk.{i}.attn_k.weight": ((KV, E), True),
    "blk.{i}.attn_v.weight": ((KV, E), True),
    "blk.{i}.attn_q.bias": ((Q,), False),
    "blk.{i}.attn_k.bias": ((KV,), False),
    "blk.{i}.attn_v.bias": ((KV,), False),
    "blk.{i}.attn_output.weight": ((E, Q), True),
    "blk.{i}.attn_output.bias": ((E,), False),
    "blk.{i}.ffn_norm.weight": ((E,), True),
    "blk.{i}.ffn_gate.weight": ((F, E), True),
    "blk.{i}.ffn_up.weight": ((F, E), True),
    "blk.{i}.ffn_down.weight": ((E, F), True),
    "blk.{i}.ffn_gate.bias": ((F,), False),
    "blk.{i}.ffn_up.bias": ((F,), False),
    "blk.{i}.ffn_down.bias": ((E,), False),
}
GPT2: Mapping[str, Row] = {
    "token_embd.weight": ((V, E), True),
    "position_embd.weight": ((P, E), True),
    "output.weight": ((V, E), False),
    "output_norm.weight": ((E,), True),
    "output_norm.bias": ((E,), True),
    "blk.{i}.attn_norm.weight": ((E,), True),
    "blk.{i}.attn_norm.bias": ((E,), True),
    "blk.{i}.attn_qkv.weight": ((QKV, E), True),
    "blk.{i}.attn_qkv.bias": ((QKV,), True),
    "blk.{i}.attn_output.weight": ((E, E), True),
    "blk.{i}.attn_output.bias": ((E,), True),
    "blk.{i}.ffn_norm.weight": ((E,), True),
    "blk.{i}.ffn_norm.bias": ((E,), True),
    "blk.{i}.ffn_up.weight": ((F, E), True),
    "blk.{i}.ffn_up.bias": ((F,), True),
    "blk.{i}.ffn_down.weight": ((E, F), True),
    "blk.{i}.ffn_down.bias": ((E,), True),
}
ROWS: Mapping[str, Mapping[str, Row]] = {"gpt2": GPT2, "llama": LLAMA, "qwen2": LLAMA}
LAYER = re.compile(r"blk\.(\d+)\.")


def sizes(keys: Mapping[str, Value]) -> dict[str, int]:
    """Axes as the keys tell them; 0 where they do not."""
    arch = text(keys, "general.architecture")

    def size(key: str) -> int:
        n = number(keys.get(f"{arch}.{key}"))
        return n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 0

    heads, width = size("attention.head_count"), size("embedding_length")
    kv = size("attention.head_count_kv") or heads
    dim = size("attention.key_length") or (width // heads if heads else 0)
    tokens = keys.get("tokenizer.ggml.tokens")
    known = tokens is not None and tokens.kind == Kind.ARRAY
    vocab = len(tokens.value) if tokens is not None and known else size("vocab_size")
    found = {E: width, F: size("feed_forward_length"), V: vocab, P: size("context_length")}
    return found | {Q: heads * dim, KV: kv * dim, QKV: (heads + 2 * kv) * dim, HALF: dim // 2}


def check(keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Missing, extra and misshapen tensors, and vectors in types that llama.cpp cannot add."""
    arch = text(keys, "general.architecture")
    rows = ROWS.get(arch)
    if rows is None or not tensors or number(keys.get(f"{arch}.expert_count")):
        return
    layers = number(keys.get(f"{arch}.block_count"))
    axes = sizes(keys)
    if isinstance(layers, int) and 0 < layers <= len(tensors):
        for name, (_, needed) in rows.items():
            indices = range(layers) if "{i}" in name else (0,)
            for full in (name.format(i=i) for i in indices):
                fused = re.sub(r"attn_[qkv]\.", "attn_qkv.", full)
                if needed and full not in tensors and fused not in tensors:
                    yield Finding(ERROR, "tensor-missing", f"tensor {full}", f"{full} is missing",
                                  "llama.cpp refuses: missing tensor", "export the model again")  # fmt: skip
    for name, t in tensors.items():
        yield from _one(name, t, rows, axes, layers if isinstance(layers, int) else None)
    if arch == "qwen2" and not any(".attn_q" in n and n.endswith(".bias") for n in tensors):
        yield Finding(NOTE, "bias-missing", "tensor blk.0.attn_q.bias", "q, k and v have no biases",
                      "older llama.cpp refuses qwen2 without them; newer ones load it",
                      "export zeros for them")  # fmt: skip
    if arch == "gpt2" and "output.weight" not in tensors:
        yield Finding(NOTE, "tied-output", "tensor output.weight", "the output matrix is the embedding",
                      "llama.cpp before March 2025 refuses; newer ones load it",
                      "for old versions convert with --write-output")  # fmt: skip


def _one(
    name: str, t: Tensor, rows: Mapping[str, Row], axes: Mapping[str, int], layers: int | None
) -> Iterator[Finding]:
    match = LAYER.match(name)
    row = rows.get(LAYER.sub("blk.{i}.", name))
    if "attn_qkv." in name and row is None:
        row = ((QKV, E), False) if name.endswith("weight") else ((QKV,), False)
    if row is None or (match and layers is not None and int(match[1]) >= layers):
        yield Finding(ERROR, "tensor-extra", f"tensor {name}", f"{name} has no place in this architecture",
                      "llama.cpp refuses: wrong number of tensors",
                      f"convert with --drop {name}, if it may go")  # fmt: skip
        return
    expected = tuple(axes[a] for a in row[0])
    if all(expected) and t.shape != expected:
        rule, mend = "tensor-shape", "correct the keys, or export the model again"
        if row[0][0] == V and t.shape[1:] == expected[1:]:
            rule, mend = "vocabulary-rows", "cut the padding rows, or give the rows tokens: convert from the source"
        elif row[0][0] == P and t.shape[1:] == expected[1:]:
            rule, mend = "position-rows", "set context_length to the number of rows"
        yield Finding(ERROR, rule, f"tensor {name}", f"{name} is {t.shape}, the keys say {expected}",
                      "llama.cpp refuses: wrong shape", mend, rule == "position-rows")  # fmt: skip
    if len(t.shape) == 1 and t.type != QType.F32:
        yield Finding(ERROR, "vector-type", f"tensor {name}", f"a vector stored as {t.type.name}",
                      "llama.cpp stops the process when it computes", "store it as F32", True)  # fmt: skip

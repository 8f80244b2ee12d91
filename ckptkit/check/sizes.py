"""What the numbers among the keys must be, alone and together, before llama.cpp computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..arch import ARCHS
from ..formats.gguf_io import Kind, Value
from ..formats.gguf_keys import number, text
from ..formats.gguf_known import NORM_EPS
from .finding import Finding, finding

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
WHOLE_WIDTH = ("gpt2", "qwen2")  # archs whose heads together are as wide as the embedding


@dataclass(frozen=True)
class Sizes:
    """Sizes as llama.cpp takes them; None where a key is missing or holds a number for each layer."""

    arch: str
    width: int | None
    layers: int | None
    ff: int | None
    context: int | None
    heads: int | None
    kv_heads: int | None
    key: int | None  # of one head
    value: int | None
    rotated: int | None
    vocab: int | None

    @classmethod
    def of(cls, keys: Mapping[str, Value]) -> Sizes:
        """From the keys, with llama.cpp's defaults."""
        arch = text(keys, "general.architecture")

        def size(key: str, default: int | None = None) -> int | None:
            value = keys.get(f"{arch}.{key}")
            n = number(value)
            if value is None:
                return default
            return n if isinstance(n, int) and not isinstance(n, bool) and n >= 0 else None

        width, heads = size("embedding_length"), size("attention.head_count")
        each = None if width is None or heads is None else width // heads if heads else 0
        tokens = keys.get("tokenizer.ggml.tokens")
        known = tokens is not None and tokens.kind == Kind.ARRAY
        key = size("attention.key_length", each)
        return cls(
            arch, width, size("block_count"), size("feed_forward_length"), size("context_length"), heads,
            size("attention.head_count_kv", heads), key, size("attention.value_length", each),
            size("rope.dimension_count", key), len(tokens.value) if tokens is not None and known else None,
        )  # fmt: skip


def check(keys: Mapping[str, Value]) -> Iterator[Finding]:
    """Numbers that no model can have, and heads that do not fit each other."""
    arch = text(keys, "general.architecture")
    yield from _values(keys, arch)
    if arch in ARCHS:
        yield from _heads(Sizes.of(keys))


def _values(keys: Mapping[str, Value], arch: str) -> Iterator[Finding]:
    def bad(key: str, effect: str, mend: str = "correct the key with --set") -> Finding:
        value = keys[f"{arch}.{key}"].value
        return finding("key-value", f"key {arch}.{key}", f"{arch}.{key} is {value}", effect, mend)

    layers = number(keys.get(f"{arch}.block_count"))
    if layers is not None and not 0 < layers <= MAX_LAYERS:
        yield bad("block_count", f"llama.cpp stops the process: it takes 1 to {MAX_LAYERS} layers")
    context = number(keys.get(f"{arch}.context_length"))
    if context is not None and not 0 < context < 2**31:
        yield bad("context_length", "llama.cpp loads it and stops the process at the first prompt")
    eps = f"{NORM_EPS[ARCHS[arch].norm] if arch in ARCHS else ''}"
    value = number(keys.get(f"{arch}.{eps}"))
    if value is not None and not value >= 0:
        yield bad(eps, "llama.cpp stops the process when it computes: it takes 0 or more")
    scaling = text(keys, f"{arch}.rope.scaling.type")
    if f"{arch}.rope.scaling.type" in keys and scaling not in ROPE_SCALINGS:
        yield bad("rope.scaling.type", f"llama.cpp stops the process: it knows {', '.join(ROPE_SCALINGS)}",
                  "where the factors are in rope_freqs.weight, convert with --remove KEY")  # fmt: skip
    experts, used = number(keys.get(f"{arch}.expert_count")) or 0, number(keys.get(f"{arch}.expert_used_count")) or 0
    if used > experts or (experts and not used):
        key = "expert_used_count" if used else "expert_count"
        yield bad(key, "llama.cpp stops the process: 1 to expert_count experts must be used")


def _heads(s: Sizes) -> Iterator[Finding]:
    if not s.heads or not s.key or s.width is None:
        return
    at = f"key {s.arch}.attention.head_count"
    if s.kv_heads and s.heads % s.kv_heads:
        yield finding("head-groups", f"{at}_kv", f"{s.heads} heads share {s.kv_heads} keys and values",
                      "llama.cpp stops the process when it computes: it takes a divisor of the heads",
                      "correct the keys, or export the model again")  # fmt: skip
    sizes = {"values": s.value, **({"rotated": s.rotated} if ARCHS[s.arch].position == "rope" else {})}
    odd = [f"{name} {n}" for name, n in sizes.items() if n is not None and n != s.key]
    if s.arch in WHOLE_WIDTH and s.heads * s.key != s.width:
        odd.append(f"{s.heads} heads in a width of {s.width}")
    if ARCHS[s.arch].position == "rope" and s.key % 2:
        odd.append("rotated in pairs")
    elif s.key == 1:
        odd.append("its products are of two at least")
    if odd:
        yield finding("head-size", at, f"a head has {s.key} keys, but {', '.join(odd)}",
                      "llama.cpp refuses, or stops the process when it computes",
                      "correct the keys, or export the model again")  # fmt: skip

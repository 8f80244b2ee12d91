"""Which tensor gets which type under which mixture, as llama-quantize chooses without an importance matrix.

Source of truth: llama-quant.cpp of llama.cpp (tensor_allows_quantization, llama_tensor_get_type,
tensor_type_fallback) and the file types of llama.h. Names are the stored ones: a fused `attn_qkv` has its own place in
the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..errors import UnsupportedError
from .types import BLOCKS, QType


@dataclass(frozen=True)
class Mixture:
    """A file type: its `general.file_type` number and the type of most matrices."""

    name: str
    file_type: int
    base: QType


MIXTURES: dict[str, Mixture] = {
    m.name: m
    for m in (
        Mixture("F32", 0, QType.F32),
        Mixture("F16", 1, QType.F16),
        Mixture("BF16", 32, QType.BF16),
        Mixture("Q8_0", 7, QType.Q8_0),
        Mixture("Q6_K", 18, QType.Q6_K),
        Mixture("Q5_K_M", 17, QType.Q5_K),
        Mixture("Q5_K_S", 16, QType.Q5_K),
        Mixture("Q4_K_M", 15, QType.Q4_K),
        Mixture("Q4_K_S", 14, QType.Q4_K),
        Mixture("Q3_K_L", 13, QType.Q3_K),
        Mixture("Q3_K_M", 12, QType.Q3_K),
        Mixture("Q3_K_S", 11, QType.Q3_K),
        Mixture("Q2_K", 10, QType.Q2_K),
        Mixture("Q2_K_S", 21, QType.Q2_K),  # llama-quantize asks for an importance matrix here
        Mixture("Q5_1", 9, QType.Q5_1),
        Mixture("Q5_0", 8, QType.Q5_0),
        Mixture("Q4_1", 3, QType.Q4_1),
        Mixture("Q4_0", 2, QType.Q4_0),
    )
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

# Rows that are no whole number of blocks take the type on the right; if that does not fit either, F16.
FALLBACK = {
    QType.Q2_K: QType.Q4_0,
    QType.Q3_K: QType.Q4_0,
    QType.Q4_K: QType.Q5_0,
    QType.Q5_K: QType.Q5_1,
    QType.Q6_K: QType.Q8_0,
}

# A matrix whose name contains one of these is left as it is: small, and the model is sensitive to it.
KEPT = (
    "_norm.weight",
    "position_embd.weight",
    "token_types.weight",
    "ffn_gate_inp.weight",
    "attn_rel_b.weight",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
)

ROLES = {  # first match wins
    "output.weight": re.compile(r"output\.weight"),
    "token_embd": re.compile(r"(per_layer_)?token_embd\.weight"),
    "attn_v": re.compile(r".*attn_(qkv|kv_b|v)\.weight.*"),
    "attn_k": re.compile(r".*attn_k\.weight.*"),
    "attn_output": re.compile(r".*attn_output\.weight.*"),
    "ffn_down": re.compile(r".*ffn_down.*"),
}


@dataclass(frozen=True)
class Place:
    """Where a tensor stands: the `i`-th of `n` in its role, in a model with `gqa` query heads to a key head."""

    i: int
    n: int
    gqa: int


def more_bits(p: Place) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    return p.i < p.n // 8 or p.i >= 7 * p.n // 8 or (p.i - p.n // 8) % 3 == 2


def always(p: Place) -> bool:  # noqa: ARG001
    """Every tensor of the role."""
    return True


def first(count: int) -> Callable[[Place], bool]:
    """The first `count` tensors of the role."""
    return lambda p: p.i < count


def first_part(parts: int) -> Callable[[Place], bool]:
    """The first of so many equal parts of the layers."""
    return lambda p: p.i < p.n // parts


def grouped(p: Place) -> bool:
    """Four or more query heads share a key head, so attn_v is small and cheap to keep well."""
    return p.gqa >= 4


# (mixture, role): the first condition that holds gives the type; none, the mixture's own.
RULES: dict[tuple[str, str], tuple[tuple[Callable[[Place], bool], QType], ...]] = {
    ("Q2_K", "attn_v"): ((grouped, QType.Q4_K), (always, QType.Q3_K)),
    ("Q2_K", "attn_output"): ((always, QType.Q3_K),),
    ("Q2_K", "ffn_down"): ((always, QType.Q3_K),),
    ("Q2_K_S", "attn_v"): ((grouped, QType.Q4_K),),
    ("Q2_K_S", "ffn_down"): ((first_part(8), QType.Q4_K),),
    ("Q3_K_M", "attn_v"): ((first(2), QType.Q5_K), (always, QType.Q4_K)),
    ("Q3_K_M", "attn_output"): ((always, QType.Q4_K),),
    ("Q3_K_M", "ffn_down"): ((first_part(16), QType.Q5_K), (always, QType.Q4_K)),
    ("Q3_K_L", "attn_v"): ((always, QType.Q5_K),),
    ("Q3_K_L", "attn_output"): ((always, QType.Q5_K),),
    ("Q3_K_L", "ffn_down"): ((always, QType.Q5_K),),
    ("Q4_K_S", "attn_v"): ((first(4), QType.Q5_K),),
    ("Q4_K_S", "ffn_down"): ((first_part(8), QType.Q5_K),),
    ("Q4_K_M", "attn_v"): ((more_bits, QType.Q6_K),),
    ("Q4_K_M", "ffn_down"): ((more_bits, QType.Q6_K),),
    ("Q5_K_M", "attn_v"): ((more_bits, QType.Q6_K),),
    ("Q5_K_M", "ffn_down"): ((more_bits, QType.Q6_K),),
}


def mixture(name: str) -> Mixture:
    """The mixture of a name in any case; raises UnsupportedError, listing all, for one there is none of."""
    upper = name.upper()
    found = MIXTURES.get(ALIASES.get(upper, upper))
    if found is None:
        raise UnsupportedError("unknown type", expected="one of " + " ".join(MIXTURES), got=name)
    return found


def file_type(name: str) -> int:
    """`general.file_type` of a mixture."""
    return mixture(name).file_type


def quantisable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a mixture may change this tensor's type: matrices called `*weight`, apart from the KEPT ones."""
    axes = next((k for k, n in enumerate(shape) if n > 1), len(shape))  # a matrix of one row counts as a vector
    return len(shape) - axes >= 2 and name.endswith("weight") and not any(part in name for part in KEPT)


def allowed(type: QType, shape: tuple[int, ...]) -> bool:
    """Whether the rows of a shape are whole blocks of a type."""
    return bool(shape) and shape[-1] % BLOCKS[type].elements == 0


def plan(
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    mixture_name: str,
    *,
    pure: bool = False,
    arch: str = "llama",
    n_layer: int | None = None,
    n_head: int = 1,
    n_kv_head: int = 1,
    n_expert: int = 0,
    stored: Mapping[str, QType] | None = None,
) -> dict[str, QType]:
    """Type of every tensor, by stored name, in the order given; `pure` gives every matrix the same type.

    What is not quantised keeps its type in `stored`, F32 by default. `n_layer` is the number of blk.* by default.
    """
    mix = mixture(mixture_name)
    shapes = dict(tensors)
    layers = {name: _layer(name) for name in shapes}
    n_layer = max(layers.values(), default=-1) + 1 if n_layer is None else n_layer
    roles = {name: role_of(name) for name in shapes}
    gqa = n_head // n_kv_head if n_kv_head else 0
    # 80 layers with shared key heads: attn_v is an eighth of attn_q, and worth a bit more
    big = n_layer == 80 and (arch == "qwen2" or (arch == "llama" and n_head != n_kv_head))
    totals = {"attn_v": sum(role == "attn_v" for role in roles.values()), "ffn_down": n_layer}
    tied = "output.weight" not in shapes
    seen: dict[str, int] = {}
    types: dict[str, QType] = {}
    # counted block by block, names in order within one, whatever the order of the file
    for name in sorted(shapes, key=lambda name: (layers[name], name)):
        shape, role = shapes[name], roles[name]
        if not quantisable(name, shape):
            types[name] = stored.get(name, QType.F32) if stored else QType.F32
            continue
        type = mix.base
        if BLOCKS[type].elements > 1 and not pure:
            i = layers[name] if n_expert > 1 and role == "ffn_down" else seen.get(role, 0)
            seen[role] = seen.get(role, 0) + 1
            if role == "output.weight" or (role == "token_embd" and tied):
                type = QType.Q8_0 if type == QType.Q8_0 or not allowed(type, shape) else QType.Q6_K
            elif n_expert == 8 and role in EIGHT_EXPERTS:
                keep = role == "attn_output" and mix.name not in EIGHT_EXPERTS_BETTER_OUTPUT
                type = type if keep else EIGHT_EXPERTS[role]
            else:
                place = Place(i, totals.get(role, 0), gqa)
                rules = RULES.get((mix.name, role), ())
                type = next((type for holds, type in rules if holds(place)), type)
                if big and role == "attn_v" and type in (QType.Q3_K, QType.Q4_K):
                    type = QType.Q5_K
        types[name] = fitting(type, shape)
    return {name: types[name] for name in shapes}


EIGHT_EXPERTS = {"attn_v": QType.Q8_0, "attn_k": QType.Q8_0, "attn_output": QType.Q5_K}  # small beside the experts
EIGHT_EXPERTS_BETTER_OUTPUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")


def fitting(type: QType, shape: tuple[int, ...]) -> QType:
    """The type itself where the rows are whole blocks of it, else its fallback, else F16."""
    if allowed(type, shape):
        return type
    instead = FALLBACK.get(type, type)
    return instead if allowed(instead, shape) else QType.F16


def role_of(name: str) -> str:
    """What a tensor is for, as far as the rules ask; "" for the others."""
    return next((role for role, pattern in ROLES.items() if pattern.fullmatch(name)), "")


def _layer(name: str) -> int:
    found = re.match(r"blk\.([0-9]{1,9})\.", name)
    return int(found[1]) if found else -1

"""What a faulty converter may have done to a model, each undone: tables of repairs, of one tensor and of the config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arch import permute_heads, template
from ..checkpoint import Checkpoint
from ..quant.encode import decode
from ..quant.types import PLAIN
from ..tensor import Tensor, constant, transpose
from .structure import FACTORS

ROPE_PARTS = ("attn_q", "attn_k")
EXCHANGED = {"ffn_gate": "ffn_up", "attn_k": "attn_v", "attn_norm": "ffn_norm"}
PARTNER = EXCHANGED | {v: k for k, v in EXCHANGED.items()}
SAID = {
    "gate_up": "gate and up exchanged",
    "k_v": "keys and values exchanged",
    "norms": "the two norms of a block exchanged",
}
EXCHANGE_KEY = {"ffn_gate": "gate_up", "ffn_up": "gate_up", "attn_k": "k_v", "attn_v": "k_v"}
THETAS = (10000.0, 500000.0, 1000000.0)
EPSILONS = (1e-5, 1e-6, 1e-12)


@dataclass(frozen=True)
class Repair:
    """One tensor put right: which fault that undoes, and the tensor."""

    key: str
    says: str
    tensor: Tensor


def part(name: str) -> str:
    """attn_q of blk.3.attn_q.weight."""
    return name.split(".")[-2] if "." in name else name


def tensor_repairs(ck: Checkpoint, name: str) -> Iterator[Repair]:
    """What tensor `name` may have been meant to be."""
    t, c = ck.tensors[name], ck.config
    head_dim = c.head_dim
    rotary = part(name) in ROPE_PARTS and bool(c.rope_pairing) and head_dim > 0 and t.n_rows % head_dim == 0
    if rotary and (t.row_elements > 1 or t.type in PLAIN):
        for to in ("adjacent", "half"):
            says = f"rows in the order of {'half' if to == 'adjacent' else 'adjacent'} rotary pairs"
            yield Repair("rope_pairing", f"other RoPE pairing: {says}", permute_heads(t, head_dim, to))
    if len(t.shape) == 2:
        yield Repair("transpose", "not transposed: stored (in, out)", transpose(t if t.type in PLAIN else decode(t)))
    other = PARTNER.get(part(name), "")
    partner = ck.tensors.get(name.replace(f".{part(name)}.", f".{other}.")) if other else None
    if partner is not None and partner.shape == t.shape:
        key = EXCHANGE_KEY.get(part(name), "norms")
        yield Repair(key, SAID[key], partner)


def ways(ck: Checkpoint, name: str) -> Iterator[tuple[Repair, ...]]:
    """One repair of tensor `name`, then two of different kinds, the second of what the first leaves."""
    singles = list(tensor_repairs(ck, name))
    yield from ((first,) for first in singles)
    for first in singles:
        for second in tensor_repairs(with_tensors(ck, {name: first.tensor}), name):
            if second.key != first.key:
                yield first, second


def with_tensors(
    ck: Checkpoint, tensors: dict[str, Tensor], drop: tuple[str, ...] = (), /, **config: Any
) -> Checkpoint:
    """The checkpoint with some tensors replaced, added or dropped, and config fields changed."""
    kept = {n: t for n, t in ck.tensors.items() if n not in drop}
    return replace(ck, tensors=kept | tensors, config=replace(ck.config, **config))


def whole_model(ck: Checkpoint) -> Iterator[tuple[str, str, Checkpoint]]:
    """(key, what the fault would be, repaired model) for every repair that needs no other file to compare with."""
    by_key: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name in ck.tensors:
        for k, r in enumerate(tensor_repairs(ck, name)):
            if r.tensor.shape != ck.tensors[name].shape:
                continue
            # pairings in both directions, transposition by kind of matrix, exchanges of all layers at once
            group = r.key + (str(k) if r.key == "rope_pairing" else template(name) if r.key == "transpose" else "")
            by_key.setdefault((r.key, group), {})[name] = r.tensor
            if r.key == "transpose":
                by_key.setdefault((r.key, "all square matrices"), {})[name] = r.tensor
    for (key, group), tensors in by_key.items():
        names = sorted({template(n) for n in tensors})
        first = next(r.says for r in tensor_repairs(ck, next(iter(tensors))) if r.key == key)
        where = group if group == "all square matrices" else ", ".join(names)
        yield key, f"{first} ({where})", with_tensors(ck, tensors)
    yield from _config(ck)
    if "output.weight" in ck.tensors and ck.tensors["output.weight"].shape == ck.tensors["token_embd.weight"].shape:
        yield "tied", "output is tied to the embedding", with_tensors(ck, {}, ("output.weight",), tied_output=True)
    biases = {n: constant(t.shape, 0.0) for n, t in ck.tensors.items() if n.endswith(".bias")}
    if biases:
        yield "bias", "biases that the other side lacks", with_tensors(ck, biases)


def _config(ck: Checkpoint) -> Iterator[tuple[str, str, Checkpoint]]:
    c = ck.config
    if c.rope_pairing:
        for theta in THETAS:
            if theta != c.rope_theta:
                yield (
                    "rope_base",
                    f"rope base {c.rope_theta:,.10g} instead of {theta:,.10g}",
                    with_tensors(ck, {}, rope_theta=theta),
                )
        if c.rope_scaling or FACTORS in ck.tensors:
            yield "rope_scaling", "rope scaling applied", with_tensors(ck, {}, (FACTORS,), rope_scaling=None)
    for eps in EPSILONS:
        if np.float32(eps) != np.float32(c.norm_eps):
            yield "norm_eps", f"norm eps {c.norm_eps:g} instead of {eps:g}", with_tensors(ck, {}, norm_eps=eps)

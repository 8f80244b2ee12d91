"""Which tensors make which part of the forward, and how they were placed: stacked, in the file where possible."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..arch import ARCHS, Arch
from ..checkpoint import Checkpoint
from ..quant.types import QType
from ..tensor import Tensor


@dataclass(frozen=True)
class Norm:
    """`kind` rms or layer; gain and bias (n_embd,) on the device, where they exist."""

    kind: str
    gain: Any
    bias: Any
    eps: float


@dataclass(frozen=True)
class Block:
    """One transformer block; `qkv` and `ffn` (gate|up, or up) are stacked rows."""

    attn_norm: Norm
    qkv: Any
    attn_output: Any
    ffn_norm: Norm
    ffn: Any
    ffn_down: Any


@dataclass
class LoadReport:
    """What became of the tensors: bytes by type as stored, and by what was done to the rest."""

    as_stored: dict[str, int] = field(default_factory=dict)  # bytes used in the mapped file, by type
    copied: dict[str, int] = field(default_factory=dict)  # "Q2_K decoded to F32": bytes taken for it
    resident_bytes: int = 0  # taken beyond the mapped file: copies, scratch, tables
    threads: int = 0
    threading_layer: str = ""
    device_name: str = ""  # of a GPU
    precision: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Weights:
    """Everything the forward reads."""

    token_embd: Any
    position_embd: Any
    embd_norm: Norm | None
    blocks: tuple[Block, ...]
    output_norm: Norm | None
    output: Any


def group(ck: Checkpoint, names: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Tensors `NAME.weight` to be stacked, and their biases; a missing bias beside one that exists is zero."""
    from ..tensor import constant

    weights = [ck.tensors[f"{n}.weight"] for n in names]
    biases = [ck.tensors.get(f"{n}.bias") for n in names]
    if all(b is None for b in biases):
        return weights, None
    return weights, [constant((w.n_rows,), 0.0) if b is None else b for w, b in zip(weights, biases, strict=True)]


def decoded_bytes(ck: Checkpoint, native: frozenset[QType]) -> int:
    """Bytes that loading takes beside the file: types without kernels as float32, rearranged tensors as they are."""
    total = 0
    for t in ck.tensors.values():
        if len(t.shape) < 2:
            continue
        if t.type not in native:
            total += 4 * t.n_elements
        elif t.view is None:
            total += t.nbytes
    return total


def load_weights(ck: Checkpoint, k: ModuleType, report: LoadReport) -> Weights:
    """Place all tensors with kernel module `k`."""
    arch, c = ARCHS[ck.config.arch], ck.config

    def norm(name: str) -> Norm:
        gain, bias = (ck.tensors.get(f"{name}.{kind}") for kind in ("weight", "bias"))
        placed = [None if t is None else k.upload(k.plain(t)) for t in (gain, bias)]
        return Norm(arch.norm, placed[0], placed[1], c.norm_eps)

    def weight(*names: str) -> Any:
        return noted(k.place(*group(ck, names)))

    def noted(w: Any) -> Any:
        for type_name, nbytes in w.kept:
            report.as_stored[type_name] = report.as_stored.get(type_name, 0) + nbytes
        for type_name, how, nbytes in w.copied:
            report.copied[f"{type_name} {how}"] = report.copied.get(f"{type_name} {how}", 0) + nbytes
            report.resident_bytes += nbytes
        return w

    blocks = []
    for i in range(c.n_layer):
        b = f"blk.{i}."
        blocks.append(
            Block(
                norm(b + "attn_norm"),
                weight(b + "attn_q", b + "attn_k", b + "attn_v"),
                weight(b + "attn_output"),
                norm(b + "ffn_norm"),
                weight(*_ffn(arch, b)),
                weight(b + "ffn_down"),
            )
        )
    head = "output" if "output.weight" in ck.tensors else "token_embd"
    position = ck.tensors.get("position_embd.weight")
    return Weights(
        noted(k.place_rows(ck.tensors["token_embd.weight"])),
        None if position is None else k.upload(k.plain(position)),
        Norm(arch.norm, None, None, c.norm_eps) if arch.embd_norm else None,
        tuple(blocks),
        norm("output_norm") if arch.final_norm else None,
        weight(head),
    )


def _ffn(arch: Arch, block: str) -> tuple[str, ...]:
    return (block + "ffn_gate", block + "ffn_up") if arch.act == "silu_gate" else (block + "ffn_up",)

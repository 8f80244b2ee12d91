"""Tensors compared in canonical space: bytes where the types match, values within the types' limits where not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint import Checkpoint
from ..files import Bytes
from ..quant.encode import decode_wide
from ..quant.types import QType
from ..tensor import Tensor
from .limits import Limit, limit_of

ELEMENTS = 1 << 21  # values of each side held at a time
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Compared:
    """One tensor of both sides. `share` is the largest error over its limit; `exact`: same type and same bytes."""

    name: str
    shape: tuple[int, ...]
    type_a: str
    type_b: str
    sha256_a: str
    sha256_b: str
    exact: bool
    equal: bool  # every value is the same, whatever the types
    max_error: float
    rms_error: float
    share: float
    limit: str
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return asdict(self) | {"shape": list(self.shape)}


class _Sums:
    """Errors gathered over the pieces of a tensor."""

    def __init__(self, a: QType, b: QType) -> None:
        self.limits: tuple[Limit, ...] = (limit_of(a), limit_of(b))
        self.max = self.share = self.squares = 0.0
        self.count, self.nan = 0, False

    def add(self, a: Floats, b: Floats) -> None:
        """Values (rows, elements) of both sides."""
        with np.errstate(all="ignore"):
            d = np.abs(a - b)
            d[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
            allowed = sum((_allowed(a, b, limit) for limit in self.limits), np.zeros_like(d))
            share = np.where(d == 0, 0, d / allowed)
            self.squares += float(np.square(d, dtype=np.float64).sum())
        self.nan |= bool(np.isnan(d).any())
        self.max = max(self.max, float(np.nanmax(d, initial=0)))
        self.share = max(self.share, float(np.nanmax(share, initial=0)))
        self.count += d.size

    @property
    def ok(self) -> bool:
        """Within the limits so far."""
        return not self.nan and self.share <= 1 + 1e-6


def _allowed(a: Floats, b: Floats, limit: Limit) -> Floats:
    largest = np.maximum(np.abs(a), np.abs(b))
    if limit.block > 1 and largest.shape[1] % limit.block == 0:
        blocks = largest.reshape(len(largest), -1, limit.block)
        largest = np.broadcast_to(blocks.max(axis=2, keepdims=True), blocks.shape).reshape(largest.shape)
    elif limit.block > 1:  # the other side's rows need not be whole blocks
        largest = np.broadcast_to(largest.max(axis=1, keepdims=True), largest.shape)
    out: Floats = largest * limit.relative + limit.floor
    return out


def pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    """The same rows of two tensors of one shape, a vector as a single row."""
    if len(a.shape) < 2:
        yield a.read().reshape(1, -1), b.read().reshape(1, -1)
        return
    step = max(ELEMENTS // max(a.shape[-1], 1), 1)
    for lo in range(0, a.n_rows, step):
        hi = min(lo + step, a.n_rows)
        yield a.rows(lo, hi), b.rows(lo, hi)


def compare(name: str, a: Tensor, b: Tensor) -> Compared:
    """Read both once: hashes of their bytes, errors of their values. The shapes must be the same."""
    hash_a, hash_b = hashlib.sha256(), hashlib.sha256()
    sums, exact = _Sums(a.type, b.type), a.type == b.type
    for rows_a, rows_b in pieces(a, b):
        hash_a.update(np.ascontiguousarray(rows_a).data)
        hash_b.update(np.ascontiguousarray(rows_b).data)
        same = a.type == b.type and np.array_equal(rows_a, rows_b)
        exact &= same
        if not same:
            sums.add(decode_wide(rows_a, a.type), decode_wide(rows_b, b.type))
    rms = sqrt(sums.squares / a.n_elements) if a.n_elements else 0.0
    equal = exact or (sums.max == 0 and not sums.nan)
    ok = exact if a.type == b.type else sums.ok
    said = "the same bytes" if a.type == b.type else " + ".join(
        f"{limit} ({t.name.lower()})" for limit, t in zip(sums.limits, (a.type, b.type), strict=True)
        if t not in (QType.F32, QType.F64)
    ) or "float32"  # fmt: skip
    error = float("nan") if sums.nan else sums.max
    return Compared(
        name, a.shape, a.type.name, b.type.name, hash_a.hexdigest(), hash_b.hexdigest(), exact, equal, error, rms,
        sums.share, said, ok,
    )  # fmt: skip


def within(a: Tensor, b: Tensor, stored: QType | None = None) -> bool:
    """Whether `compare` would say ok; stops at the first piece that does not. `stored`: what b was decoded from."""
    if a.shape != b.shape:
        return False
    kind = b.type if stored is None else stored
    sums = _Sums(a.type, kind)
    for rows_a, rows_b in pieces(a, b):
        if a.type == b.type and np.array_equal(rows_a, rows_b):
            continue
        if a.type == kind and b.type == kind:
            return False
        sums.add(decode_wide(rows_a, a.type), decode_wide(rows_b, b.type))
        if not sums.ok:
            return False
    return True


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, whatever their types."""
    return all(
        np.array_equal(rows_a, rows_b)
        if a.type == b.type
        else np.array_equal(decode_wide(rows_a, a.type), decode_wide(rows_b, b.type))
        for rows_a, rows_b in pieces(a, b)
    )


def compare_all(
    a: Checkpoint, b: Checkpoint, names: list[str], step: Callable[[int], object] | None = None
) -> list[Compared]:
    """Compare the tensors `names`; `step` hears of the bytes read on both sides."""
    out = []
    for name in names:
        out.append(compare(name, a.tensors[name], b.tensors[name]))
        if step:
            step(a.tensors[name].nbytes + b.tensors[name].nbytes)
    return out

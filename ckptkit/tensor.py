"""A tensor is a shape, a type and a function that returns rows as encoded bytes; nothing is read until asked.

Every operation but transposition moves whole rows. Quantisation blocks lie along a row, so these operations act on
quantised tensors as bytes, exactly, without decoding. A vector is n rows of one element, which makes them the same for
weights and biases. `origin` records, as plain JSON values, which source bytes a tensor came from and how, so that
others can redo it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UnsupportedError
from .files import Bytes, File
from .quant.types import BLOCKS, PLAIN, QType, row_bytes

CHUNK = 16 << 20  # bytes of rows held at a time, whatever the size of the tensor
PIECE = 1 << 18  # elements that one core takes at a time: a MiB of float32 stays in its cache
Rows = Callable[[int, int], Bytes]


@dataclass(frozen=True)
class Tensor:
    """`shape` in numpy order, (n,) or (out, in); `rows(lo, hi)` gives uint8 (hi - lo, row_bytes) in a fresh buffer.

    `view()` gives all rows as a view of the mapped file; None where the bytes do not lie in a file as they are. `piece`
    is the number of elements that are best asked for at a time; several threads may ask at once.
    """

    shape: tuple[int, ...]
    type: QType
    rows: Rows
    view: Callable[[], Bytes] | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    piece: int = PIECE

    @property
    def row_elements(self) -> int:
        """Values in a row: the last axis; 1 for a vector of a plain type."""
        if len(self.shape) > 1 or BLOCKS[self.type].elements > 1:
            return self.shape[-1]
        return 1

    @property
    def n_rows(self) -> int:
        """Rows: all axes but the last; of a vector of a plain type, its elements."""
        return self.n_elements // self.row_elements if self.row_elements else 0

    @property
    def n_elements(self) -> int:
        """Values in the tensor."""
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as stored."""
        return row_bytes(self.type, self.row_elements)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as stored."""
        return self.n_rows * self.row_bytes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first row, row after the last) of consecutive pieces of at most `piece` elements, at least one row each."""
        step = max(self.piece // max(self.row_elements, 1), 1)
        for lo in range(0, self.n_rows, step):
            yield lo, min(lo + step, self.n_rows)

    def chunks(self, budget: int = CHUNK) -> Iterator[tuple[int, Bytes]]:
        """(first row, rows) for consecutive pieces of at most `budget` bytes, at least one row each."""
        step = max(budget // max(self.row_bytes, 1), 1)
        for lo in range(0, self.n_rows, step):
            yield lo, self.rows(lo, min(lo + step, self.n_rows))

    def read(self) -> Bytes:
        """All rows: uint8 (n_rows, row_bytes)."""
        return self.rows(0, self.n_rows)


def _no_rows(_lo: int, _hi: int) -> Bytes:
    return np.empty((0, 0), np.uint8)


def from_file(file: File, offset: int, shape: tuple[int, ...], type: QType, at: str = "") -> Tensor:
    """A tensor that lies in `file` at `offset`, row after row; the file must hold all of it."""
    origin = {"op": "bytes", "file": file.path.name, "offset": offset, "type": type.name, "shape": list(shape)}
    t = Tensor(shape, type, _no_rows, origin=origin)
    nbytes, width, n = t.nbytes, t.row_bytes, t.n_rows
    file.require(offset, nbytes, at)

    def rows(lo: int, hi: int) -> Bytes:
        return file.read(offset + lo * width, (hi - lo) * width, at).reshape(hi - lo, width)

    return replace(t, rows=rows, view=lambda: file.map()[offset : offset + nbytes].reshape(n, width))


def from_array(array: npt.NDArray[Any], type: QType, shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor over an array in memory: values of a plain type, or uint8 rows of a block type with `shape` given."""
    shape = tuple(array.shape) if shape is None else shape
    t = Tensor(shape, type, _no_rows)
    data = np.ascontiguousarray(array).view(np.uint8).reshape(t.n_rows, t.row_bytes)
    return replace(t, rows=lambda lo, hi: data[lo:hi].copy(), view=lambda: data)


def cut(t: Tensor, lo: int, hi: int) -> Tensor:
    """Rows lo..hi: a part of a fused tensor, one layer of a slab, the real part of a padded vocabulary."""
    view = t.view
    return Tensor(
        (hi - lo, *t.shape[-1:]) if t.row_elements > 1 or len(t.shape) > 1 else (hi - lo,),
        t.type,
        lambda a, b: t.rows(lo + a, lo + b),
        (lambda: view()[lo:hi]) if view else None,
        {"op": "cut", "rows": [lo, hi], "of": t.origin},
        t.piece,
    )


def cat(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts one after another; types and row lengths must agree."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(p.type != first.type or p.row_elements != first.row_elements for p in parts):
        raise UnsupportedError(
            "tensors that are stored as one have different types or row lengths",
            got=", ".join(f"{p.type.name} {p.shape}" for p in parts),
            hint="convert with --type to one type",
        )
    starts = np.cumsum([0, *(p.n_rows for p in parts)])

    def rows(lo: int, hi: int) -> Bytes:
        pieces = [
            p.rows(max(lo - s, 0), min(hi - s, p.n_rows))
            for p, s in zip(parts, starts[:-1].tolist(), strict=True)
            if lo < s + p.n_rows and hi > s
        ]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty((0, first.row_bytes), np.uint8)

    shape = (int(starts[-1]), *first.shape[1:])
    origin = {"op": "cat", "of": [p.origin for p in parts]}
    return Tensor(shape, first.type, rows, None, origin, max(p.piece for p in parts))


def pad(t: Tensor, n_rows: int) -> Tensor:
    """Zero rows appended up to `n_rows`; plain types only, where zero bytes mean zero."""
    return t if n_rows == t.n_rows else cat([t, constant((n_rows - t.n_rows, *t.shape[1:]), 0.0, t.type)])


def permute(t: Tensor, order: npt.NDArray[np.int64], **how: Any) -> Tensor:
    """Row k of the result is row order[k]; a chunk reads only the span of rows it needs. `how` goes into the origin."""

    def rows(lo: int, hi: int) -> Bytes:
        index = order[lo:hi]
        first = int(index.min())
        return t.rows(first, int(index.max()) + 1)[index - first]

    return Tensor(t.shape, t.type, rows, None, {"op": "permute", **how, "of": t.origin}, t.piece)


def transpose(t: Tensor) -> Tensor:
    """(in, out) to (out, in), by column stripes; plain types only, since blocks lie along rows.

    Every stripe reads the whole tensor, so pieces are large.
    """
    if t.type not in PLAIN or len(t.shape) != 2:
        raise UnsupportedError(
            f"a {t.type.name} tensor of {len(t.shape)} axes cannot be transposed", hint="convert with --type f32"
        )
    n, m = t.shape
    width = t.row_bytes // m

    def rows(lo: int, hi: int) -> Bytes:
        out = np.empty((hi - lo, n, width), np.uint8)
        for first, chunk in t.chunks():
            stripe = chunk.reshape(-1, m, width)[:, lo:hi]
            out[:, first : first + len(chunk)] = stripe.transpose(1, 0, 2)
        return out.reshape(hi - lo, n * width)

    return Tensor((m, n), t.type, rows, None, {"op": "transpose", "of": t.origin}, CHUNK // width)


def constant(shape: tuple[int, ...], value: float, type: QType = QType.F32) -> Tensor:
    """A tensor of one value: zero biases, unit gains, padding. In blocks there is zero alone, whose bytes are zeros."""
    t = Tensor(shape, type, _no_rows)
    one = np.frombuffer(_element(value, type) if value else b"\0", np.uint8)
    width = t.row_bytes // len(one)

    def rows(lo: int, hi: int) -> Bytes:
        return np.tile(one, (hi - lo, width))

    return replace(t, rows=rows, origin={"op": "constant", "value": value, "shape": list(shape), "type": type.name})


def _element(value: float, type: QType) -> bytes:
    if type == QType.BF16:
        return np.float32(value).tobytes()[2:]  # exact for 0 and 1, the only constants there are
    return np.array(value, {QType.F32: "<f4", QType.F16: "<f2", QType.F64: "<f8"}[type]).tobytes()

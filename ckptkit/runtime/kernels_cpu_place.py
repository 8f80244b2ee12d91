# mypy: ignore-errors
"""Weights on the CPU: where their rows lie, as the products read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..quant.encode import decode_rows
from ..quant.types import QType, row_bytes
from ..tensor import CHUNK, Tensor
from .kernels_cpu_blocks import DECODE
from .kernels_cpu_lanes import LINE, ROWS, group_bytes, interleave
from .simd import LANES

PLAIN = (QType.F32, QType.F16, QType.BF16)
NATIVE = frozenset({*PLAIN, *ROWS})  # types whose bytes products read


@dataclass
class Weight:
    """Stacked rows: parts as they lie in the file, interleaved or decoded; `table` is what kernels read of them."""

    arrays: list[np.ndarray]  # uint8, kept alive
    types: tuple[int, int]
    n_rows: int
    k: int
    table: np.ndarray  # int64 (n_parts, 4)
    bias: np.ndarray | None
    kept: list[tuple[str, int]]  # type name and bytes of every part that is used as stored
    copied: list[tuple[str, str, int]]  # type name, what was done and bytes of every part that is not


def aligned(*shape):
    """Bytes that begin at a cache line."""
    n = int(np.prod(shape))
    flat = np.empty(n + LINE, np.uint8)
    first = -flat.ctypes.data % LINE
    return flat[first : first + n].reshape(shape)


def place(parts: list[Tensor], biases: list[Tensor] | None):
    """Rows of all parts as one weight for products.

    Plain types stay where they lie in the file; blocks keep their bytes, interleaved sixteen rows at a time; types
    without a kernel, and what goes beyond two types, are decoded to f32.
    """
    used = list(dict.fromkeys(t.type if t.type in NATIVE else QType.F32 for t in parts))
    if len(used) > 2:
        used = [QType.F32]
    return _weight(parts, used, biases, interleaved=True)


def place_rows(t: Tensor):
    """A table of which single rows are read: as it lies in the file."""
    return _weight([t], [t.type if t.type in DECODE else QType.F32], None, interleaved=False)


def _weight(parts, used, biases, interleaved):
    table, arrays, kept, copied = [], [], [], []
    for t in parts:
        type = t.type if t.type in used else QType.F32
        width = row_bytes(type, t.row_elements)
        if type != t.type:
            array = np.empty((t.n_rows, t.row_elements), np.float32)
            for lo, chunk in t.chunks():
                array[lo : lo + len(chunk)] = decode_rows(chunk, t.type)
            copied.append((t.type.name, "decoded to F32", array.nbytes))
        elif interleaved and type in ROWS:
            array = aligned(-(-t.n_rows // LANES), group_bytes(type, width))
            step = max(CHUNK // width // LANES, 1) * LANES
            for lo in range(0, t.n_rows, step):
                rows = t.rows(lo, min(lo + step, t.n_rows))
                interleave(rows, type, array[lo // LANES : (lo + step) // LANES])
            width = array.shape[1] // LANES
            copied.append((t.type.name, "interleaved", array.nbytes))
        elif t.view is not None:
            array = t.view()
            kept.append((t.type.name, t.nbytes))
        else:
            array = t.read()
            copied.append((t.type.name, "rearranged", t.nbytes))
        arrays.append(array)
        table.append((array.ctypes.data, t.n_rows, width, used.index(type)))
    bias = np.concatenate([plain(b) for b in biases]) if biases else None
    pair = (int(used[0]), int(used[-1]))
    n_rows, k = sum(t.n_rows for t in parts), parts[0].row_elements
    return Weight(arrays, pair, n_rows, k, np.array(table, np.int64), bias, kept, copied)


def plain(t: Tensor):
    """A small tensor as f32, flat or (rows, columns)."""
    values = decode_rows(t.read(), t.type)
    return np.ascontiguousarray(values.reshape(t.shape), np.float32)

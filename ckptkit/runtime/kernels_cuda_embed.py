"""Embedding: x = row tokens[i] of the token embedding + row pos[i] of the position embedding; only the rows asked for
are decoded."""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from ..quant.types import QType
from .cuda_layout import LAYOUTS
from .cuda_plan import Embed
from .cuda_ptx import f32, i32, load_i32, start_next, store_f32, u64, wait_for_previous
from .kernels_cuda_value import value_of

ARGUMENTS = (u64,) * 8


def pitches(type: QType, n_in: int) -> list[int]:
    """Bytes from row to row in each of four planes; 0 for planes that the type lacks."""
    layout = LAYOUTS[type]
    return [layout.pitch(k, n_in) if k < len(layout.planes) else 0 for k in range(4)]


def kernel(p: Embed):
    """The kernel function of an Embed plan; grid (tokens, parts of a row)."""
    N, THREADS, DEPENDENT = p.n_embd, p.threads, p.dependent
    A0, A1, A2, A3 = pitches(p.type, N)
    value = value_of(p.type)
    POSITION = p.position_type is not None
    position_value = value_of(QType.F32)

    def embed(x, w0, w1, w2, w3, position_rows, tokens, positions):
        i = i32(cuda.blockIdx.x)
        if DEPENDENT:
            wait_for_previous()
            start_next()
        token, position = load_i32(tokens + u64(i) * u64(4)), load_i32(positions + u64(i) * u64(4))
        p0, p1 = w0 + u64(token) * u64(A0), w1 + u64(token) * u64(A1)
        p2, p3 = w2 + u64(token) * u64(A2), w3 + u64(token) * u64(A3)
        row = position_rows + u64(position) * u64(N * 4)  # a plain table, not padded as a matrix is
        for k in range(i32(cuda.blockIdx.y) * i32(THREADS) + i32(cuda.threadIdx.x), N, THREADS * i32(cuda.gridDim.y)):
            v = value(p0, p1, p2, p3, i32(k))
            if POSITION:
                v += position_value(row, u64(0), u64(0), u64(0), i32(k))
            store_f32(x + (u64(i) * u64(N) + u64(k)) * u64(4), f32(v))

    return embed

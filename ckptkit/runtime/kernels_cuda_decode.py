"""Rows of a matrix decoded to f32, f16 or bf16, for a matrix product on the tensor cores."""

from __future__ import annotations

from numba import cuda

from ..quant.types import QType
from .cuda_plan import Decode
from .cuda_ptx import i32, u64
from .kernels_cuda_embed import pitches
from .kernels_cuda_value import store_as, value_of

ARGUMENTS = (u64,) * 5


def kernel(p: Decode):
    """The kernel function of a Decode plan; grid (rows,)."""
    N, THREADS = p.n_in, p.threads
    A0, A1, A2, A3 = pitches(p.type, N)
    value, store = value_of(p.type), store_as(p.to)
    ROW = N * (4 if p.to == QType.F32 else 2)

    def decode(out, w0, w1, w2, w3):
        row = i32(cuda.blockIdx.x)
        p0, p1 = w0 + u64(row) * u64(A0), w1 + u64(row) * u64(A1)
        p2, p3 = w2 + u64(row) * u64(A2), w3 + u64(row) * u64(A3)
        for k in range(i32(cuda.threadIdx.x), N, THREADS):
            store(out + u64(row) * u64(ROW), i32(k), value(p0, p1, p2, p3, i32(k)))

    return decode

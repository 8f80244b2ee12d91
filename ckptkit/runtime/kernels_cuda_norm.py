"""Rows normalised, converted, or joined with their neighbours: what stands between the matrix products of a prompt."""

# mypy: ignore-errors
from __future__ import annotations

from math import sqrt

from numba import cuda

from ..quant.types import QType
from .cuda_plan import Norm
from .cuda_ptx import bits_f32, f32, i32, load_f32, load_i32, u32, u64
from .kernels_cuda_matvec import warp_sum
from .kernels_cuda_value import round_bf16, store_as

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 5 + (f32,)


def kernel(p: Norm):
    """The kernel function of a Norm plan; grid (rows,). `rows` picks rows of x where it is given."""
    N, THREADS, SPLIT = p.width, p.threads, p.split
    WARPS = THREADS // 32
    NORMED, LAYER = p.kind != "", p.kind == "layer"
    ROW = N * SPLIT * (4 if p.to == QType.F32 else 2)
    store = store_as(p.to)

    @device
    def block_sum(v, reduce, tid):
        v = warp_sum(v)
        cuda.syncthreads()
        if tid % i32(32) == 0:
            reduce[tid // i32(32)] = v
        cuda.syncthreads()
        total = f32(0)
        for w in range(WARPS):
            total += reduce[w]
        return total

    def norm(out, x, gain, bias, rows, eps):
        reduce = cuda.shared.array(32, f32)
        tid, i = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        source = load_i32(rows + u64(i) * u64(4)) if rows != u64(0) else i
        row, to = x + u64(source) * u64(N * 4), out + u64(i) * u64(ROW)
        mean, scale = f32(0), f32(1)
        if NORMED:
            if LAYER:
                total = f32(0)
                for k in range(tid, N, THREADS):
                    total += load_f32(row + u64(k) * u64(4))
                mean = block_sum(total, reduce, tid) * f32(1.0 / N)
            square = f32(0)
            for k in range(tid, N, THREADS):
                d = load_f32(row + u64(k) * u64(4)) - mean
                square += d * d
            scale = f32(1) / sqrt(block_sum(square, reduce, tid) * f32(1.0 / N) + eps)
        for k in range(tid, N, THREADS):
            v = (load_f32(row + u64(k) * u64(4)) - mean) * scale
            if gain != u64(0):
                v *= load_f32(gain + u64(k) * u64(4))
            if bias != u64(0):
                v += load_f32(bias + u64(k) * u64(4))
            if SPLIT == 1:
                store(to, i32(k), v)
            else:
                for s in range(SPLIT):  # pieces that add up to the value, each rounded from what the ones before left
                    piece = round_bf16(v)
                    store(to, i32(k + s * N), v)
                    v -= bits_f32(u32(piece) << u32(16))

    return norm

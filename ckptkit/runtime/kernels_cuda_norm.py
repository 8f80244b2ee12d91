"""Rows normalised and rounded to what a matrix product reads: what stands between the products of a prompt.

A value may be kept in several 16-bit pieces: bf16 pieces add up to it as they are; the second of two f16 pieces counts
1 / PIECE of its size, which keeps it clear of f16's smallest numbers.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import sqrt

from numba import cuda

from ..quant.types import QType
from .cuda_plan import PIECE, Norm
from .cuda_ptx import bits_f32, f16_f32, f32, f32_bits, f32_f16, i32, load_f32, load_i32, store_f32, store_u16, u32, u64
from .kernels_cuda_matvec import warp_sum
from .kernels_cuda_value import round_bf16, store_as

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 6 + (f32,)


def kernel(p: Norm):
    """The kernel function of a Norm plan; grid (rows,). `rows` picks rows of x where it is given; `factors` (rows,)
    takes what undoes the scaling of each row where the plan scales."""
    N, THREADS, SPLIT, SCALED, HALF = p.width, p.threads, p.split, p.scaled, p.to == QType.F16
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

    @device
    def block_max(v, reduce, tid):
        for b in range(5):
            v = max(v, cuda.shfl_xor_sync(0xFFFFFFFF, v, 16 >> b))
        cuda.syncthreads()
        if tid % i32(32) == 0:
            reduce[tid // i32(32)] = v
        cuda.syncthreads()
        for w in range(WARPS):
            v = max(v, reduce[w])
        return v

    @device
    def element(row, gain, bias, k, mean, scale):
        v = (load_f32(row + u64(k) * u64(4)) - mean) * scale
        if gain != u64(0):
            v *= load_f32(gain + u64(k) * u64(4))
        if bias != u64(0):
            v += load_f32(bias + u64(k) * u64(4))
        return v

    @device
    def exponent_for(top):
        """Exponent field of the power of two that brings `top` to 2^14..2^15; of 1 where it is not finite."""
        field = i32(f32_bits(top) >> u32(23))
        if field == i32(255):
            return i32(127)
        return min(i32(268) - field, i32(253))

    def norm(out, x, gain, bias, rows, factors, eps):
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
        to_f16_range = f32(1)
        if SCALED:
            top = f32(0)
            for k in range(tid, N, THREADS):
                top = max(top, abs(element(row, gain, bias, i32(k), mean, scale)))
            field = exponent_for(block_max(top, reduce, tid))
            to_f16_range = bits_f32(u32(field) << u32(23))
            if tid == 0:
                store_f32(factors + u64(i) * u64(4), bits_f32(u32(i32(254) - field) << u32(23)))
        for k in range(tid, N, THREADS):
            v = element(row, gain, bias, i32(k), mean, scale) * to_f16_range
            if SPLIT == 1:
                store(to, i32(k), v)
            else:
                for s in range(SPLIT):  # pieces that add up to the value, each rounded from what the ones before left
                    at = i32(k + s * N)
                    if HALF:
                        piece = f32_f16(v)
                        store_u16(to + u64(at) * u64(2), piece)
                        v = (v - f16_f32(piece)) * f32(PIECE)
                    else:
                        store(to, at, v)
                        v -= bits_f32(u32(round_bf16(v)) << u32(16))

    return norm

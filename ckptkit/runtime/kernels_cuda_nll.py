"""-log p of one token of each row of logits: one pass over the row, the sum of the exponentials in float64.

Each thread keeps the largest logit it has met and the sum of exp(logit - largest), scaled anew when a larger one comes.
Exponentials are float32, of exact differences where they matter. A NaN or an infinite logit makes the result NaN, and a
target of minus infinity an infinite one.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import log

from numba import cuda

from .cuda_plan import Nll
from .cuda_ptx import exp2, f32, f64, i32, load_f32, load_i32, store_f64, u64

LOG2_E = 1.4426950408889634
LOWEST = -3.0e38
ARGUMENTS = (u64,) * 3 + (i32,)


def kernel(p: Nll):
    """The kernel function of a Nll plan; grid (rows,)."""
    THREADS, WARPS = p.threads, p.threads // 32
    DEEP = 8  # logits loaded before the first is used

    def nll(out, logits, targets, n):
        tops = cuda.shared.array(WARPS, f32)
        sums = cuda.shared.array(THREADS, f64)
        some = cuda.local.array(DEEP, f32)
        tid, row = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        line = logits + u64(row) * u64(n) * u64(4)
        top, total = f32(LOWEST), f64(0)
        for start in range(tid, n, THREADS * DEEP):
            for u in range(DEEP):
                some[u] = load_f32(line + u64(min(i32(start) + i32(u * THREADS), n - i32(1))) * u64(4))
            high = top
            for u in range(DEEP):
                high = max(high, some[u])
            part = f32(0)
            for u in range(DEEP):
                if i32(start) + i32(u * THREADS) < n:
                    part += exp2((some[u] - high) * f32(LOG2_E))
            total = total * f64(exp2((top - high) * f32(LOG2_E))) + f64(part)
            top = high
        high = top
        for k in range(5):
            high = max(high, cuda.shfl_xor_sync(0xFFFFFFFF, high, 16 >> k))
        if tid % i32(32) == 0:
            tops[tid // i32(32)] = high
        cuda.syncthreads()
        high = tops[0]
        for w in range(1, WARPS):
            high = max(high, tops[w])
        sums[tid] = total * f64(exp2((top - high) * f32(LOG2_E)))
        cuda.syncthreads()
        width = THREADS // 2
        while width:
            if tid < i32(width):
                sums[tid] += sums[tid + i32(width)]
            cuda.syncthreads()
            width //= 2
        if tid == 0:
            target = load_i32(targets + u64(row) * u64(4))
            picked = load_f32(line + u64(target) * u64(4))
            store_f64(out + u64(row) * u64(8), log(sums[0]) - (f64(picked) - f64(high)))

    return nll

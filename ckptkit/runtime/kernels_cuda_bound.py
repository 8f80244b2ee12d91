"""A lower bound of the k-th largest of many logits: the k-th largest of the maxima of groups of them.

Every block leaves PARTS maxima of its logits; the last block to finish looks for the k-th largest of all maxima, bit by
bit from the top of an order-preserving integer. At least k logits reach it, and hardly more: few groups hold two of the
k largest, since what lies side by side is dealt out to several groups and, 32 at a time, to several blocks. NaN is
passed over.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

from numba import cuda

from .cuda_plan import Bound
from .cuda_ptx import (
    bits_f32,
    count_up_to,
    f32,
    f32_bits,
    fence,
    i32,
    load_f32,
    start_next,
    store_f32,
    u32,
    u64,
    wait_for_previous,
)

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 4 + (i32, i32)
LOWEST = -math.inf
SIGN, ALL = 0x80000000, 0xFFFFFFFF
PARTS = 8
BITS = 20  # looked at: a bound with the others zero is a little lower


@device
def rising(x):
    """A float's bits, changed so that they rise with it as unsigned integers."""
    bits = f32_bits(x)
    return u32(bits ^ u32(ALL)) if bits & u32(SIGN) else u32(bits ^ u32(SIGN))


@device
def back(key):
    """The float of such bits; minus infinity below all floats."""
    if key < u32(0x007FFFFF):
        return f32(LOWEST)
    return bits_f32(u32(key ^ u32(SIGN)) if key & u32(SIGN) else u32(key ^ u32(ALL)))


def kernel(p: Bound):
    """The kernel function of a Bound plan; grid (rows, blocks). `maxima` (rows, groups), `bound` (rows,)."""
    THREADS, DEPENDENT = p.threads, p.dependent
    WARPS, GROUPS, EACH = p.threads // 32, p.groups, p.groups // 32

    def bound(out, logits, maxima, counters, n, k):
        tops = cuda.shared.array((WARPS, PARTS), f32)
        last = cuda.shared.array(1, i32)
        some = cuda.local.array(8, f32)
        keys = cuda.local.array(EACH, u32)
        tid, row, block, blocks = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        if DEPENDENT:
            wait_for_previous()
            start_next()
        line = logits + u64(row) * u64(n) * u64(4)
        top = f32(LOWEST)
        warp, lane = tid // i32(32), tid % i32(32)
        for start in range((warp * blocks + block) * i32(32) + lane, n, blocks * i32(THREADS * 8)):
            for u in range(8):
                at = i32(start) + i32(u * THREADS) * blocks
                some[u] = load_f32(line + u64(min(at, n - i32(1))) * u64(4))
            for u in range(8):
                if i32(start) + i32(u * THREADS) * blocks < n and some[u] > top:
                    top = some[u]
        width = 16
        while width >= PARTS:
            top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, width))
            width //= 2
        if lane < i32(PARTS):
            tops[warp, lane] = top
        cuda.syncthreads()
        mine = maxima + u64(row * i32(GROUPS)) * u64(4)
        if tid < i32(PARTS):
            for w in range(WARPS):
                top = max(top, tops[w, tid])
            store_f32(mine + u64(block * i32(PARTS) + tid) * u64(4), top)
        fence()
        cuda.syncthreads()
        if tid == 0:
            last[0] = i32(count_up_to(counters + u64(row) * u64(4), u32(blocks - i32(1))) == u32(blocks - i32(1)))
            fence()
        cuda.syncthreads()
        if last[0] == 0 or tid >= i32(32):
            return
        for e in range(EACH):
            keys[e] = rising(load_f32(mine + u64(i32(e * 32) + tid) * u64(4)))
        found = u32(0)
        for bit in range(BITS):
            trial = u32(found | u32(u32(SIGN) >> u32(bit)))
            reach = i32(0)
            for e in range(EACH):
                if keys[e] >= trial:
                    reach += i32(1)
            for s in range(5):
                reach += cuda.shfl_xor_sync(0xFFFFFFFF, reach, 16 >> s)
            if reach >= k:
                found = trial
            if reach == k:
                break
        if tid == 0:
            store_f32(out + u64(row) * u64(4), back(found))

    return bound

"""Index of the largest of many logits, the lowest one of equals; and the step of a sequence that feeds its own token
back.

Blocks leave their best; the last to finish compares them. With `advance` it also writes the token where the next step
reads it, moves the position on, and appends the token to a log in page-locked host memory, where the host reads it
without stopping the card.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Pick
from .cuda_ptx import (
    count_up_to,
    f32,
    fence,
    i32,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
    u32,
    u64,
    wait_for_previous,
)

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 8 + (i32, i32)


@device
def advance(token, row, tokens, positions, log, stride):
    """The row's next step takes this token, one position on; `log` (rows, stride) gets it at that position. A row that
    goes on after its last position stays there."""
    place = load_i32(positions + u64(row) * u64(4)) + i32(1)
    store_i32(tokens + u64(row) * u64(4), token)
    store_i32(positions + u64(row) * u64(4), min(place, stride - i32(2)))
    store_i32(log + (u64(row) * u64(stride) + u64(min(place, stride - i32(1)))) * u64(4), token)


def kernel(p: Pick):
    """The kernel function of a Pick plan; grid (rows, blocks)."""
    THREADS, ADVANCE, DEPENDENT = p.threads, p.advance, p.dependent
    WARPS = THREADS // 32

    @device
    def better(a, i, b, j):
        """Whether logit b at j beats a at i; NaN never wins, and loses to anything."""
        return b > a or (b == a and j < i) or (a != a and b == b)

    @device
    def best_of_block(top, at, values, places, tid):
        for k in range(5):
            b = cuda.shfl_xor_sync(0xFFFFFFFF, top, 16 >> k)
            j = cuda.shfl_xor_sync(0xFFFFFFFF, at, 16 >> k)
            if better(top, at, b, j):
                top, at = b, j
        if tid % i32(32) == 0:
            values[tid // i32(32)] = top
            places[tid // i32(32)] = at
        cuda.syncthreads()
        top, at = values[0], places[0]
        for w in range(1, WARPS):
            if better(top, at, values[w], places[w]):
                top, at = values[w], places[w]
        return top, at

    def pick(out, logits, best, best_at, counters, tokens, positions, log, n, stride):
        values = cuda.shared.array(WARPS, f32)
        places = cuda.shared.array(WARPS, i32)
        last = cuda.shared.array(1, i32)
        some = cuda.local.array(8, f32)
        tid, row, block, blocks = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        if DEPENDENT:
            wait_for_previous()
        line = logits + u64(row) * u64(n) * u64(4)
        top, at = f32(-3.0e38), i32(0x7FFFFFFF)
        for start in range(block * i32(THREADS) + tid, n, blocks * i32(THREADS * 8)):
            for u in range(8):
                k = i32(start) + i32(u * THREADS) * blocks
                some[u] = load_f32(line + u64(min(k, n - i32(1))) * u64(4))
            for u in range(8):
                k = min(i32(start) + i32(u * THREADS) * blocks, n - i32(1))
                if better(top, at, some[u], k):
                    top, at = some[u], k
        top, at = best_of_block(top, at, values, places, tid)
        mine = u64(row * blocks) * u64(4)
        if tid == 0:
            store_f32(best + mine + u64(block) * u64(4), top)
            store_i32(best_at + mine + u64(block) * u64(4), at)
            fence()
            last[0] = i32(count_up_to(counters + u64(row) * u64(4), u32(blocks - i32(1))) == u32(blocks - i32(1)))
            fence()
        cuda.syncthreads()
        if last[0] == 0:
            return
        top, at = f32(-3.0e38), i32(0x7FFFFFFF)
        for k in range(tid, blocks, THREADS):
            v, j = load_f32(best + mine + u64(k) * u64(4)), load_i32(best_at + mine + u64(k) * u64(4))
            if better(top, at, v, j):
                top, at = v, j
        top, at = best_of_block(top, at, values, places, tid)
        if tid == 0:
            at = min(at, n - i32(1))  # all NaN: still an index
            store_i32(out + u64(row) * u64(4), at)
            if ADVANCE:
                advance(at, row, tokens, positions, log, stride)

    return pick

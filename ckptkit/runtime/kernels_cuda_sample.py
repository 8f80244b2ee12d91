"""Drawing the next token as sampler.pick does: top-k, top-p, min-p, temperature, one random number a token.

Tokens whose logit reaches the bound (kernels_cuda_bound.py) are gathered; the last block to finish ranks them by
logit, the lower index of equals first, and takes the steps in the host's order and in float64. Exponentials and sums
may differ from numpy's in the last bit, so a draw differs only where its number lies within about 1e-15 of a boundary.

Where more tokens reach the bound than there is room for (many equal logits), or fewer than k (NaN among them), -1 goes
to the log and nothing else changes: the host picks that token, from the logits that are still there.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import exp

from numba import cuda

from .cuda_plan import Sample
from .cuda_ptx import (
    add_u32,
    count_up_to,
    f32,
    f64,
    fence,
    i32,
    load_f32,
    load_f64,
    load_i32,
    load_u32,
    store_f32,
    store_i32,
    store_u32,
    u32,
    u64,
    wait_for_previous,
)
from .kernels_cuda_pick import advance

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 9 + (i32,) * 3
SETTINGS = 3  # temperature, top-p, min-p, ahead of a row's random numbers


def kernel(p: Sample):
    """The kernel function of a Sample plan; grid (rows, blocks).

    `found` (rows, room) logits, then (rows, room) ids. `counters` (rows, 2): of tokens found, of blocks done. `numbers`
    (rows, SETTINGS + stride) float64: the settings, then the random number for each position. `log` (rows, stride).
    """
    THREADS, ROOM, MOST, DEPENDENT = p.threads, p.room, p.most, p.dependent

    @device
    def total(values, n):
        s = f64(0)
        for i in range(n):
            s += values[i]
        return s

    @device
    def first_to_reach(values, n, mass):
        """Index of the first value at which the sum so far is at least `mass`; n if it never is."""
        s = f64(0)
        for i in range(n):
            s += values[i]
            if s >= mass:
                return i32(i)
        return i32(n)

    def sample(logits, bounds, found, found_ids, counters, numbers, tokens, positions, log, n, k, stride):
        values = cuda.shared.array(ROOM, f32)
        ids = cuda.shared.array(ROOM, i32)
        z = cuda.shared.array(MOST, f64)  # the k largest, and what becomes of them
        weight = cuda.shared.array(MOST, f64)
        best = cuda.shared.array(MOST, i32)
        scale = cuda.shared.array(1, f64)
        state = cuda.shared.array(2, i32)
        some = cuda.local.array(8, f32)
        tid, row, block, blocks = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        if DEPENDENT:
            wait_for_previous()
        line = logits + u64(row) * u64(n) * u64(4)
        bound = load_f32(bounds + u64(row) * u64(4))
        count = counters + u64(row) * u64(8)
        mine = u64(row * i32(ROOM)) * u64(4)
        for start in range(block * i32(THREADS) + tid, n, blocks * i32(THREADS * 8)):
            for u in range(8):
                at = i32(start) + i32(u * THREADS) * blocks
                some[u] = load_f32(line + u64(min(at, n - i32(1))) * u64(4))
            for u in range(8):
                at = i32(start) + i32(u * THREADS) * blocks
                if at < n and some[u] >= bound:
                    slot = i32(add_u32(count, u32(1)))
                    if slot < i32(ROOM):
                        store_f32(found + mine + u64(slot) * u64(4), some[u])
                        store_i32(found_ids + mine + u64(slot) * u64(4), at)
        fence()
        cuda.syncthreads()
        if tid == 0:
            state[0] = i32(count_up_to(count + u64(4), u32(blocks - i32(1))) == u32(blocks - i32(1)))
            fence()
            state[1] = i32(load_u32(count))
        cuda.syncthreads()
        if state[0] == 0:
            return
        here = state[1]
        kept = min(k, n)
        place = min(load_i32(positions + u64(row) * u64(4)) + i32(1), stride - i32(1))
        if tid == 0:
            store_u32(count, u32(0))
        if here > i32(ROOM) or here < kept:
            if tid == 0:
                store_i32(log + (u64(row) * u64(stride) + u64(place)) * u64(4), i32(-1))
            return
        own = numbers + u64(row) * u64(stride + i32(SETTINGS)) * u64(8)
        temperature, top_p, min_p = load_f64(own), load_f64(own + u64(8)), load_f64(own + u64(16))
        number = load_f64(own + u64(place + i32(SETTINGS)) * u64(8))
        for i in range(tid, here, THREADS):
            values[i] = load_f32(found + mine + u64(i) * u64(4))
            ids[i] = load_i32(found_ids + mine + u64(i) * u64(4))
        cuda.syncthreads()
        for i in range(tid, here, THREADS):
            v, token, rank = values[i], ids[i], i32(0)
            for j in range(here):
                if values[j] > v or (values[j] == v and ids[j] < token):
                    rank += i32(1)
            if rank < kept:
                z[rank] = f64(v)
                best[rank] = token
        cuda.syncthreads()

        # softmax, and top-p of it
        e = f64(0)
        if tid < kept:
            e = exp(z[tid] - z[0])
            weight[tid] = e
        cuda.syncthreads()
        if tid == 0:
            scale[0] = total(weight, kept)
        cuda.syncthreads()
        if top_p < f64(1):
            if tid < kept:
                weight[tid] = e / scale[0]
            cuda.syncthreads()
            if tid == 0:
                state[1] = min(first_to_reach(weight, kept, top_p) + i32(1), kept)
            cuda.syncthreads()
            kept = state[1]
            if tid < kept:
                weight[tid] = e
            cuda.syncthreads()
            if tid == 0:
                scale[0] = total(weight, kept)
            cuda.syncthreads()
        # min-p: probabilities fall, so those that are likely enough come first
        if min_p > f64(0):
            if tid == 0:
                state[1] = i32(1)
            cuda.syncthreads()
            least = min_p * (weight[0] / scale[0])
            after = min(tid + i32(1), kept - i32(1))
            if tid < kept and e / scale[0] >= least and (after == tid or not weight[after] / scale[0] >= least):
                state[1] = tid + i32(1)
            cuda.syncthreads()
            kept = state[1]
        # temperature, and the draw
        if tid < kept:
            e = exp(z[tid] / temperature - z[0] / temperature)
            weight[tid] = e
        cuda.syncthreads()
        if tid == 0:
            scale[0] = total(weight, kept)
        cuda.syncthreads()
        if tid < kept:
            weight[tid] = e / scale[0]
        cuda.syncthreads()
        if tid == 0:
            token = best[min(first_to_reach(weight, kept, number), kept - i32(1))]
            advance(token, row, tokens, positions, log, stride)

    return sample

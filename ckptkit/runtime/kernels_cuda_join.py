"""The end of attention over a cache that several blocks share: the last block of a token's heads joins what all left.

A block leaves a record for each head: `width` weighted values, the largest score (base 2) and the sum of the weights.
The records are joined in their order, so the result does not depend on who is last.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import record_floats
from .cuda_ptx import count_up_to, exp2, f32, fence, i32, load_f32, load_f32x4, store_f32, u32, u64

device = cuda.jit(device=True)
LOWEST = -1e30


def joiner(heads: int, n_head: int, head_dim: int, width: int, threads: int):
    """(leave, join), device functions of blocks that own `heads` heads each; grid (head blocks, splits, tokens)."""
    HEADS, N_HEAD, HEAD_DIM, WIDTH, THREADS = heads, n_head, head_dim, width, threads
    COLUMNS, RECORD, AT_ONCE = HEADS * WIDTH // 4, record_floats(width), 16 if threads <= 256 else 8
    N_SOME = 4 * AT_ONCE

    @device
    def record_of(partial, token, head, split):
        return partial + u64((token * i32(N_HEAD) + head) * i32(cuda.gridDim.y) + split) * u64(RECORD * 4)

    @device
    def place_of(out, token, head, d):
        return out + (u64(token) * u64(N_HEAD * HEAD_DIM) + u64(head * i32(HEAD_DIM) + d)) * u64(4)

    @device
    def leave(out, partial, token, head, split, splits, d, value, top, total):
        """Element d of a head's weighted values: the result where there is one split, else a part of the record."""
        if splits == 1:
            if d < i32(HEAD_DIM):
                store_f32(place_of(out, token, head, d), value / total)
        else:
            record = record_of(partial, token, head, split)
            store_f32(record + u64(d) * u64(4), value)
            if d == 0:
                store_f32(record + u64(WIDTH * 4), top)
                store_f32(record + u64(WIDTH * 4 + 4), total)

    @device
    def join(out, partial, counters, scratch, last, token, splits, tid):
        """After `leave`: the last block to come joins the records; `scratch` is shared, f32 (2, heads, splits)."""
        if splits == 1:
            return
        some = cuda.local.array(N_SOME, f32)
        v = cuda.local.array(4, f32)
        hb = i32(cuda.blockIdx.x)
        fence()
        cuda.syncthreads()
        if tid == 0:
            counter = counters + u64(token * i32(cuda.gridDim.x) + hb) * u64(4)
            last[0] = i32(count_up_to(counter, u32(splits - i32(1))) == u32(splits - i32(1)))
            fence()
        cuda.syncthreads()
        if last[0] == 0:
            return
        for i in range(tid, i32(HEADS) * splits, THREADS):
            record = record_of(partial, token, hb * i32(HEADS) + i32(i) // splits, i32(i) % splits)
            scratch[i] = load_f32(record + u64(WIDTH * 4))
            scratch[i32(HEADS) * splits + i32(i)] = load_f32(record + u64(WIDTH * 4 + 4))
        cuda.syncthreads()
        for i in range(tid, COLUMNS, THREADS):
            h, d = i32(i) // i32(WIDTH // 4), i32(i) % i32(WIDTH // 4) * i32(4)
            head = hb * i32(HEADS) + h
            record = record_of(partial, token, head, i32(0)) + u64(d) * u64(4)
            top, total = f32(LOWEST), f32(0)
            for e in range(4):
                v[e] = f32(0)
            for k in range(splits):
                top = max(top, scratch[h * splits + i32(k)])
            for begin in range(0, splits, AT_ONCE):  # several loads under way before the first is used
                for u in range(AT_ONCE):
                    k = min(i32(begin) + i32(u), splits - i32(1))
                    four = load_f32x4(record + u64(k) * u64(RECORD * 4))
                    for e in range(4):
                        some[4 * u + e] = four[e]
                for u in range(AT_ONCE):
                    k = i32(begin) + i32(u)
                    if k < splits:
                        w = exp2(scratch[h * splits + k] - top)
                        total += w * scratch[(i32(HEADS) + h) * splits + k]
                        for e in range(4):
                            v[e] += w * some[4 * u + e]
            for e in range(4):
                if d + i32(e) < i32(HEAD_DIM):
                    store_f32(place_of(out, token, head, d + i32(e)), v[e] / total)

    return leave, join

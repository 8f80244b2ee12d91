"""Attention of many tokens: tiles of 64 queries against tiles of 64 keys with an online softmax; memory does not grow
with the context.

A block owns one query head and 64 tokens of the batch; 16 x 16 threads hold 4 x 4 scores and 4 x width/16 results
each. Products are float32. A tile may hold tokens of several sequences: it goes over the keys of each, with the other
tokens masked. Keys and values are those in the cache (kernels_cuda_store.py has put the batch's own there; layout:
kernels_cuda_attention.py).
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Flash
from .cuda_ptx import (
    bits_f32,
    exp2,
    f32,
    high_f16,
    i32,
    load_i32,
    load_u32x4,
    low_f16,
    put_shared_f32,
    shared_address,
    shared_f32,
    shared_f32x4,
    store_f32,
    u32,
    u64,
)
from .kernels_cuda_attention import element

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 7 + (i32, i32, f32)
LOWEST = -1e30


def kernel(p: Flash):
    """The kernel function of a Flash plan; grid (query heads, tiles of tokens)."""
    TILE, STEP = 64, 68  # rows of a transposed tile are padded, so that writing it meets no bank conflict
    N_HEAD, N_KV, HEAD_DIM, WIDTH, PAIRING = p.n_head, p.n_kv_head, p.head_dim, p.width, p.pairing
    HALF_K, HALF_V = p.half_k, p.half_v
    EACH = WIDTH // 16
    N_ACC = 4 * EACH
    QKV = (N_HEAD + 2 * N_KV) * HEAD_DIM
    KEYS_AT, VALUES_AT, WEIGHTS_AT = WIDTH * STEP * 4, 2 * WIDTH * STEP * 4, 2 * WIDTH * STEP * 4 + TILE * WIDTH * 4

    @device
    def stage(rows, first, n, to, is_half, transposed, tid):
        """Up to 64 rows of a cache as float32 in shared memory: (width, 68) transposed, or (64, width). Rows past n
        are zero."""
        per = 8 if is_half else 4
        vectors = WIDTH // per
        for i in range(tid, TILE * vectors, 256):
            pair, rest = i32(i) // i32(TILE * 2), i32(i) % i32(TILE * 2)
            row, vector = rest // i32(2), pair * i32(2) + rest % i32(2)
            at = rows + u64(first + row) * u64(WIDTH * (2 if is_half else 4)) + u64(vector) * u64(16)
            for e in range(4):
                w = u32(0)
                if e == 0:
                    v = load_u32x4(at) if first + row < n else (u32(0), u32(0), u32(0), u32(0))
                w = v[e]
                if is_half:
                    d = vector * i32(8) + i32(2 * e)
                    if transposed:
                        put_shared_f32(to + u32((d * i32(STEP) + row) * i32(4)), low_f16(w))
                        put_shared_f32(to + u32(((d + i32(1)) * i32(STEP) + row) * i32(4)), high_f16(w))
                    else:
                        put_shared_f32(to + u32((row * i32(WIDTH) + d) * i32(4)), low_f16(w))
                        put_shared_f32(to + u32((row * i32(WIDTH) + d + i32(1)) * i32(4)), high_f16(w))
                else:
                    d = vector * i32(4) + i32(e)
                    if transposed:
                        put_shared_f32(to + u32((d * i32(STEP) + row) * i32(4)), bits_f32(w))
                    else:
                        put_shared_f32(to + u32((row * i32(WIDTH) + d) * i32(4)), bits_f32(w))

    def flash(out, qkv, rope, keys, values, positions, sequences, n_tokens, context, scale):
        shared = cuda.shared.array(0, f32)
        place = cuda.shared.array(TILE, i32)
        where = cuda.shared.array(TILE, i32)
        acc = cuda.local.array(N_ACC, f32)
        s = cuda.local.array(16, f32)
        top = cuda.local.array(4, f32)
        total = cuda.local.array(4, f32)
        tid = i32(cuda.threadIdx.x)
        head = i32(cuda.blockIdx.x)
        # the last tiles see the most keys: they go first
        begin = (i32(cuda.gridDim.y) - i32(1) - i32(cuda.blockIdx.y)) * i32(TILE)
        n = min(i32(TILE), n_tokens - begin)
        kv = head // i32(N_HEAD // N_KV)
        q = shared_address(shared)
        k_at, v_at, w_at = q + u32(KEYS_AT), q + u32(VALUES_AT), q + u32(WEIGHTS_AT)
        tx, ty = tid % i32(16), tid // i32(16)
        if tid < i32(TILE):
            token = begin + min(tid, n - i32(1))
            place[tid] = load_i32(positions + u64(token) * u64(4)) if tid < n else i32(-1)
            where[tid] = load_i32(sequences + u64(token) * u64(4))
        cuda.syncthreads()
        for i in range(tid, TILE * WIDTH, 256):
            row, d = i32(i) // i32(WIDTH), i32(i) % i32(WIDTH)
            x = f32(0)
            if row < n and d < i32(HEAD_DIM):
                at = qkv + (u64(begin + row) * u64(QKV) + u64(head * i32(HEAD_DIM))) * u64(4)
                x = element(at, PAIRING, rope, place[row], d, i32(HEAD_DIM)) * scale
            put_shared_f32(q + u32((d * i32(STEP) + row) * i32(4)), x)
        for i in range(N_ACC):
            acc[i] = f32(0)
        for r in range(4):
            top[r] = f32(LOWEST)
            total[r] = f32(0)
        start = i32(0)
        while start < n:
            sequence, end, highest = where[start], start, i32(0)
            while end < n and where[end] == sequence:
                highest = max(highest, place[end])
                end += i32(1)
            base = u64(sequence * i32(N_KV) + kv) * u64(context)
            key_rows = keys + base * u64(WIDTH * (2 if HALF_K else 4))
            value_rows = values + base * u64(WIDTH * (2 if HALF_V else 4))
            for first in range(0, highest + 1, TILE):
                cuda.syncthreads()
                stage(key_rows, i32(first), highest + i32(1), k_at, HALF_K, True, tid)
                stage(value_rows, i32(first), highest + i32(1), v_at, HALF_V, False, tid)
                cuda.syncthreads()
                for i in range(16):
                    s[i] = f32(0)
                for d in range(WIDTH):
                    a = shared_f32x4(q + u32(d * STEP * 4) + u32(ty * i32(16)))
                    b = shared_f32x4(k_at + u32(d * STEP * 4) + u32(tx * i32(16)))
                    for r in range(4):
                        for c in range(4):
                            s[r * 4 + c] += a[r] * b[c]
                for r in range(4):
                    row = ty * i32(4) + i32(r)
                    limit = place[row] if row >= start and row < end else i32(-1)
                    most = f32(LOWEST)
                    for c in range(4):
                        if i32(first) + tx * i32(4) + i32(c) <= limit:
                            most = max(most, s[r * 4 + c])
                    for b in range(4):
                        most = max(most, cuda.shfl_xor_sync(0xFFFFFFFF, most, 8 >> b))
                    new = max(top[r], most)
                    shrink = exp2(top[r] - new)
                    top[r] = new
                    part = f32(0)
                    for c in range(4):
                        e = exp2(s[r * 4 + c] - new) if i32(first) + tx * i32(4) + i32(c) <= limit else f32(0)
                        s[r * 4 + c] = e
                        part += e
                        put_shared_f32(w_at + u32(((tx * i32(4) + i32(c)) * i32(STEP) + row) * i32(4)), e)
                    total[r] = total[r] * shrink + part
                    for j in range(EACH):
                        acc[r * EACH + j] *= shrink
                cuda.syncthreads()
                for t in range(TILE):
                    w = shared_f32x4(w_at + u32(t * STEP * 4) + u32(ty * i32(16)))
                    for j in range(EACH):
                        v = shared_f32(v_at + u32((t * WIDTH + j * 16) * 4) + u32(tx * i32(4)))
                        for r in range(4):
                            acc[r * EACH + j] += w[r] * v
            start = end
        for r in range(4):
            for b in range(4):
                total[r] += cuda.shfl_xor_sync(0xFFFFFFFF, total[r], 8 >> b)
            row = ty * i32(4) + i32(r)
            if row < n:
                for j in range(EACH):
                    d = tx + i32(j * 16)
                    if d < i32(HEAD_DIM):
                        at = out + (u64(begin + row) * u64(N_HEAD * HEAD_DIM) + u64(head * i32(HEAD_DIM) + d)) * u64(4)
                        store_f32(at, acc[r * EACH + j] / total[r])

    return flash

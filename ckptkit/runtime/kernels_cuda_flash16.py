"""Attention of many tokens on the tensor cores: as kernels_cuda_flash.py, with queries, keys, values and weights
rounded to f16.

A block owns one query head and 64 tokens, a warp 16 of them. Scores and results stay in registers, in the layout that
mma.m16n8k16 leaves: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next; so the weights of one
product are the operand of the next without touching memory. Sums are float32.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Flash16
from .cuda_ptx import (
    bits_f32,
    exp2,
    f32,
    i32,
    load_i32,
    load_matrices,
    load_matrices_transposed,
    load_u32x4,
    multiply_f16,
    pack_f16,
    put_shared_u32,
    put_shared_u32x4,
    shared_address,
    store_f32,
    u32,
    u64,
)
from .kernels_cuda_attention import element

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 7 + (i32, i32, f32)
LOWEST = -1e30


def kernel(p: Flash16):
    """The kernel function of a Flash16 plan; grid (query heads, tiles of tokens)."""
    TILE = 64
    N_HEAD, N_KV, HEAD_DIM, WIDTH, PAIRING = p.n_head, p.n_kv_head, p.head_dim, p.width, p.pairing
    HALF_K, HALF_V = p.half_k, p.half_v
    ROW = WIDTH * 2 + 16  # bytes of a row in shared memory: 16 more, so that eight rows lie in eight different banks
    KEYS_AT, VALUES_AT = TILE * ROW, 2 * TILE * ROW
    DEPTH, COLUMNS = WIDTH // 16, WIDTH // 8  # steps of 16 along a head; groups of 8 results
    PAIRS = COLUMNS // 2
    N_Q, N_ACC = DEPTH * 4, COLUMNS * 4
    QKV = (N_HEAD + 2 * N_KV) * HEAD_DIM

    @device
    def stage(rows, first, n, to, is_half, tid):
        """64 rows of a cache as f16 in shared memory; rows past n are zero."""
        for i in range(tid, TILE * (WIDTH // 8), 128):
            row, vector = i32(i) // i32(WIDTH // 8), i32(i) % i32(WIDTH // 8)
            a, b, c, d = u32(0), u32(0), u32(0), u32(0)
            if first + row < n:
                if is_half:
                    v = load_u32x4(rows + u64(first + row) * u64(WIDTH * 2) + u64(vector) * u64(16))
                    a, b, c, d = v[0], v[1], v[2], v[3]
                else:
                    at = rows + u64(first + row) * u64(WIDTH * 4) + u64(vector) * u64(32)
                    v, w = load_u32x4(at), load_u32x4(at + u64(16))
                    a, b = pack_f16(bits_f32(v[0]), bits_f32(v[1])), pack_f16(bits_f32(v[2]), bits_f32(v[3]))
                    c, d = pack_f16(bits_f32(w[0]), bits_f32(w[1])), pack_f16(bits_f32(w[2]), bits_f32(w[3]))
            put_shared_u32x4(to + u32(row * i32(ROW) + vector * i32(16)), a, b, c, d)

    def flash(out, qkv, rope, keys, values, positions, sequences, n_tokens, context, scale):
        shared = cuda.shared.array(0, f32)
        place = cuda.shared.array(TILE, i32)
        where = cuda.shared.array(TILE, i32)
        q = cuda.local.array(N_Q, u32)
        s = cuda.local.array(32, f32)
        acc = cuda.local.array(N_ACC, f32)
        top = cuda.local.array(2, f32)
        total = cuda.local.array(2, f32)
        limit = cuda.local.array(2, i32)
        tid = i32(cuda.threadIdx.x)
        head = i32(cuda.blockIdx.x)
        begin = (i32(cuda.gridDim.y) - i32(1) - i32(cuda.blockIdx.y)) * i32(TILE)
        n = min(i32(TILE), n_tokens - begin)
        kv = head // i32(N_HEAD // N_KV)
        base = shared_address(shared)
        lane, warp = tid % i32(32), tid // i32(32)
        if tid < i32(TILE):
            token = begin + min(tid, n - i32(1))
            place[tid] = load_i32(positions + u64(token) * u64(4)) if tid < n else i32(-1)
            where[tid] = load_i32(sequences + u64(token) * u64(4))
        cuda.syncthreads()
        for i in range(tid, TILE * (WIDTH // 2), 128):
            row, d = i32(i) // i32(WIDTH // 2), i32(i) % i32(WIDTH // 2) * i32(2)
            x, y = f32(0), f32(0)
            if row < n:
                at = qkv + (u64(begin + row) * u64(QKV) + u64(head * i32(HEAD_DIM))) * u64(4)
                if d < i32(HEAD_DIM):
                    x = element(at, PAIRING, rope, place[row], d, i32(HEAD_DIM)) * scale
                if d + i32(1) < i32(HEAD_DIM):
                    y = element(at, PAIRING, rope, place[row], d + i32(1), i32(HEAD_DIM)) * scale
            put_shared_u32(base + u32(row * i32(ROW) + d * i32(2)), pack_f16(x, y))
        cuda.syncthreads()
        eighth, inner = lane // i32(8), lane % i32(8)
        at_q = base + u32(
            (warp * i32(16) + (eighth % i32(2)) * i32(8) + inner) * i32(ROW) + (eighth // i32(2)) * i32(16)
        )
        for k in range(DEPTH):
            r = load_matrices(at_q + u32(k * 32))
            q[k * 4], q[k * 4 + 1], q[k * 4 + 2], q[k * 4 + 3] = r[0], r[1], r[2], r[3]
        at_k = base + u32(KEYS_AT) + u32(((eighth // i32(2)) * i32(8) + inner) * i32(ROW) + (eighth % i32(2)) * i32(16))
        at_v = (
            base + u32(VALUES_AT) + u32(((eighth % i32(2)) * i32(8) + inner) * i32(ROW) + (eighth // i32(2)) * i32(16))
        )
        for i in range(N_ACC):
            acc[i] = f32(0)
        for h in range(2):
            top[h] = f32(LOWEST)
            total[h] = f32(0)
        start = i32(0)
        while start < n:
            sequence, end, highest = where[start], start, i32(0)
            while end < n and where[end] == sequence:
                highest = max(highest, place[end])
                end += i32(1)
            for h in range(2):
                row = warp * i32(16) + lane // i32(4) + i32(h * 8)
                limit[h] = place[row] if row >= start and row < end else i32(-1)
            cache = u64(sequence * i32(N_KV) + kv) * u64(context)
            key_rows = keys + cache * u64(WIDTH * (2 if HALF_K else 4))
            value_rows = values + cache * u64(WIDTH * (2 if HALF_V else 4))
            for first in range(0, highest + 1, TILE):
                cuda.syncthreads()
                stage(key_rows, i32(first), highest + i32(1), base + u32(KEYS_AT), HALF_K, tid)
                stage(value_rows, i32(first), highest + i32(1), base + u32(VALUES_AT), HALF_V, tid)
                cuda.syncthreads()
                for i in range(32):
                    s[i] = f32(0)
                for k in range(DEPTH):
                    for g in range(4):
                        b = load_matrices(at_k + u32(g * 16 * ROW + k * 32))
                        for u in range(2):
                            c = g * 8 + u * 4
                            m = multiply_f16(
                                q[k * 4], q[k * 4 + 1], q[k * 4 + 2], q[k * 4 + 3], b[2 * u], b[2 * u + 1],
                                s[c], s[c + 1], s[c + 2], s[c + 3],
                            )  # fmt: skip
                            s[c], s[c + 1], s[c + 2], s[c + 3] = m[0], m[1], m[2], m[3]
                column = i32(first) + (lane % i32(4)) * i32(2)
                for h in range(2):
                    most = f32(LOWEST)
                    for g in range(8):
                        for e in range(2):
                            if column + i32(g * 8 + e) <= limit[h]:
                                most = max(most, s[g * 4 + h * 2 + e])
                    most = max(most, cuda.shfl_xor_sync(0xFFFFFFFF, most, 1))
                    most = max(most, cuda.shfl_xor_sync(0xFFFFFFFF, most, 2))
                    new = max(top[h], most)
                    shrink = exp2(top[h] - new)
                    top[h] = new
                    part = f32(0)
                    for g in range(8):
                        for e in range(2):
                            w = f32(0)
                            if column + i32(g * 8 + e) <= limit[h]:
                                w = exp2(s[g * 4 + h * 2 + e] - new)
                            s[g * 4 + h * 2 + e] = w
                            part += w
                    total[h] = total[h] * shrink + part
                    for g in range(COLUMNS):
                        acc[g * 4 + h * 2] *= shrink
                        acc[g * 4 + h * 2 + 1] *= shrink
                for k in range(4):
                    a0, a1 = pack_f16(s[k * 8], s[k * 8 + 1]), pack_f16(s[k * 8 + 2], s[k * 8 + 3])
                    a2, a3 = pack_f16(s[k * 8 + 4], s[k * 8 + 5]), pack_f16(s[k * 8 + 6], s[k * 8 + 7])
                    for g in range(PAIRS):
                        b = load_matrices_transposed(at_v + u32(k * 16 * ROW + g * 32))
                        for u in range(2):
                            c = g * 8 + u * 4
                            m = multiply_f16(
                                a0, a1, a2, a3, b[2 * u], b[2 * u + 1], acc[c], acc[c + 1], acc[c + 2], acc[c + 3]
                            )
                            acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = m[0], m[1], m[2], m[3]
            start = end
        for h in range(2):
            total[h] += cuda.shfl_xor_sync(0xFFFFFFFF, total[h], 1)
            total[h] += cuda.shfl_xor_sync(0xFFFFFFFF, total[h], 2)
            row = warp * i32(16) + lane // i32(4) + i32(h * 8)
            if row < n:
                for g in range(COLUMNS):
                    for e in range(2):
                        d = i32(g * 8 + e) + (lane % i32(4)) * i32(2)
                        if d < i32(HEAD_DIM):
                            at = out + (
                                u64(begin + row) * u64(N_HEAD * HEAD_DIM) + u64(head * i32(HEAD_DIM) + d)
                            ) * u64(4)
                            store_f32(at, acc[g * 4 + h * 2 + e] / total[h])

    return flash

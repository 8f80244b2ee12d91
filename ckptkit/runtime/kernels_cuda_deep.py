"""Attention of single tokens over a long cache, on the tensor cores, with products as exact as float32.

Query heads that share a kv head are worked on together, so every key and value is read once: the product of 16
positions with up to 8 heads is what mma.m16n8k8 does. A float32 number enters it as two tf32 numbers, 22 bits; what
an f16 cache holds is a tf32 number already. A block owns one group of heads and one split of the positions, whose
size follows from the token's position; a warp owns every WARPS-th tile of 16 positions. It copies its own tiles into
a ring in shared memory ahead of their use and keeps its own maximum, sum and values, so warps meet only at the end.

Operands are read in a permuted order that makes a lane's elements neighbours in memory: lane 4 g + t takes elements
2 t and 2 t + 1 of every 8 of a key for columns t and t + 4 (the query's go along), and elements 2 g and 2 g + 1 of
every 16 of a value for rows g and g + 8. Cache layout: kernels_cuda_attention.py.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Deep
from .cuda_ptx import (
    bits_f32,
    commit_copies,
    copy_async,
    exp2,
    f32,
    f32_bits,
    high_f16,
    i32,
    load_f32,
    load_i32,
    low_f16,
    multiply_tf32,
    pack_f16,
    put_shared_f32x2,
    put_shared_u32,
    round_tf32,
    shared_address,
    shared_f32x2,
    shared_u32,
    start_next,
    store_f32,
    store_u32,
    u32,
    u64,
    wait_copies,
    wait_for_previous,
)
from .kernels_cuda_attention import element
from .kernels_cuda_join import joiner

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 9 + (i32, f32)
LOWEST = -1e30
TILE = 16


def kernel(p: Deep):
    """The kernel function of a Deep plan; grid (head blocks, splits, tokens)."""
    HEADS, GROUP, HEAD_DIM, WIDTH, THREADS = p.heads, p.n_head // p.n_kv_head, p.head_dim, p.width, p.threads
    N_HEAD, N_KV, PAIRING, HALF_K, HALF_V = p.n_head, p.n_kv_head, p.pairing, p.half_k, p.half_v
    STORE, DEPENDENT, WARPS, STAGES = p.store, p.dependent, p.warps, p.stages
    ROW_K, ROW_V = WIDTH * (2 if HALF_K else 4), WIDTH * (2 if HALF_V else 4)
    STRIDE_K, STRIDE_V, STAGE = p.stride_k, p.stride_v, p.stage_bytes
    STEPS, BANDS = WIDTH // 8, WIDTH // 16  # of 8 elements of a key, of 16 elements of a value
    N_Q, N_ACC, N_QUERY = 2 * STEPS, 4 * BANDS, 8 * WIDTH
    N_WEIGHTS, N_STATE = WARPS * TILE * 8, WARPS * 16
    QKV = (N_HEAD + 2 * N_KV) * HEAD_DIM
    HALF_DIM, EACH = max(HEAD_DIM // 2, 1), -(-N_QUERY // THREADS)  # EACH: parts of the queries that a thread prepares
    N_PARTS = 2 * EACH
    leave, join = joiner(HEADS, N_HEAD, HEAD_DIM, WIDTH, THREADS)
    finish_copies = wait_copies(STAGES - 1)

    @device
    def query_of(tid, u):
        """(head, element) of a thread's u-th part of the queries; the element is one that there is."""
        i = i32(u * THREADS) + tid
        return i // i32(WIDTH), min(i % i32(WIDTH), i32(HEAD_DIM - 1))

    @device
    def partner(d):
        """The element that d is rotated with."""
        if PAIRING == 1:
            return d ^ i32(1)
        return d + i32(HALF_DIM) if d < i32(HALF_DIM) else d - i32(HALF_DIM)

    @device
    def turn_of(rope, position, d):
        """(cosine, signed sine) by which d and its partner are multiplied."""
        if PAIRING == 0:
            return f32(1), f32(0)
        first = d % i32(2) == 0 if PAIRING == 1 else d < i32(HALF_DIM)
        k = d // i32(2) if PAIRING == 1 else d % i32(HALF_DIM)
        row = rope + u64(position) * u64(HEAD_DIM * 4) + u64(k) * u64(4)
        sine = load_f32(row + u64(HALF_DIM * 4))
        return load_f32(row), -sine if first else sine

    @device
    def copy_rows(rows, first, n, to, row_bytes, stride, lane):
        """Rows first.. of a cache on their way into shared memory; rows past n become zeros."""
        vectors = row_bytes // i32(16)
        for i in range(lane, i32(TILE) * vectors, 32):
            row, vector = i32(i) // vectors, i32(i) % vectors
            inside = first + row < n
            source = rows + u64(first + row if inside else i32(0)) * u64(row_bytes) + u64(vector) * u64(16)
            copy_async(to + u32(row * stride + vector * i32(16)), source, i32(16) if inside else i32(0))

    @device
    def copy_tile(keys, values, tile, n, slot, lane):
        copy_rows(keys, tile * i32(TILE), n, slot, i32(ROW_K), i32(STRIDE_K), lane)
        copy_rows(values, tile * i32(TILE), n, slot + u32(TILE * STRIDE_K), i32(ROW_V), i32(STRIDE_V), lane)

    @device
    def pair(at, d, is_half):
        """Elements d and d + 1 of a row in shared memory."""
        if is_half:
            w = shared_u32(at + u32(d * i32(2)))
            return low_f16(w), high_f16(w)
        return shared_f32x2(at + u32(d * i32(4)))

    @device
    def put_pair(at, row, d, a, b, is_half):
        """Elements d and d + 1 of a row, in shared memory and in the cache."""
        if is_half:
            w = pack_f16(a, b)
            put_shared_u32(at + u32(d * i32(2)), w)
            store_u32(row + u64(d) * u64(2), w)
        else:
            put_shared_f32x2(at + u32(d * i32(4)), a, b)
            store_f32(row + u64(d) * u64(4), a)
            store_f32(row + u64(d) * u64(4) + u64(4), b)

    @device
    def put_own(x, rope, position, kv, keys, values, own, slot, lane):
        """The token's own key and value, row `own`, into the tile at `slot` and the cache."""
        key = x + u64((i32(N_HEAD) + kv) * i32(HEAD_DIM)) * u64(4)
        value = key + u64(N_KV * HEAD_DIM * 4)
        row = own % i32(TILE)
        for d in range(i32(2) * lane, WIDTH, 64):
            a, b, v, w = f32(0), f32(0), f32(0), f32(0)
            if d < HEAD_DIM:
                a = element(key, PAIRING, rope, position, i32(d), i32(HEAD_DIM))
                v = element(value, 0, rope, position, i32(d), i32(HEAD_DIM))
            if d + 1 < HEAD_DIM:
                b = element(key, PAIRING, rope, position, i32(d) + i32(1), i32(HEAD_DIM))
                w = element(value, 0, rope, position, i32(d) + i32(1), i32(HEAD_DIM))
            put_pair(slot + u32(row * i32(STRIDE_K)), keys + u64(own) * u64(ROW_K), i32(d), a, b, HALF_K)
            at = slot + u32(TILE * STRIDE_K) + u32(row * i32(STRIDE_V))
            put_pair(at, values + u64(own) * u64(ROW_V), i32(d), v, w, HALF_V)

    @device
    def rest_of(x, high):
        """What a tf32 number leaves of x, as bits."""
        return f32_bits(x - bits_f32(high))

    @device
    def add_product(c, at, x0, x1, y0, y1, is_exact, b0, b1, r0, r1):
        """c[at..at + 3] += rows (x0 x1 | y0 y1) times (b + r): all products but that of both rests."""
        a0, a1, a2, a3 = round_tf32(x0), round_tf32(y0), round_tf32(x1), round_tf32(y1)
        m = multiply_tf32(a0, a1, a2, a3, r0, r1, c[at], c[at + 1], c[at + 2], c[at + 3])
        if not is_exact:
            l0, l1, l2, l3 = rest_of(x0, a0), rest_of(y0, a1), rest_of(x1, a2), rest_of(y1, a3)
            m = multiply_tf32(l0, l1, l2, l3, b0, b1, m[0], m[1], m[2], m[3])
        m = multiply_tf32(a0, a1, a2, a3, b0, b1, m[0], m[1], m[2], m[3])
        c[at], c[at + 1], c[at + 2], c[at + 3] = m[0], m[1], m[2], m[3]

    def deep(out, qkv, rope, keys, values, positions, sequences, partial, counters, context, scale):
        shared = cuda.shared.array(0, f32)  # the ring, then values (WARPS, 8, WIDTH), then what join needs
        query = cuda.shared.array(N_QUERY, f32)
        weights = cuda.shared.array(N_WEIGHTS, f32)
        state = cuda.shared.array(N_STATE, f32)  # of each warp: maxima and sums of 8 heads
        last = cuda.shared.array(1, i32)
        turns = cuda.local.array(N_PARTS, f32)
        parts_of = cuda.local.array(N_PARTS, f32)
        q = cuda.local.array(N_Q, u32)
        q_rest = cuda.local.array(N_Q, u32)
        s = cuda.local.array(16, f32)
        acc = cuda.local.array(N_ACC, f32)
        top = cuda.local.array(2, f32)
        total = cuda.local.array(2, f32)
        tid = i32(cuda.threadIdx.x)
        lane, warp = tid % i32(32), tid // i32(32)
        g, t = lane // i32(4), lane % i32(4)
        hb, split, token = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        # what older launches wrote may be read ahead of the one before this: the position, and all keys and values
        # but the own
        position = load_i32(positions + u64(token) * u64(4))
        sequence = load_i32(sequences + u64(token) * u64(4))
        if not STORE and DEPENDENT:
            wait_for_previous()
            start_next()
        parts = i32(cuda.gridDim.y)
        span = (position // parts + i32(TILE)) // i32(TILE) * i32(TILE)
        lo = split * span
        if lo > position:
            return
        n = min(span, position + i32(1) - lo)
        tiles = (n + i32(TILE - 1)) // i32(TILE)
        kv = hb * i32(HEADS) // i32(GROUP)
        base = u64(sequence * i32(N_KV) + kv) * u64(context) + u64(lo)
        key_rows, value_rows = keys + base * u64(ROW_K), values + base * u64(ROW_V)
        own = position - lo if STORE else i32(-1)
        x = qkv + u64(token) * u64(QKV * 4)
        ring = shared_address(shared) + u32(warp * i32(STAGES * STAGE))
        mine = shared_address(weights) + u32(warp * i32(TILE * 8 * 4))
        for k in range(STAGES - 1):
            tile = warp + i32(k * WARPS)
            if tile < tiles:
                copy_tile(key_rows, value_rows, tile, n, ring + u32(k * STAGE), lane)
            commit_copies()
        for u in range(EACH):
            _, d = query_of(tid, u)
            turns[2 * u], turns[2 * u + 1] = turn_of(rope, position, d)
        if STORE and DEPENDENT:
            wait_for_previous()
            start_next()
        for u in range(EACH):
            h, d = query_of(tid, u)
            head = x + u64((hb * i32(HEADS) + min(h, i32(HEADS - 1))) * i32(HEAD_DIM)) * u64(4)
            parts_of[2 * u] = load_f32(head + u64(d) * u64(4))
            if PAIRING != 0:
                parts_of[2 * u + 1] = load_f32(head + u64(partner(d)) * u64(4))
        for u in range(EACH):
            h, d = query_of(tid, u)
            v = parts_of[2 * u] * turns[2 * u]
            if PAIRING != 0:
                v += parts_of[2 * u + 1] * turns[2 * u + 1]
            i = i32(u * THREADS) + tid
            if i < i32(N_QUERY):
                query[i] = v * scale if h < i32(HEADS) and i % i32(WIDTH) < i32(HEAD_DIM) else f32(0)
        cuda.syncthreads()
        for k in range(STEPS):
            for e in range(2):
                v = query[g * i32(WIDTH) + i32(8 * k + e) + i32(2) * t]
                q[2 * k + e] = round_tf32(v)
                q_rest[2 * k + e] = rest_of(v, q[2 * k + e])
        for i in range(N_ACC):
            acc[i] = f32(0)
        for h in range(2):
            top[h] = f32(LOWEST)
            total[h] = f32(0)

        turn = i32(0)
        for tile in range(warp, tiles, WARPS):
            ahead = i32(tile) + i32((STAGES - 1) * WARPS)
            if ahead < tiles:
                to = ring + u32((turn + i32(STAGES - 1)) % i32(STAGES) * i32(STAGE))
                copy_tile(key_rows, value_rows, ahead, n, to, lane)
            commit_copies()
            finish_copies()
            cuda.syncwarp()
            slot = ring + u32(turn % i32(STAGES) * i32(STAGE))
            turn += i32(1)
            if STORE and own // i32(TILE) == i32(tile):
                put_own(x, rope, position, kv, key_rows, value_rows, own, slot, lane)
                cuda.syncwarp()
            for i in range(16):
                s[i] = f32(0)
            row_0 = slot + u32(g * i32(STRIDE_K))
            row_8 = row_0 + u32(8 * STRIDE_K)
            for k in range(STEPS):  # four sums, so that products need not wait for each other
                d = i32(8 * k) + i32(2) * t
                x0, x1 = pair(row_0, d, HALF_K)
                y0, y1 = pair(row_8, d, HALF_K)
                b0, b1, r0, r1 = q[2 * k], q[2 * k + 1], q_rest[2 * k], q_rest[2 * k + 1]
                add_product(s, k % 4 * 4, x0, x1, y0, y1, HALF_K, b0, b1, r0, r1)
            for i in range(4):
                s[i] = (s[i] + s[4 + i]) + (s[8 + i] + s[12 + i])
            for half in range(2):
                if i32(tile) * i32(TILE) + g + i32(8 * half) >= n:
                    s[2 * half] = f32(LOWEST)
                    s[2 * half + 1] = f32(LOWEST)
            for h in range(2):  # heads 2 t and 2 t + 1
                most = max(s[h], s[2 + h])
                for b in range(3):
                    most = max(most, cuda.shfl_xor_sync(0xFFFFFFFF, most, 16 >> b))
                most = max(top[h], most)
                shrink = exp2(top[h] - most)
                top[h] = most
                s[h], s[2 + h] = exp2(s[h] - most), exp2(s[2 + h] - most)
                total[h] = total[h] * shrink + (s[h] + s[2 + h])
                for i in range(BANDS):
                    acc[4 * i + h] *= shrink
                    acc[4 * i + 2 + h] *= shrink
            put_shared_f32x2(mine + u32((g * i32(8) + i32(2) * t) * i32(4)), s[0], s[1])
            put_shared_f32x2(mine + u32(((g + i32(8)) * i32(8) + i32(2) * t) * i32(4)), s[2], s[3])
            cuda.syncwarp()
            for k in range(2):
                first = (warp * i32(TILE) + i32(8 * k) + t) * i32(8) + g
                w0, w1 = weights[first], weights[first + i32(32)]
                b0, b1 = round_tf32(w0), round_tf32(w1)
                r0, r1 = rest_of(w0, b0), rest_of(w1, b1)
                row_0 = slot + u32(TILE * STRIDE_K) + u32((i32(8 * k) + t) * i32(STRIDE_V))
                row_4 = row_0 + u32(4 * STRIDE_V)
                for i in range(BANDS):
                    d = i32(16 * i) + i32(2) * g
                    x0, y0 = pair(row_0, d, HALF_V)
                    x1, y1 = pair(row_4, d, HALF_V)
                    add_product(acc, 4 * i, x0, x1, y0, y1, HALF_V, b0, b1, r0, r1)
            cuda.syncwarp()

        for h in range(2):
            for b in range(3):
                total[h] += cuda.shfl_xor_sync(0xFFFFFFFF, total[h], 16 >> b)
            if g == 0:
                state[warp * i32(16) + i32(2) * t + i32(h)] = top[h]
                state[warp * i32(16) + i32(8) + i32(2) * t + i32(h)] = total[h]
        cuda.syncthreads()
        for i in range(BANDS):
            for e in range(4):
                d = i32(16 * i + e // 2) + i32(2) * g
                shared[(warp * i32(8) + i32(2) * t + i32(e % 2)) * i32(WIDTH) + d] = acc[4 * i + e]
        cuda.syncthreads()
        splits = position // span + i32(1)
        for i in range(tid, HEADS * WIDTH, THREADS):
            h, d = i32(i) // i32(WIDTH), i32(i) % i32(WIDTH)
            most, sum_all, v = f32(LOWEST), f32(0), f32(0)
            for w in range(WARPS):
                most = max(most, state[i32(w * 16) + h])
            for w in range(WARPS):
                share = exp2(state[i32(w * 16) + h] - most)
                sum_all += share * state[i32(w * 16 + 8) + h]
                v += share * shared[(i32(w * 8) + h) * i32(WIDTH) + d]
            leave(out, partial, token, hb * i32(HEADS) + h, split, splits, d, v, most, sum_all)
        join(out, partial, counters, shared, last, token, splits, tid)

    return deep

"""Attention of single tokens over a KV cache: rotary positions, the store of the new key and value, and the product,
fused.

The cache of one layer is (sequence, kv head, position, width), width = head_dim rounded up to 16 with zeros; f32 or
f16. A block owns one query head and one split of `span` positions; several splits are joined by the last to finish
(kernels_cuda_join.py). Long caches go to kernels_cuda_deep.py.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Attention
from .cuda_ptx import (
    bits_f32,
    exp2,
    f16_f32,
    f32,
    f32_f16,
    high_f16,
    i32,
    load_f32,
    load_i32,
    load_u32x4,
    low_f16,
    start_next,
    store_f32,
    store_u16,
    u32,
    u64,
    wait_for_previous,
)
from .kernels_cuda_join import joiner

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 9 + (i32, i32, f32)
LOWEST = -1e30


@device
def element(x, pairing, rope, position, d, head_dim):
    """Element d of the head at x, rotated to `position`; pairing 0 none, 1 adjacent, 2 halves."""
    own = load_f32(x + u64(d) * u64(4))
    if pairing == 0:
        return own
    half = head_dim // i32(2)
    if pairing == 1:
        other, k, sign = d ^ i32(1), d >> i32(1), f32(1) if d & i32(1) else f32(-1)
    else:
        low = d < half
        other, k, sign = d + half if low else d - half, d if low else d - half, f32(-1) if low else f32(1)
    row = rope + u64(position) * u64(head_dim) * u64(4)
    partner = load_f32(x + u64(other) * u64(4))
    return own * load_f32(row + u64(k) * u64(4)) + sign * (partner * load_f32(row + u64(half + k) * u64(4)))


@device
def put(address, at, value, is_half):
    """Store an element of the cache; returns it as the cache will give it back."""
    if is_half:
        h = f32_f16(value)
        store_u16(address + u64(at) * u64(2), h)
        return f16_f32(h)
    store_f32(address + u64(at) * u64(4), value)
    return value


def lanes_of(width: int, is_half: bool) -> tuple[int, int]:
    """(threads that share a position, 16-byte vectors of it per thread)."""
    vectors = width * (2 if is_half else 4) // 16
    lanes = min(vectors & -vectors, 32)
    return lanes, vectors // lanes


def kernel(p: Attention):
    """The kernel function of an Attention plan; grid (heads, splits, tokens)."""
    GROUP, HEAD_DIM, WIDTH, THREADS = p.n_head // p.n_kv_head, p.head_dim, p.width, p.threads
    N_HEAD, N_KV = p.n_head, p.n_kv_head
    PAIRING, HALF_K, HALF_V, STORE, DEPENDENT = p.pairing, p.half_k, p.half_v, p.store, p.dependent
    LANES_K, EACH_K = lanes_of(WIDTH, HALF_K)
    LANES_V, EACH_V = lanes_of(WIDTH, HALF_V)
    WORDS_K, WORDS_V = EACH_K * 4, EACH_V * 4  # 32-bit words of one position per thread
    PER_K, PER_V = (8, 8) if HALF_K and HALF_V else (8 if HALF_K else 4, 8 if HALF_V else 4)  # values in a vector
    ROW_K, ROW_V = WIDTH * (2 if HALF_K else 4), WIDTH * (2 if HALF_V else 4)
    AHEAD_K, AHEAD_V = max(8 // EACH_K, 1), max(8 // EACH_V, 1)  # positions loaded before the first is used
    GROUPS_K, GROUPS_V = THREADS // LANES_K, THREADS // LANES_V
    WARPS = THREADS // 32
    N_Q, N_KREG, N_ACC, N_VREG = EACH_K * PER_K, AHEAD_K * WORDS_K, EACH_V * PER_V, AHEAD_V * WORDS_V
    QKV = (N_HEAD + 2 * N_KV) * HEAD_DIM
    leave, join = joiner(1, N_HEAD, HEAD_DIM, WIDTH, THREADS)

    def attention(out, qkv, rope, keys, values, positions, sequences, partial, counters, context, span, scale):
        scores = cuda.shared.array(0, f32)  # (span,), then (WARPS, WIDTH)
        query = cuda.shared.array(WIDTH, f32)
        fresh = cuda.shared.array((2, WIDTH), f32)  # the token's own key and value
        state = cuda.shared.array(2, f32)  # maximum and sum
        last = cuda.shared.array(1, i32)
        q = cuda.local.array(N_Q, f32)
        kreg = cuda.local.array(N_KREG, u32)
        acc = cuda.local.array(N_ACC, f32)
        vreg = cuda.local.array(N_VREG, u32)
        tid = i32(cuda.threadIdx.x)
        head, split, token = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        # what older launches wrote may be read ahead of the one before this: the position, and all keys and values
        # but the own
        position = load_i32(positions + u64(token) * u64(4))
        sequence = load_i32(sequences + u64(token) * u64(4))
        lo = split * span
        if not STORE and DEPENDENT:
            wait_for_previous()
            start_next()
        if lo > position:
            return
        n = min(span, position + i32(1) - lo)
        kv = head // i32(GROUP)
        base = u64(sequence * i32(N_KV) + kv) * u64(context)
        key_rows = keys + (base + u64(lo)) * u64(ROW_K)
        value_rows = values + (base + u64(lo)) * u64(ROW_V)
        # where in this split the token's own key is; -1 in splits without it, whose last positions are only padding
        own = position - lo if STORE and position - lo < n else i32(-1)
        x = qkv + u64(token) * u64(QKV * 4)
        lane_k, group_k = tid % i32(LANES_K), tid // i32(LANES_K)
        lane_v, group_v = tid % i32(LANES_V), tid // i32(LANES_V)
        for u in range(AHEAD_K):
            at = min(i32(u * GROUPS_K) + group_k, n - i32(1))
            for j in range(EACH_K):
                r = load_u32x4(key_rows + u64(at) * u64(ROW_K) + u64(lane_k + i32(j * LANES_K)) * u64(16))
                for e in range(4):
                    kreg[u * WORDS_K + j * 4 + e] = r[e]
        for u in range(AHEAD_V):
            at = min(i32(u * GROUPS_V) + group_v, n - i32(1))
            for j in range(EACH_V):
                r = load_u32x4(value_rows + u64(at) * u64(ROW_V) + u64(lane_v + i32(j * LANES_V)) * u64(16))
                for e in range(4):
                    vreg[u * WORDS_V + j * 4 + e] = r[e]
        if STORE and DEPENDENT:
            wait_for_previous()
            # few blocks are at work here: the next product's weights can be on their way on the idle processors
            start_next()
        for i in range(tid, 3 * WIDTH if STORE else WIDTH, THREADS):
            what, d = i32(i) // i32(WIDTH), i32(i) % i32(WIDTH)  # query, own key, own value
            a = f32(0)
            if what == i32(0):
                if d < i32(HEAD_DIM):
                    at = x + u64(head * i32(HEAD_DIM)) * u64(4)
                    a = element(at, PAIRING, rope, position, d, i32(HEAD_DIM)) * scale
                query[i] = a
            elif own >= i32(0):  # every head of a kv head stores the same bytes
                key = x + u64((i32(N_HEAD) + kv) * i32(HEAD_DIM)) * u64(4)
                if what == i32(1):
                    if d < i32(HEAD_DIM):
                        a = element(key, PAIRING, rope, position, d, i32(HEAD_DIM))
                    fresh[0, d] = put(key_rows + u64(own) * u64(ROW_K), d, a, HALF_K)
                else:
                    if d < i32(HEAD_DIM):
                        a = load_f32(key + u64(i32(N_KV * HEAD_DIM) + d) * u64(4))
                    fresh[1, d] = put(value_rows + u64(own) * u64(ROW_V), d, a, HALF_V)
        cuda.syncthreads()

        for j in range(EACH_K):
            for e in range(PER_K):
                q[j * PER_K + e] = query[(lane_k + i32(j * LANES_K)) * i32(PER_K) + i32(e)]
        for first in range(0, n, GROUPS_K * AHEAD_K):
            if first:
                for u in range(AHEAD_K):
                    at = min(i32(first) + i32(u * GROUPS_K) + group_k, n - i32(1))
                    for j in range(EACH_K):
                        r = load_u32x4(key_rows + u64(at) * u64(ROW_K) + u64(lane_k + i32(j * LANES_K)) * u64(16))
                        for e in range(4):
                            kreg[u * WORDS_K + j * 4 + e] = r[e]
            for u in range(AHEAD_K):
                at = i32(first) + i32(u * GROUPS_K) + group_k
                s = f32(0)
                if at == own:
                    for j in range(EACH_K):
                        for e in range(PER_K):
                            s += fresh[0, (lane_k + i32(j * LANES_K)) * i32(PER_K) + i32(e)] * q[j * PER_K + e]
                else:
                    for j in range(EACH_K):
                        for e in range(4):
                            w = kreg[u * WORDS_K + j * 4 + e]
                            k = j * PER_K
                            if HALF_K:
                                s += low_f16(w) * q[k + 2 * e]
                                s += high_f16(w) * q[k + 2 * e + 1]
                            else:
                                s += bits_f32(w) * q[k + e]
                width = LANES_K // 2
                while width:
                    s += cuda.shfl_xor_sync(0xFFFFFFFF, s, width)
                    width //= 2
                if lane_k == 0 and at < n:
                    scores[at] = s
        cuda.syncthreads()
        lane, warp = tid % i32(32), tid // i32(32)
        if warp == 0:
            top, total = f32(LOWEST), f32(0)
            for at in range(lane, n, 32):
                top = max(top, scores[at])
            for k in range(5):
                top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, 16 >> k))
            for at in range(lane, n, 32):
                weight = exp2(scores[at] - top)
                scores[at] = weight
                total += weight
            for k in range(5):
                total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 16 >> k)
            if lane == 0:
                state[0] = top
                state[1] = total
        cuda.syncthreads()

        for i in range(N_ACC):
            acc[i] = f32(0)
        for first in range(0, n, GROUPS_V * AHEAD_V):
            if first:
                for u in range(AHEAD_V):
                    at = min(i32(first) + i32(u * GROUPS_V) + group_v, n - i32(1))
                    for j in range(EACH_V):
                        r = load_u32x4(value_rows + u64(at) * u64(ROW_V) + u64(lane_v + i32(j * LANES_V)) * u64(16))
                        for e in range(4):
                            vreg[u * WORDS_V + j * 4 + e] = r[e]
            for u in range(AHEAD_V):
                at = i32(first) + i32(u * GROUPS_V) + group_v
                weight = scores[at] if at < n else f32(0)
                if at == own:
                    for j in range(EACH_V):
                        for e in range(PER_V):
                            value = fresh[1, (lane_v + i32(j * LANES_V)) * i32(PER_V) + i32(e)]
                            acc[j * PER_V + e] += weight * value
                else:
                    for j in range(EACH_V):
                        for e in range(4):
                            w = vreg[u * WORDS_V + j * 4 + e]
                            k = j * PER_V
                            if HALF_V:
                                acc[k + 2 * e] += weight * low_f16(w)
                                acc[k + 2 * e + 1] += weight * high_f16(w)
                            else:
                                acc[k + e] += weight * bits_f32(w)
        for i in range(N_ACC):
            width = 16
            while width >= LANES_V:
                acc[i] += cuda.shfl_xor_sync(0xFFFFFFFF, acc[i], width)
                width //= 2
        if lane < i32(LANES_V):
            for j in range(EACH_V):
                for e in range(PER_V):
                    d = (lane_v + i32(j * LANES_V)) * i32(PER_V) + i32(e)
                    scores[span + warp * i32(WIDTH) + d] = acc[j * PER_V + e]
        cuda.syncthreads()
        splits = position // span + i32(1)
        for i in range(tid, WIDTH, THREADS):
            v = f32(0)
            for w in range(WARPS):
                v += scores[span + i32(w * WIDTH) + i32(i)]
            leave(out, partial, token, head, split, splits, i32(i), v, state[0], state[1])
        join(out, partial, counters, scores, last, token, splits, tid)

    return attention

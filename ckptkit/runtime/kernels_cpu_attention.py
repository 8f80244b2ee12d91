# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Rotary positions, the KV cache and causal grouped attention on the CPU.

The cache of one layer is (sequence, kv head, position, width), width = head_dim rounded up to a multiple of 16 with
zeros, so that no loop has a remainder. Values are f32 or f16 (literals ta for keys, tb for values); products are f32
either way.

One token (`decode_attention`, then `combine`): work is (kv head, chunk of 256 positions); every piece makes its own
maximum, sum and weighted values, and `combine` joins them, so a long context is shared by all threads. The piece that
holds the token's own position rotates and stores its key first.

Many tokens (`store_kv`, then `prompt_attention`): work is (kv head, tile of tokens). A lane is one query, of up to 16
heads that share the kv head; keys come in blocks of 96 and the softmax is online, so memory does not grow with the
context:

    scores (96, 64) = keys (96, width) queries (width, 64)         `tile`, keys broadcast where they lie
    sums   (width, 64) += values.T (width, 96) exp(scores - max)   `tile`, values broadcast by stride

tc is the pairing: 0 none, 1 adjacent (0,1)(2,3).., 2 half (0,h/2)(1,h/2+1)..
"""

from __future__ import annotations

from .kernels_cpu_blocks import decode16
from .kernels_cpu_cache import kernel
from .kernels_cpu_matmat import PANEL, PANEL_STEP, VECTORS
from .kernels_cpu_team import take
from .simd import add, fma, inlined, isplat, lanes_from, max16, maximum, mul, splat, sub, sum16, where_le
from .simd_exp import exp, exp1
from .simd_memory import get_f32, get_i32, get_i64, load_f32, load_i32, put_f16, put_f32, put_i32, store_f32
from .simd_tiles import dot_keys, tile

OUT = 0  # f32 (n, n_head * head_dim)
QKV = 8  # f32 (n, (n_head + 2 n_kv_head) * head_dim)
ROPE = 16  # f32 (context, 2, head_dim / 2): cosines, then sines; or 0
KEYS, VALUES = 24, 32  # this layer's cache
N_TOKENS, POSITIONS, SEQUENCES = 40, 48, 56  # int32 (n,) each
N_HEAD, N_KV_HEAD, HEAD_DIM, WIDTH, CONTEXT = 64, 72, 80, 88, 96
SCALE = 104  # f32
PARTIAL, N_CHUNKS = (
    112,
    120,
)  # f32 (n_head, N_CHUNKS, WIDTH + 16): sums, then maximum and sum of weights; N_CHUNKS of the whole context
SCRATCH, SCRATCH_STRIDE = 128, 136
N_SLOTS = 18

CHUNK = 256  # positions of one piece of `decode_attention`
BLOCK = 96  # keys of one step of `prompt_attention`: a multiple of the 6 rows of a tile
LOWEST = -1e30


@inlined
def put_as(t, address, x):
    if t == 0:
        put_f32(address, x)
    else:
        put_f16(address, x)


@inlined
def rotated(pairing, x, rope, position, head_dim, d):
    """Element d of the head at x, rotated to `position`."""
    x0 = get_f32(x + 4 * d)
    if pairing == 0:
        return x0
    half = head_dim // 2
    if pairing == 1:
        other, k, sign = d ^ 1, d >> 1, 1.0 if d & 1 else -1.0
    else:
        other, k, sign = (d + half, d, -1.0) if d < half else (d - half, d - half, 1.0)
    row = rope + position * head_dim * 4
    x1 = get_f32(x + 4 * other)
    return x0 * get_f32(row + 4 * k) + sign * (x1 * get_f32(row + 4 * (half + k)))


@inlined
def store_token(ta, tb, tc, args, i, kv):
    """Rotate and store key and value of token i, kv head kv."""
    n_kv, head_dim, width = get_i64(args + N_KV_HEAD), get_i64(args + HEAD_DIM), get_i64(args + WIDTH)
    n_head = get_i64(args + N_HEAD)
    position = get_i32(get_i64(args + POSITIONS) + 4 * i)
    sequence = get_i32(get_i64(args + SEQUENCES) + 4 * i)
    key = get_i64(args + QKV) + 4 * head_dim * (i * (n_head + 2 * n_kv) + n_head + kv)
    value = key + 4 * head_dim * n_kv
    row = ((sequence * n_kv + kv) * get_i64(args + CONTEXT) + position) * width
    to_key, to_value = get_i64(args + KEYS) + row * size_of(ta), get_i64(args + VALUES) + row * size_of(tb)
    for d in range(head_dim):
        put_as(ta, to_key + d * size_of(ta), rotated(tc, key, get_i64(args + ROPE), position, head_dim, d))
        put_as(tb, to_value + d * size_of(tb), get_f32(value + 4 * d))


@inlined
def size_of(t):
    return 4 if t == 0 else 2


@kernel
def decode_attention(ta, tb, tc, args, team, tid):
    """Attention of one token, in pieces; see `combine`."""
    n_head, n_kv, head_dim = get_i64(args + N_HEAD), get_i64(args + N_KV_HEAD), get_i64(args + HEAD_DIM)
    width, context, group = get_i64(args + WIDTH), get_i64(args + CONTEXT), n_head // n_kv
    position, sequence = get_i32(get_i64(args + POSITIONS)), get_i32(get_i64(args + SEQUENCES))
    queries = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)  # f32 (group, width)
    scores = queries + group * width * 4  # f32 (group, CHUNK)
    n_chunks = position // CHUNK + 1
    piece = take(team)
    while piece < n_kv * n_chunks:
        kv, chunk = piece // n_chunks, piece % n_chunks
        lo, hi = chunk * CHUNK, min(chunk * CHUNK + CHUNK, position + 1)
        if hi == position + 1:
            store_token(ta, tb, tc, args, 0, kv)
        for g in range(group):
            head = get_i64(args + QKV) + 4 * head_dim * (kv * group + g)
            for d in range(head_dim):
                q = rotated(tc, head, get_i64(args + ROPE), position, head_dim, d) * get_f32(args + SCALE)
                put_f32(queries + 4 * (g * width + d), q)
            for d in range(head_dim, width):
                put_f32(queries + 4 * (g * width + d), 0.0)
        row = ((sequence * n_kv + kv) * context + lo) * width
        keys, values = get_i64(args + KEYS) + row * size_of(ta), get_i64(args + VALUES) + row * size_of(tb)
        for g in range(group):
            into = scores + g * CHUNK * 4
            highest = splat(LOWEST)
            for p in range(0, hi - lo, 16):  # may read keys behind the last: the cache is that much longer
                s = dot_keys(
                    ta, queries + 4 * g * width, keys + p * width * size_of(ta), width * size_of(ta), width // 16
                )
                s = where_le(lanes_from(p), isplat(hi - lo - 1), s, splat(LOWEST))
                store_f32(into + 4 * p, s)
                highest = maximum(highest, s)
            top = max16(highest)
            total = splat(0.0)
            for p in range(0, hi - lo, 16):
                e = exp(sub(load_f32(into + 4 * p), splat(top)))
                e = where_le(lanes_from(p), isplat(hi - lo - 1), e, splat(0.0))
                store_f32(into + 4 * p, e)
                total = add(total, e)
            partial = get_i64(args + PARTIAL) + 4 * ((kv * group + g) * get_i64(args + N_CHUNKS) + chunk) * (width + 16)
            put_f32(partial + 4 * width, top)
            put_f32(partial + 4 * width + 4, sum16(total))
            weighted(tb, into, values, width, hi - lo, partial)
        piece = take(team)


@inlined
def weighted(tb, weights, values, width, n, out):
    """out (width,) = weights (n,) times values (n, width), four vectors of the width at a time."""
    step = width * size_of(tb)
    for d in range(0, width // 64 * 64, 64):
        a, b, c, e = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        at = values + d * size_of(tb)
        for p in range(n):
            w = splat(get_f32(weights + 4 * p))
            a = fma(w, decode16(tb, at, 0), a)
            b = fma(w, decode16(tb, at + 16 * size_of(tb), 0), b)
            c = fma(w, decode16(tb, at + 32 * size_of(tb), 0), c)
            e = fma(w, decode16(tb, at + 48 * size_of(tb), 0), e)
            at += step
        store_f32(out + 4 * d, a)
        store_f32(out + 4 * d + 64, b)
        store_f32(out + 4 * d + 128, c)
        store_f32(out + 4 * d + 192, e)
    for d in range(width // 64 * 64, width, 16):
        a = splat(0.0)
        at = values + d * size_of(tb)
        for p in range(n):
            a = fma(splat(get_f32(weights + 4 * p)), decode16(tb, at, 0), a)
            at += step
        store_f32(out + 4 * d, a)


@kernel
def combine(ta, tb, tc, args, team, tid):
    """out = the pieces of `decode_attention` joined, head by head."""
    head_dim, width, n_stored = get_i64(args + HEAD_DIM), get_i64(args + WIDTH), get_i64(args + N_CHUNKS)
    n_chunks = get_i32(get_i64(args + POSITIONS)) // CHUNK + 1
    head = take(team)
    while head < get_i64(args + N_HEAD):
        first = get_i64(args + PARTIAL) + 4 * head * n_stored * (width + 16)
        top = LOWEST
        for c in range(n_chunks):
            top = max(top, get_f32(first + 4 * (c * (width + 16) + width)))
        joined = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)
        total = 0.0
        for d in range(0, width, 16):
            store_f32(joined + 4 * d, splat(0.0))
        for c in range(n_chunks):
            partial = first + 4 * c * (width + 16)
            w = exp1(get_f32(partial + 4 * width) - top)
            total += w * get_f32(partial + 4 * width + 4)
            for d in range(0, width, 16):
                store_f32(joined + 4 * d, fma(splat(w), load_f32(partial + 4 * d), load_f32(joined + 4 * d)))
        out = get_i64(args + OUT) + 4 * head * head_dim
        for d in range(head_dim):
            put_f32(out + 4 * d, get_f32(joined + 4 * d) / total)
        head = take(team)


# --- many tokens ---


@kernel
def store_kv(ta, tb, tc, args, team, tid):
    """Rotate the keys of all tokens and put keys and values into the cache; eight tokens a piece."""
    n_tokens = get_i64(args + N_TOKENS)
    piece = take(team)
    while 8 * piece < n_tokens:
        for i in range(8 * piece, min(8 * piece + 8, n_tokens)):
            for kv in range(get_i64(args + N_KV_HEAD)):
                store_token(ta, tb, tc, args, i, kv)
        piece = take(team)


@inlined
def rows_plain(t, rows, width, n, out):
    """Rows of the cache as f32: where they lie, or widened to `out`."""
    if t == 0:
        return rows
    for at in range(0, n * width, 16):
        store_f32(out + 4 * at, decode16(t, rows + at * size_of(t), 0))
    return out


@kernel
def prompt_attention(ta, tb, tc, args, team, tid):
    """Attention of many tokens; see the head of this file."""
    n_tokens, n_kv, group = (
        get_i64(args + N_TOKENS),
        get_i64(args + N_KV_HEAD),
        get_i64(args + N_HEAD) // get_i64(args + N_KV_HEAD),
    )
    at_once = group if group <= 16 else 1  # heads of a kv head that share a tile
    n_parts = group // at_once
    span = max(PANEL // at_once, 1)  # tokens of a tile
    n_tiles = (n_tokens + span - 1) // span
    scratch = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)
    piece = take(team)
    while piece < n_kv * n_parts * n_tiles:
        n = n_tiles - 1 - piece // (n_kv * n_parts)  # the last tile sees the most keys: it goes first
        kv, part = piece % (n_kv * n_parts) // n_parts, piece % n_parts
        lo, end = n * span, min(n * span + span, n_tokens)
        while lo < end:  # tokens of one sequence together
            sequence = get_i32(get_i64(args + SEQUENCES) + 4 * lo)
            hi = lo + 1
            while hi < end and get_i32(get_i64(args + SEQUENCES) + 4 * hi) == sequence:
                hi += 1
            attend_tile(ta, tb, tc, args, scratch, lo, hi, kv, kv * group + part * at_once, at_once, sequence)
            lo = hi
        piece = take(team)


@inlined
def attend_tile(ta, tb, tc, args, scratch, lo, hi, kv, head, n_heads, sequence):
    """Tokens lo .. hi of one sequence, heads head .. head + n_heads: lane (token - lo) * n_heads + (head's number)."""
    head_dim, width = get_i64(args + HEAD_DIM), get_i64(args + WIDTH)
    queries = scratch  # f32 (width, PANEL)
    sums = queries + width * PANEL_STEP  # f32 (width, PANEL)
    scores = sums + width * PANEL_STEP  # f32 (BLOCK, PANEL)
    state = scores + BLOCK * PANEL_STEP  # f32 (2, PANEL): maximum, total; then int32 (PANEL,): positions
    plain = state + 3 * PANEL_STEP  # f32 (BLOCK, width)
    n_lanes = (hi - lo) * n_heads
    n_vectors = (n_lanes + 15) // 16
    lowest, highest = load_queries(tc, args, queries, state + 2 * PANEL_STEP, lo, n_lanes, head, n_heads)
    for v in range(n_vectors):
        store_f32(state + 64 * v, splat(LOWEST))
        store_f32(state + PANEL_STEP + 64 * v, splat(0.0))
        for d in range(width):
            store_f32(sums + d * PANEL_STEP + 64 * v, splat(0.0))
    row = (sequence * get_i64(args + N_KV_HEAD) + kv) * get_i64(args + CONTEXT) * width
    keys, values = get_i64(args + KEYS) + row * size_of(ta), get_i64(args + VALUES) + row * size_of(tb)
    for first in range(0, highest + 1, BLOCK):
        n = min(BLOCK, highest + 1 - first)
        # Whole tiles of keys: up to five behind the last are read (the cache is that much longer) and never used.
        k = rows_plain(ta, keys + first * width * size_of(ta), width, n + 5, plain)
        by_lanes(1, k, 4 * width, 4, (n + 5) // 6, queries, width, scores, n_vectors, 1)
        for v in range(n_vectors):
            soften(scores + 64 * v, n, first, lowest, state + 64 * v, sums + 64 * v, width)
        x = rows_plain(tb, values + first * width * size_of(tb), width, n, plain)
        by_lanes(0, x, 4, 4 * width, width // 4, scores, n, sums, n_vectors, 0)
    for lane in range(n_lanes):
        total = get_f32(state + PANEL_STEP + 4 * lane)
        token, h = lo + lane // n_heads, head + lane % n_heads
        out = get_i64(args + OUT) + 4 * head_dim * (token * get_i64(args + N_HEAD) + h)
        for d in range(head_dim):
            put_f32(out + 4 * d, get_f32(sums + d * PANEL_STEP + 4 * lane) / total)


@inlined
def load_queries(tc, args, queries, positions, lo, n_lanes, head, n_heads):
    """Rotated, scaled queries, one a lane; returns the lowest and highest position."""
    head_dim, width = get_i64(args + HEAD_DIM), get_i64(args + WIDTH)
    row = 4 * head_dim * (get_i64(args + N_HEAD) + 2 * get_i64(args + N_KV_HEAD))
    lowest = get_i32(get_i64(args + POSITIONS) + 4 * lo)
    highest = lowest
    for lane in range((n_lanes + 15) // 16 * 16):
        used = min(lane, n_lanes - 1)  # lanes behind the last repeat it
        token = lo + used // n_heads
        position = get_i32(get_i64(args + POSITIONS) + 4 * token)
        lowest, highest = min(lowest, position), max(highest, position)
        put_i32(positions + 4 * lane, position)
        x = get_i64(args + QKV) + token * row + 4 * head_dim * (head + used % n_heads)
        for d in range(head_dim):
            q = rotated(tc, x, get_i64(args + ROPE), position, head_dim, d) * get_f32(args + SCALE)
            put_f32(queries + d * PANEL_STEP + 4 * lane, q)
        for d in range(head_dim, width):
            put_f32(queries + d * PANEL_STEP + 4 * lane, 0.0)
    return lowest, highest


@inlined
def by_lanes(six, a, row_step, k_step, n_tiles, panel, n_k, c, n_vectors, fresh):
    """`tile` over n_tiles groups of six (or four) rows, as many vectors as there are."""
    for r in range(n_tiles):
        if six:
            some(6, n_vectors, a + 6 * r * row_step, row_step, k_step, panel, n_k, c + 6 * r * PANEL_STEP, fresh)
        else:
            some(4, n_vectors, a + 4 * r * row_step, row_step, k_step, panel, n_k, c + 4 * r * PANEL_STEP, fresh)


@inlined
def some(rows, n_vectors, a, row_step, k_step, panel, n_k, c, fresh):
    if VECTORS == 1 or n_vectors == 1:
        tile(0, rows, 1, a, row_step, k_step, panel, PANEL_STEP, n_k, c, PANEL_STEP, fresh)
    elif n_vectors == 2:
        tile(0, rows, 2, a, row_step, k_step, panel, PANEL_STEP, n_k, c, PANEL_STEP, fresh)
    elif n_vectors == 3:
        tile(0, rows, 3, a, row_step, k_step, panel, PANEL_STEP, n_k, c, PANEL_STEP, fresh)
    else:
        tile(0, rows, 4, a, row_step, k_step, panel, PANEL_STEP, n_k, c, PANEL_STEP, fresh)


@inlined
def soften(scores, n, first, lowest, state, sums, width):
    """Sixteen lanes of one block of scores to weights; rescales what was summed before."""
    positions = load_i32(state + 2 * PANEL_STEP)
    before = load_f32(state)
    top = before
    for p in range(n):
        s = load_f32(scores + p * PANEL_STEP)
        if first + p > lowest:
            s = where_le(isplat(first + p), positions, s, splat(LOWEST))
            store_f32(scores + p * PANEL_STEP, s)
        top = maximum(top, s)
    total = splat(0.0)
    for p in range(n):
        e = exp(sub(load_f32(scores + p * PANEL_STEP), top))
        if first + p > lowest:
            e = where_le(isplat(first + p), positions, e, splat(0.0))
        store_f32(scores + p * PANEL_STEP, e)
        total = add(total, e)
    store_f32(state, top)
    if first == 0:
        store_f32(state + PANEL_STEP, total)
        return
    shrink = exp(sub(before, top))
    store_f32(state + PANEL_STEP, fma(load_f32(state + PANEL_STEP), shrink, total))
    for d in range(width):
        store_f32(sums + d * PANEL_STEP, mul(load_f32(sums + d * PANEL_STEP), shrink))


def scratch_bytes(width: int, group: int) -> int:
    """Bytes of scratch a thread needs."""
    prompt = (2 * width + BLOCK + 3) * PANEL_STEP + (BLOCK + 6) * width * 4
    return max(prompt, group * (width + CHUNK) * 4)

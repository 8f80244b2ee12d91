# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Products with weights on the CPU: `matvec` for one token, `pack` then `matmat` for many, and `embed`.

A weight is a group of parts whose rows are stacked (q|k|v, gate|up), each part where it lies: nothing is copied. One
token runs along a row with sixteen lanes. Many tokens turn the product round: a lane is a token, the tokens'
activations are packed once into
panels, and a weight is one broadcast from memory, so rows are used as they lie in the file and no weight is ever
transposed:

    panel p: (K, 64) f32       activations of tokens 64 p .. 64 p + 63, or (K / 2, 64) pairs of bf16
    chunk:   ROWS x K          weight rows; types other than f32 are decoded once per chunk, for all tokens
    sums:    (ROWS, 64)        the tile's result, then bias, activation and the turn back to (token, row)

Every output value is one sum over K in one order, whatever the threads and the other tokens do.

Arguments (int64 unless said), the same table for `matvec`, `pack` and `matmat`; addresses are bytes:
"""

from __future__ import annotations

from numba import njit
from numba.extending import overload

from ..quant.types import QType
from .kernels_cpu_blocks import block_bytes, block_elements, decode16
from .kernels_cpu_lanes import ROWS as LANE_ROWS
from .kernels_cpu_lanes import lanes_decode, lanes_dot
from .kernels_cpu_team import JIT, THREADS, take
from .simd import (
    LANES,
    add,
    div,
    exp,
    fma,
    get_bf16,
    get_f16,
    get_f32,
    get_i32,
    get_i64,
    has_avx512,
    inlined,
    load_f32,
    maximum,
    mul,
    prefetch,
    put_f32,
    splat,
    store_bf16,
    store_f32,
    sub,
    sum16,
    tile,
    transpose16,
)

# Argument table: one line a slot.
OUT, OUT_STRIDE = 0, 8  # f32 (n, n_rows); bytes between tokens
X, X_STRIDE = 16, 24  # f32 (n, K)
N_TOKENS, K, PADDED_K = 32, 40, 48  # K up to a multiple of 32
ROW_INDEX = 56  # int32 (n,): which rows of x; 0: all in order
NORM, GAIN, NORM_BIAS, EPS = 64, 72, 80, 88  # 0 none, 1 rms, 2 layer; f32 (K,) or 0; f32
PARTS, N_PARTS, N_ROWS = 96, 104, 112  # int64 (n_parts, 4): address, rows, bytes of a row, 0 type ta or 1 type tb
BIAS = 120  # f32 (all stacked rows,) or 0
PANELS = 128  # packed activations
SCRATCH, SCRATCH_STRIDE = 136, 144  # per thread
TOKENS, POSITIONS, POSITION_ROWS = 152, 160, 168  # embed only
THEN = 176  # what happens to a sum: one of the next line
N_SLOTS = 23

SET, ADD, GELU, RELU, SILU_GATE = range(5)
NONE, RMS, LAYER = range(3)
VECTORS = 4 if has_avx512() else 1  # of a panel: what the registers hold beside ROWS_AT_ONCE rows
PANEL = VECTORS * LANES  # tokens
PANEL_STEP = PANEL * 4
ROWS_AT_ONCE = 6
ROWS = 48  # of a chunk: a multiple of 6 and of 16
AHEAD = 4096  # bytes of weights asked for before they are needed
LARGEST = 16384  # rows of a chunk of `matvec`
K_AT_ONCE = 512  # of a panel held in L2


@inlined
def plain_value(t, address):
    """One value of a plain type: the end of a row that is no multiple of sixteen."""
    if t == 0:
        return get_f32(address)
    if t == 1:
        return get_f16(address)
    return get_bf16(address)


@inlined
def dot(t, w, x, n):
    """Row of plain type t at w times f32 x, n values."""
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    size = block_bytes(t)
    for i in range(n // 64):
        here, y = w + 4 * i * size, x + 256 * i
        for line in range(0, 4 * size, 64):
            prefetch(here + AHEAD + line)
        a = fma(decode16(t, here, 0), load_f32(y), a)
        b = fma(decode16(t, here + size, 0), load_f32(y + 64), b)
        c = fma(decode16(t, here + 2 * size, 0), load_f32(y + 128), c)
        d = fma(decode16(t, here + 3 * size, 0), load_f32(y + 192), d)
    return sum16(add(add(a, b), add(c, d))) + rest(t, w, x, n)


@inlined
def rest(t, w, x, n):
    """What is left of a row behind whole groups of four vectors."""
    total, y = splat(0.0), 0.0
    for i in range(n // 64 * 4, n // 16):
        total = fma(decode16(t, w + i * block_bytes(t), 0), load_f32(x + 64 * i), total)
    for i in range(n // 16 * 16, n):
        y += plain_value(t, w + i * (block_bytes(t) // 16)) * get_f32(x + 4 * i)
    return sum16(total) + y


@inlined
def dots(t, w, width, n_rows, x, n, out):
    """Rows of plain type t times x, to out."""
    for r in range(n_rows):
        put_f32(out + 4 * r, dot(t, w + r * width, x, n))


@inlined
def lane_dots(t, w, width, n_rows, x, sums, n, out):
    """Rows of block type t, interleaved, times x, to out in whole vectors; `sums` holds those of every sixteen x."""
    for g in range((n_rows + 15) // 16):
        total = splat(0.0)
        block = w + g * 16 * width
        for i in range(0, n, block_elements(t)):
            total = lanes_dot(t, block, x + 4 * i, sums + i // 4, total)
            block += 16 * block_bytes(t)
        store_f32(out + 64 * g, total)


def part_dots(t, w, width, n_rows, x, sums, n, out):
    """Rows of one part times x, by the kind of its type."""


@overload(part_dots, prefer_literal=True)
def _part_dots(t, w, width, n_rows, x, sums, n, out):
    if QType(t.literal_value) in LANE_ROWS:
        return lambda t, w, width, n_rows, x, sums, n, out: lane_dots(t, w, width, n_rows, x, sums, n, out)
    return lambda t, w, width, n_rows, x, sums, n, out: dots(t, w, width, n_rows, x, n, out)


@inlined
def decode_row(t, w, out, n):
    """Row of type t at w to f32 at out, n values."""
    for _ in range(n // block_elements(t)):
        for j in range(block_elements(t) // 16):
            store_f32(out + 64 * j, decode16(t, w, j))
        w += block_bytes(t)
        out += 4 * block_elements(t)
    if block_elements(t) == 16:
        for i in range(n % 16):
            put_f32(out + 4 * i, plain_value(t, w + i * (block_bytes(t) // 16)))


@inlined
def decode_row_bf16(t, w, out, n):
    """Row of type t at w to bf16 at out; n is a multiple of sixteen."""
    for _ in range(n // block_elements(t)):
        for j in range(block_elements(t) // 16):
            store_bf16(out + 32 * j, decode16(t, w, j))
        w += block_bytes(t)
        out += 2 * block_elements(t)


@njit(**JIT)
def normalise(out, x, n, args):
    """The norm of one row of n values (or a copy), f32, as slots NORM to EPS say."""
    kind, gain, bias = get_i64(args + NORM), get_i64(args + GAIN), get_i64(args + NORM_BIAS)
    whole = n // 16 * 16
    mean, scale = 0.0, 1.0
    if kind == LAYER:
        total = splat(0.0)
        for i in range(0, whole, 16):
            total = add(total, load_f32(x + 4 * i))
        mean = sum16(total)
        for i in range(whole, n):
            mean += get_f32(x + 4 * i)
        mean /= n
    if kind != NONE:
        total = splat(0.0)
        for i in range(0, whole, 16):
            d = sub(load_f32(x + 4 * i), splat(mean))
            total = fma(d, d, total)
        square = sum16(total)
        for i in range(whole, n):
            square += (get_f32(x + 4 * i) - mean) ** 2
        scale = 1.0 / (square / n + get_f32(args + EPS)) ** 0.5
    for i in range(0, whole, 16):
        y = mul(sub(load_f32(x + 4 * i), splat(mean)), splat(scale))
        if gain != 0:
            y = mul(y, load_f32(gain + 4 * i))
        if bias != 0:
            y = add(y, load_f32(bias + 4 * i))
        store_f32(out + 4 * i, y)
    for i in range(whole, n):
        y1 = (get_f32(x + 4 * i) - mean) * scale
        if gain != 0:
            y1 *= get_f32(gain + 4 * i)
        if bias != 0:
            y1 += get_f32(bias + 4 * i)
        put_f32(out + 4 * i, y1)


@inlined
def silu16(x):
    return div(x, add(splat(1.0), exp(sub(splat(0.0), x))))


@inlined
def gelu16(x):
    """x / 2 (1 + tanh(u)) = x / (1 + e**(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x**3)."""
    u = mul(mul(splat(-1.5957691216057308), x), fma(mul(splat(0.044715), x), x, splat(1.0)))
    return div(x, add(splat(1.0), exp(u)))


@inlined
def activate16(act, x):
    if act == GELU:
        return gelu16(x)
    if act == RELU:
        return maximum(x, splat(0.0))
    return x


# --- one token ---


@njit(**JIT)
def matvec(ta, tb, tc, args, team, tid):
    """out = W norm(x) + b for one token, then what slot THEN says; rows in chunks, in any order."""
    then, n, parts = get_i64(args + THEN), get_i64(args + K), get_i64(args + PARTS)
    out, bias, x = get_i64(args + OUT), get_i64(args + BIAS), get_i64(args + X)
    if get_i64(args + ROW_INDEX) != 0:
        x += get_i32(get_i64(args + ROW_INDEX)) * get_i64(args + X_STRIDE)
    h = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)
    normalise(h, x, n, args)
    sums = h + get_i64(args + PADDED_K) * 4  # of every 16 values, for shifts of blocks
    if block_elements(ta) > 16 or block_elements(tb) > 16:
        for i in range(0, n, 16):
            put_f32(sums + i // 4, sum16(load_f32(h + 4 * i)))
    result = sums + get_i64(args + PADDED_K) // 4
    # Two chunks of a part for each thread, side by side: long runs of weights, and the second may be taken by another
    # thread.
    threads = get_i64(team + THREADS)
    step = min(max((get_i64(parts + 8) // (2 * threads) + 15) // 16 * 16, 16), LARGEST)
    while True:
        part, first, lo = locate(then, parts, get_i64(args + N_PARTS), step, take(team), threads)
        if part == 0:
            return
        n_rows = min(step, get_i64(part + 8) - lo)
        for p in range(2 if then == SILU_GATE else 1):  # up's rows right behind gate's
            at, to = part + 32 * p, result + 4 * step * p
            w, width = get_i64(at) + lo * get_i64(at + 16), get_i64(at + 16)
            if get_i64(at + 24) == 0:
                part_dots(ta, w, width, n_rows, h, sums, n, to)
            elif ta != tb:
                part_dots(tb, w, width, n_rows, h, sums, n, to)
        row = first + lo
        finish(then, out + 4 * row, result, result + 4 * step, bias + 4 * row if bias != 0 else 0, n_rows)


@inlined
def locate(then, parts, n_parts, step, chunk, threads):
    """Where chunk number `chunk` of `step` rows lies: the part's address (0: there is none), its first stacked row,
    the row in it."""
    first = 0
    for p in range(1 if then == SILU_GATE else n_parts):  # up is taken along with gate
        part = parts + 32 * p
        n_rows = get_i64(part + 8)
        n_chunks = (n_rows + step - 1) // step
        if chunk < n_chunks:
            if n_chunks == 2 * threads:  # first every thread's first, then every thread's second
                chunk = chunk % threads * 2 + chunk // threads
            return part, first, chunk * step
        first += n_rows
        chunk -= n_chunks
    return 0, 0, 0


@njit(**JIT)
def activate(then, sums, ups, n):
    """Activation of n values in place. Not part of `matvec`: its constants would take registers from the products
    there."""
    for i in range(0, n, 16):
        y = load_f32(sums + 4 * i)
        store_f32(sums + 4 * i, mul(silu16(y), load_f32(ups + 4 * i)) if then == SILU_GATE else activate16(then, y))


@njit(**JIT)
def finish(then, out, sums, ups, bias, n):
    """Bias and activation for n neighbouring values of one token, then store or add."""
    for i in range(n, (n + 15) // 16 * 16):  # to a whole vector: what lies behind is never stored
        put_f32(sums + 4 * i, 0.0)
        if then == SILU_GATE:
            put_f32(ups + 4 * i, 0.0)
    if bias != 0:
        for i in range(n):
            put_f32(sums + 4 * i, get_f32(sums + 4 * i) + get_f32(bias + 4 * i))
    if then >= GELU:
        activate(then, sums, ups, n)
    for i in range(n):
        y = get_f32(sums + 4 * i)
        put_f32(out + 4 * i, get_f32(out + 4 * i) + y if then == ADD else y)


# --- many tokens ---


@njit(**JIT)
def pack(ta, tb, tc, args, team, tid):
    """Normalise tokens and lay them out as panels, sixteen tokens at a time; tc 1: rounded to bf16 pairs."""
    n_tokens, n, padded = get_i64(args + N_TOKENS), get_i64(args + K), get_i64(args + PADDED_K)
    x, stride, index = get_i64(args + X), get_i64(args + X_STRIDE), get_i64(args + ROW_INDEX)
    rows = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)  # f32 (16, padded)
    depth = padded // (2 if tc == 1 else 1)  # rows of a panel
    n_groups = (n_tokens + 15) // 16
    group = take(team)
    while group < n_groups:
        for i in range(16):
            token, row = 16 * group + i, rows + i * padded * 4
            used = 0
            if token < n_tokens:
                used = n
                if index != 0:
                    token = get_i32(index + 4 * token)
                normalise(row, x + token * stride, n, args)
            for k in range(used, padded):
                put_f32(row + 4 * k, 0.0)
            if tc == 1:
                for k in range(0, padded, 16):  # in place: two bytes are written where four were read
                    store_bf16(row + 2 * k, load_f32(row + 4 * k))
        panel = get_i64(args + PANELS) + (group // VECTORS) * depth * PANEL_STEP + (group % VECTORS) * 64
        for k in range(0, depth, 16):
            transpose16(rows + 4 * k, padded * 4, panel + k * PANEL_STEP, PANEL_STEP)
        group = take(team)


@inlined
def tiles(pairs, n_vectors, a, row_step, k_step, n_rows, panel, n_k, c, fresh):
    """Rows of one chunk times one piece of a panel."""
    whole = n_rows // ROWS_AT_ONCE * ROWS_AT_ONCE
    for r in range(0, whole, ROWS_AT_ONCE):
        left, to = a + r * row_step, c + r * PANEL_STEP
        tile(pairs, 6, n_vectors, left, row_step, k_step, panel, PANEL_STEP, n_k, to, PANEL_STEP, fresh)
    for r in range(whole, n_rows):
        left, to = a + r * row_step, c + r * PANEL_STEP
        tile(pairs, 1, n_vectors, left, row_step, k_step, panel, PANEL_STEP, n_k, to, PANEL_STEP, fresh)


@inlined
def product(pairs, a, row_step, k_step, n_rows, panel, depth, n_tokens, c):
    """c (n_rows, PANEL) = rows times a whole panel of which n_tokens lanes are used."""
    for k in range(0, depth, K_AT_ONCE):
        here, left, size = panel + k * PANEL_STEP, a + k * k_step, min(depth - k, K_AT_ONCE)
        fresh = 1 if k == 0 else 0
        if VECTORS == 1 or n_tokens <= 16:
            tiles(pairs, 1, left, row_step, k_step, n_rows, here, size, c, fresh)
        elif n_tokens <= 32:
            tiles(pairs, 2, left, row_step, k_step, n_rows, here, size, c, fresh)
        else:
            tiles(pairs, 4, left, row_step, k_step, n_rows, here, size, c, fresh)


def chunk_rows(pairs, t, w, width, n_rows, n, padded, out):
    """Rows ready for `product`, where they lie or decoded to `out`: address, bytes between rows, bytes between
    elements.

    With pairs an element is two bf16. Interleaved rows are decoded to (elements, ROWS), others to (rows, elements).
    """


@overload(chunk_rows, prefer_literal=True)
def _chunk_rows(pairs, t, w, width, n_rows, n, padded, out):
    type = QType(t.literal_value)

    def as_stored(pairs, t, w, width, n_rows, n, padded, out):
        return w, width, 4

    def plain(pairs, t, w, width, n_rows, n, padded, out):
        for r in range(n_rows):
            if pairs:
                decode_row_bf16(t, w + r * width, out + r * padded * 2, n)
            else:
                decode_row(t, w + r * width, out + r * padded * 4, n)
        return out, padded * (2 if pairs else 4), 4

    def interleaved(pairs, t, w, width, n_rows, n, padded, out):
        size = block_elements(t) * 4 * ROWS // (2 if pairs else 1)
        for g in range((n_rows + 15) // 16):
            block, to = w + g * 16 * width, out + 64 * g
            for _ in range(n // block_elements(t)):
                lanes_decode(t, pairs, block, to, 4 * ROWS)
                block += 16 * block_bytes(t)
                to += size
        return out, 4, 4 * ROWS

    if type in LANE_ROWS:
        return interleaved
    return as_stored if type == (QType.BF16 if pairs.literal_value else QType.F32) else plain


@inlined
def turn_back(then, sums, n_rows, row, n_tokens, token, bias, args, square):
    """sums (n_rows, PANEL) to out (token, row): sixteen by sixteen through `square`, with bias."""
    stride = get_i64(args + OUT_STRIDE)
    out = get_i64(args + OUT)
    for r in range(0, n_rows, 16):
        m = min(n_rows - r, 16)
        if bias != 0:
            for i in range(m):
                b = splat(get_f32(bias + 4 * (row + r + i)))
                for v in range(VECTORS):
                    at = sums + (r + i) * PANEL_STEP + 64 * v
                    store_f32(at, add(load_f32(at), b))
        if then in (GELU, RELU):
            for i in range(m):
                for v in range(VECTORS):
                    at = sums + (r + i) * PANEL_STEP + 64 * v
                    store_f32(at, activate16(then, load_f32(at)))
        for t in range(0, n_tokens, 16):
            transpose16(sums + r * PANEL_STEP + 4 * t, PANEL_STEP, square, 64)
            for i in range(min(n_tokens - t, 16)):
                to = out + (token + t + i) * stride + 4 * (row + r)
                if m == 16:
                    y = load_f32(square + 64 * i)
                    store_f32(to, add(y, load_f32(to)) if then == ADD else y)
                else:
                    for j in range(m):
                        y1 = get_f32(square + 64 * i + 4 * j)
                        put_f32(to + 4 * j, get_f32(to + 4 * j) + y1 if then == ADD else y1)


@inlined
def ready_rows(pairs, ta, tb, part, lo, n_rows, args, decoded):
    """Rows lo .. lo + n_rows of a part by `chunk_rows`."""
    w, width = get_i64(part) + lo * get_i64(part + 16), get_i64(part + 16)
    n, padded = get_i64(args + K), get_i64(args + PADDED_K)
    if ta != tb and get_i64(part + 24) != 0:
        return chunk_rows(pairs, tb, w, width, n_rows, n, padded, decoded)
    return chunk_rows(pairs, ta, w, width, n_rows, n, padded, decoded)


@inlined
def matmat_chunk(pairs, ta, tb, then, part, lo, n_rows, first, args, scratch):
    """Rows lo .. of one part for every token; `first` is the part's first stacked row."""
    n_tokens, padded = get_i64(args + N_TOKENS), get_i64(args + PADDED_K)
    panel_bytes = padded // (2 if pairs else 1) * PANEL_STEP
    depth = get_i64(args + K) // (2 if pairs else 1)  # not `padded`: behind a row in the file lies another
    square = scratch
    sums = square + 1024
    ups = sums + ROWS * PANEL_STEP
    decoded = ups + ROWS * PANEL_STEP
    a, a_row, a_k = ready_rows(pairs, ta, tb, part, lo, n_rows, args, decoded)
    b, b_row, b_k = a, a_row, a_k
    if then == SILU_GATE:
        b, b_row, b_k = ready_rows(pairs, ta, tb, part + 32, lo, n_rows, args, decoded + ROWS * padded * 4)
    for p in range((n_tokens + PANEL - 1) // PANEL):
        panel = get_i64(args + PANELS) + p * panel_bytes
        used = min(n_tokens - p * PANEL, PANEL)
        product(pairs, a, a_row, a_k, n_rows, panel, depth, used, sums)
        if then == SILU_GATE:
            product(pairs, b, b_row, b_k, n_rows, panel, depth, used, ups)
            for at in range(0, n_rows * PANEL_STEP, 64):
                store_f32(sums + at, mul(silu16(load_f32(sums + at)), load_f32(ups + at)))
        turn_back(then, sums, n_rows, first + lo, used, p * PANEL, get_i64(args + BIAS), args, square)


@inlined
def matmat_parts(pairs, ta, tb, then, args, team, tid):
    """Chunks of ROWS rows, each inside one part."""
    scratch = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)
    while True:
        part, first, lo = locate(then, get_i64(args + PARTS), get_i64(args + N_PARTS), ROWS, take(team), 1)
        if part == 0:
            return
        n_rows = min(ROWS, get_i64(part + 8) - lo)
        matmat_chunk(pairs, ta, tb, then, part, lo, n_rows, first, args, scratch)


@njit(**JIT)
def matmat(ta, tb, tc, args, team, tid):
    """out = W x + b for packed tokens, activations f32."""
    matmat_parts(0, ta, tb, get_i64(args + THEN), args, team, tid)


@njit(**JIT)
def matmat_bf16(ta, tb, tc, args, team, tid):
    """out = W x + b for packed tokens, activations and decoded weights bf16, sums f32."""
    matmat_parts(1, ta, tb, get_i64(args + THEN), args, team, tid)


def scratch_bytes(padded_k: int) -> int:
    """Bytes of scratch a thread needs: the most of pack's rows, matmat's sums and decoded chunks, matvec's sums."""
    return max(16 * padded_k * 4, 1024 + 2 * ROWS * PANEL_STEP + 2 * ROWS * padded_k * 4, padded_k * 5 + 8 * LARGEST)


# --- tokens ---


@njit(**JIT)
def embed(ta, tb, tc, args, team, tid):
    """out (n, K) = rows of the embedding, decoded, plus the position's row where there is one."""
    n, part = get_i64(args + K), get_i64(args + PARTS)
    tokens, positions, table = get_i64(args + TOKENS), get_i64(args + POSITIONS), get_i64(args + POSITION_ROWS)
    i = take(team)
    while i < get_i64(args + N_TOKENS):
        out = get_i64(args + OUT) + i * get_i64(args + OUT_STRIDE)
        decode_row(ta, get_i64(part) + get_i32(tokens + 4 * i) * get_i64(part + 16), out, n)
        if table != 0:
            row = table + get_i32(positions + 4 * i) * n * 4
            for k in range(n):
                put_f32(out + 4 * k, get_f32(out + 4 * k) + get_f32(row + 4 * k))
        i = take(team)


@njit(**JIT)
def norm_rows(ta, tb, tc, args, team, tid):
    """out (n, K) = norm(x); out may be x."""
    i = take(team)
    while i < get_i64(args + N_TOKENS):
        x = get_i64(args + X) + i * get_i64(args + X_STRIDE)
        normalise(get_i64(args + OUT) + i * get_i64(args + OUT_STRIDE), x, get_i64(args + K), args)
        i = take(team)

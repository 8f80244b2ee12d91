# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Products of weights with many tokens on the CPU: `pack`, then `matmat`.

The product is turned round: a lane is a token, the tokens' activations are packed once into panels, and a weight is one
broadcast from memory, so rows are used as they lie in the file and no weight is ever transposed:

    panel p: (K, 64) f32       activations of tokens 64 p .. 64 p + 63, or (K / 2, 64) pairs of bf16
    chunk:   ROWS x K          weight rows; types other than f32 are decoded once per chunk, for all tokens
    sums:    (ROWS, 64)        the tile's result, then bias, activation and the turn back to (token, row)

Every output value is one sum over K in one order, whatever the threads and the other tokens do.
"""

from __future__ import annotations

from numba.extending import overload

from ..quant.types import QType
from .kernels_cpu_args import (
    ADD,
    BIAS,
    GELU,
    N_PARTS,
    N_TOKENS,
    OUT,
    OUT_STRIDE,
    PADDED_K,
    PANELS,
    PARTS,
    RELU,
    ROW_INDEX,
    SCRATCH,
    SCRATCH_STRIDE,
    SILU_GATE,
    THEN,
    X_STRIDE,
    K,
    X,
    locate,
)
from .kernels_cpu_blocks import block_elements
from .kernels_cpu_cache import kernel
from .kernels_cpu_embed import decode_row, decode_row_bf16
from .kernels_cpu_lanes import ROWS as LANE_ROWS
from .kernels_cpu_lanes_dot import find_block, lanes_decode
from .kernels_cpu_norm import activate16, normalise, silu16
from .kernels_cpu_team import take
from .simd import LANES, add, has_avx512, inlined, mul, splat
from .simd_memory import get_f32, get_i32, get_i64, load_f32, put_f32, store_bf16, store_f32
from .simd_tiles import tile, transpose16

VECTORS = 4 if has_avx512() else 1  # of a panel: what the registers hold beside ROWS_AT_ONCE rows
PANEL = VECTORS * LANES  # tokens
PANEL_STEP = PANEL * 4
ROWS_AT_ONCE = 6
ROWS = 48  # of a chunk: a multiple of 6 and of 16
K_AT_ONCE = 128  # of a panel held in L2; longer sums round worse (512: twice the error of a logit), shorter cost time


@kernel
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
        step = block_elements(t) * 4 * ROWS // (2 if pairs else 1)
        for g in range((n_rows + 15) // 16):
            to = out + 64 * g
            for i in range(n // block_elements(t)):
                block, half = find_block(t, w + g * 16 * width, i)
                lanes_decode(t, pairs, block, half, to, 4 * ROWS)
                to += step
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


@kernel
def matmat(ta, tb, tc, args, team, tid):
    """out = W x + b for packed tokens, activations f32."""
    matmat_parts(0, ta, tb, get_i64(args + THEN), args, team, tid)


@kernel
def matmat_bf16(ta, tb, tc, args, team, tid):
    """out = W x + b for packed tokens, activations and decoded weights bf16, sums f32."""
    matmat_parts(1, ta, tb, get_i64(args + THEN), args, team, tid)


def scratch_bytes(padded_k: int) -> int:
    """Bytes of scratch a thread needs: pack's rows, or matmat's sums and decoded chunks."""
    return max(16 * padded_k * 4, 1024 + 2 * ROWS * PANEL_STEP + 2 * ROWS * padded_k * 4)

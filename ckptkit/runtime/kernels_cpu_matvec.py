# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Products of weights with one token on the CPU: `matvec`.

Plain types run along a row with sixteen lanes; interleaved blocks go sixteen rows at a time, a lane a row, with the
token's activations as they are (tc 0) or rounded to two bytes (tc 1; plain types are exact either way).
"""

from __future__ import annotations

from numba.extending import overload

from ..quant.types import QType
from .kernels_cpu_args import (
    ADD,
    BIAS,
    GELU,
    N_PARTS,
    OUT,
    PADDED_K,
    PARTS,
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
from .kernels_cpu_blocks import block_bytes, block_elements, decode16
from .kernels_cpu_cache import kernel
from .kernels_cpu_embed import plain_value
from .kernels_cpu_lanes import ROWS
from .kernels_cpu_lanes_dot import HIGH, find_block, lanes_dot, lanes_dot_bytes
from .kernels_cpu_norm import activate16, normalise, silu16
from .kernels_cpu_team import THREADS, take
from .simd import add, fma, inlined, max16, maximum, mul, nearest, splat, sub, sum16
from .simd_memory import get_f32, get_i32, get_i64, load_f32, prefetch, put_f32, store_f32, store_i8

AHEAD = 256  # bytes of weights asked for before they are needed: what is far ahead the hardware asks for itself
LARGEST = 16384  # rows of a chunk
LEVELS = 127.0 * HIGH + 127.0  # the largest rounded activation
SMALLEST = 1e-30  # activations that are all smaller count as zero: the inverse of their largest would overflow


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


def part_dots(t, rounded, w, width, n_rows, x, padded, n, out):
    """Rows of one part times x, to out (whole vectors where rows are interleaved), by the kind of its type.

    Behind x (padded,) f32 lies what `sum_up` or `round_row` made of it.
    """


@overload(part_dots, prefer_literal=True)
def _part_dots(t, rounded, w, width, n_rows, x, padded, n, out):
    type = QType(t.literal_value)
    if type not in ROWS:
        return lambda t, rounded, w, width, n_rows, x, padded, n, out: dots(t, w, width, n_rows, x, n, out)

    def exact(t, rounded, w, width, n_rows, x, padded, n, out):
        sums = x + 4 * padded
        for g in range((n_rows + 15) // 16):
            total = splat(0.0)
            for i in range(0, n, block_elements(t)):
                block, half = find_block(t, w + g * 16 * width, i // block_elements(t))
                total = lanes_dot(t, block, half, x + 4 * i, sums + i // 4, total)
            store_f32(out + 64 * g, total)

    def in_bytes(t, rounded, w, width, n_rows, x, padded, n, out):
        sums, high = x + 4 * padded, x + 4 * padded + padded // 4
        low, worth = high + padded, high + 2 * padded
        for g in range((n_rows + 15) // 16):
            total = splat(0.0)
            for i in range(0, n, block_elements(t)):
                block, half = find_block(t, w + g * 16 * width, i // block_elements(t))
                one = get_f32(worth + i // 8)
                total = lanes_dot_bytes(t, block, half, high + i, low + i, sums + i // 4, one, total)
            store_f32(out + 64 * g, total)

    return in_bytes if rounded.literal_value else exact


@kernel
def sum_up(x, padded, n):
    """Behind x (padded,) f32: (padded / 16,) f32, the sum of every sixteen values, for shifts of blocks."""
    for i in range(0, n, 16):
        put_f32(x + 4 * padded + i // 4, sum16(load_f32(x + 4 * i)))


@kernel
def round_row(x, padded, n, elements):
    """Behind x (padded,) f32: sums as above, high (padded,) i8, low (padded,) i8, worth (padded / 32,) f32.

    `elements` values at a time are x = worth * (HIGH * high + low), to the nearest of 65,025 levels of their largest;
    the sums are of HIGH * high + low. `worth` is repeated for every 32 values.
    """
    sums, high = x + 4 * padded, x + 4 * padded + padded // 4
    low, worth = high + padded, high + 2 * padded
    for lo in range(0, n, elements):
        largest = splat(0.0)
        for i in range(lo, lo + elements, 16):
            y = load_f32(x + 4 * i)
            largest = maximum(largest, maximum(y, sub(splat(0.0), y)))
        top = max16(largest)
        for i in range(lo, lo + elements, 32):
            put_f32(worth + i // 8, top / LEVELS)
        turn = LEVELS / top if top > SMALLEST else 0.0
        for i in range(lo, lo + elements, 16):
            y = nearest(mul(load_f32(x + 4 * i), splat(turn)))
            first = nearest(mul(y, splat(1.0 / HIGH)))
            store_i8(high + i, first)
            store_i8(low + i, fma(first, splat(-1.0 * HIGH), y))
            put_f32(sums + i // 4, sum16(y))


@kernel
def scratch_of_row(padded):
    """Bytes that a row takes with what lies behind it, whole cache lines."""
    return (6 * padded + padded // 4 + padded // 8 + 63) // 64 * 64


@kernel
def matvec(ta, tb, tc, args, team, tid):
    """out = W norm(x) + b for one token, then what slot THEN says; rows in chunks, in any order."""
    then, n, parts = get_i64(args + THEN), get_i64(args + K), get_i64(args + PARTS)
    out, bias, x = get_i64(args + OUT), get_i64(args + BIAS), get_i64(args + X)
    if get_i64(args + ROW_INDEX) != 0:
        x += get_i32(get_i64(args + ROW_INDEX)) * get_i64(args + X_STRIDE)
    h = get_i64(args + SCRATCH) + tid * get_i64(args + SCRATCH_STRIDE)
    normalise(h, x, n, args)
    padded = get_i64(args + PADDED_K)
    elements = max(block_elements(ta), block_elements(tb))
    if elements > 16 and tc == 1:
        round_row(h, padded, n, elements)
    elif elements > 16:
        sum_up(h, padded, n)
    result = h + scratch_of_row(padded)
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
                part_dots(ta, tc, w, width, n_rows, h, padded, n, to)
            elif ta != tb:
                part_dots(tb, tc, w, width, n_rows, h, padded, n, to)
        row = first + lo
        finish(then, out + 4 * row, result, result + 4 * step, bias + 4 * row if bias != 0 else 0, n_rows)


@kernel
def activate(then, sums, ups, n):
    """Activation of n values in place. Not part of `matvec`: its constants would take registers from the products
    there."""
    for i in range(0, n, 16):
        y = load_f32(sums + 4 * i)
        store_f32(sums + 4 * i, mul(silu16(y), load_f32(ups + 4 * i)) if then == SILU_GATE else activate16(then, y))


@kernel
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


def scratch_bytes(padded_k: int) -> int:
    """Bytes of scratch a thread needs: the row and what lies behind it, the sums of a chunk of two parts."""
    return int(scratch_of_row.py_func(padded_k)) + 8 * LARGEST

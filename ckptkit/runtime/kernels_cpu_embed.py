# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Rows decoded one after another: embeddings, and what is left of a row behind whole vectors."""

from __future__ import annotations

from .kernels_cpu_args import N_TOKENS, OUT, OUT_STRIDE, PARTS, POSITION_ROWS, POSITIONS, TOKENS, K
from .kernels_cpu_blocks import block_bytes, block_elements, decode16
from .kernels_cpu_cache import kernel
from .kernels_cpu_team import take
from .simd import inlined
from .simd_memory import get_bf16, get_f16, get_f32, get_i32, get_i64, put_f32, store_bf16, store_f32


@inlined
def plain_value(t, address):
    """One value of a plain type: the end of a row that is no multiple of sixteen."""
    if t == 0:
        return get_f32(address)
    if t == 1:
        return get_f16(address)
    return get_bf16(address)


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


@kernel
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

# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""How the CPU reads each weight type: one function per type gives sixteen decoded values of a block, float32, exactly.

Source of truth: ggml-common.h and ggml-quants.c of llama.cpp; judged against the `gguf` package by
tests/test_kernels_cpu.py. `decode16(t, block, j)`: t is a literal QType, `block` the address of a block, values 16 j
.. 16 j + 15 of it.

| type | bytes of a block |
|---|---|
| Q8_0 | f16 d, 32 x i8 q: d q |
| Q4_0 | f16 d, 16 bytes: value k in the low half of byte k, value k + 16 in the high half: d (q - 8) |
| Q4_1 | f16 d, f16 m, 16 bytes as Q4_0: d q + m |
| Q5_0 | f16 d, u32 fifth bits, 16 bytes: d (q - 16) |
| Q5_1 | f16 d, f16 m, u32 fifth bits, 16 bytes: d q + m |
| Q4_K | f16 d, f16 dmin, 12 bytes of eight 6-bit (scale, min), 4 x 32 bytes: d scale q - dmin min; 32 values a scale |
| Q5_K | the same, then 32 bytes of fifth bits (bit s for scale s), then 4 x 32 bytes |
| Q6_K | 128 bytes low halves, 64 bytes of two upper bits, 16 x i8 scale, f16 d: d scale (q - 32); 16 values a scale |
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from ..quant.types import BLOCKS, QType
from .simd import fma, iand, inlined, ior, isplat, lanes, mul, shl, shr, small_to_f32, splat
from .simd_memory import get_f16, get_i8, get_u8, get_u32, load_bf16, load_f16, load_f32, load_i8, load_u8


def decode16(t, block, j):
    """Values 16 j .. 16 j + 15 of the block at address `block`, as f32x16."""


def block_elements(t):
    """Values in a block; plain types count sixteen, the width of a vector."""


def block_bytes(t):
    """Bytes of that many values."""


@inlined
def _nibbles(address, shift):
    """Sixteen bytes' low (shift 0) or high (shift 4) halves."""
    return iand(shr(load_u8(address), isplat(shift)), isplat(15))


@inlined
def _q8_0(t, block, j):
    return mul(load_i8(block + 2 + 16 * j), splat(get_f16(block)))


@inlined
def _q4_0(t, block, j):
    return mul(small_to_f32(_nibbles(block + 2, 4 * j), 8.0), splat(get_f16(block)))


@inlined
def _q4_1(t, block, j):
    return fma(small_to_f32(_nibbles(block + 4, 4 * j), 0.0), splat(get_f16(block)), splat(get_f16(block + 2)))


@inlined
def _fifth(bits, j):
    """Bit 16 j + lane of `bits`, worth sixteen."""
    return shl(iand(shr(isplat(bits >> (16 * j)), lanes()), isplat(1)), isplat(4))


@inlined
def _q5_0(t, block, j):
    q = ior(_nibbles(block + 6, 4 * j), _fifth(get_u32(block + 2), j))
    return mul(small_to_f32(q, 16.0), splat(get_f16(block)))


@inlined
def _q5_1(t, block, j):
    q = ior(_nibbles(block + 8, 4 * j), _fifth(get_u32(block + 4), j))
    return fma(small_to_f32(q, 0.0), splat(get_f16(block)), splat(get_f16(block + 2)))


@inlined
def _scale_min(scales, s):
    """Six-bit scale and min number s of eight: 0-3 lie whole in bytes s and s + 4, 4-7 in halves and the top two
    bits."""
    if s < 4:
        return get_u8(scales + s) & 63, get_u8(scales + s + 4) & 63
    both = get_u8(scales + s + 4)
    scale = (both & 15) | ((get_u8(scales + s - 4) >> 6) << 4)
    return scale, (both >> 4) | ((get_u8(scales + s) >> 6) << 4)


@inlined
def _q4_k(t, block, j):
    s = j >> 1
    scale, low = _scale_min(block + 4, s)
    q = _nibbles(block + 16 + 32 * (s >> 1) + 16 * (j & 1), 4 * (s & 1))
    d, m = get_f16(block) * scale, get_f16(block + 2) * low
    return fma(small_to_f32(q, 0.0), splat(types.float32(d)), splat(types.float32(-m)))


@inlined
def _q5_k(t, block, j):
    s = j >> 1
    scale, low = _scale_min(block + 4, s)
    q = _nibbles(block + 48 + 32 * (s >> 1) + 16 * (j & 1), 4 * (s & 1))
    q = ior(q, shl(iand(shr(load_u8(block + 16 + 16 * (j & 1)), isplat(s)), isplat(1)), isplat(4)))
    d, m = get_f16(block) * scale, get_f16(block + 2) * low
    return fma(small_to_f32(q, 0.0), splat(types.float32(d)), splat(types.float32(-m)))


@inlined
def _q6_k(t, block, j):
    half, quarter, odd = j >> 3, (j >> 1) & 3, 16 * (j & 1)
    q = _nibbles(block + 64 * half + 32 * (quarter & 1) + odd, 4 * (quarter >> 1))
    top = iand(shr(load_u8(block + 128 + 32 * half + odd), isplat(2 * quarter)), isplat(3))
    d = get_f16(block + 208) * get_i8(block + 192 + j)
    return mul(small_to_f32(ior(q, shl(top, isplat(4))), 32.0), splat(types.float32(d)))


DECODE = {
    QType.F32: inlined(lambda t, block, j: load_f32(block)),
    QType.F16: inlined(lambda t, block, j: load_f16(block)),
    QType.BF16: inlined(lambda t, block, j: load_bf16(block)),
    QType.Q8_0: _q8_0,
    QType.Q4_0: _q4_0,
    QType.Q4_1: _q4_1,
    QType.Q5_0: _q5_0,
    QType.Q5_1: _q5_1,
    QType.Q4_K: _q4_k,
    QType.Q5_K: _q5_k,
    QType.Q6_K: _q6_k,
}


@overload(decode16, prefer_literal=True)
def _decode16(t, block, j):
    return DECODE[QType(t.literal_value)]


@overload(block_elements, prefer_literal=True)
def _block_elements(t):
    n = max(BLOCKS[QType(t.literal_value)].elements, 16)
    return lambda t: n


@overload(block_bytes, prefer_literal=True)
def _block_bytes(t):
    block = BLOCKS[QType(t.literal_value)]
    n = block.nbytes * max(16 // block.elements, 1)
    return lambda t: n

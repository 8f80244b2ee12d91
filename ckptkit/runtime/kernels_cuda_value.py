"""A single weight of any type as float32, and rounding to 16 bits: for embedding rows, and for matrices decoded
before a product."""

# mypy: ignore-errors
# ruff: noqa: ARG001  functions of a family take the same arguments
from __future__ import annotations

from numba import cuda

from ..quant.types import QType
from .cuda_layout import LAYOUTS
from .cuda_ptx import (
    bits_f32,
    f16_f32,
    f32,
    f32_bits,
    f32_f16,
    high_f16,
    i32,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    low_f16,
    rotate_right,
    store_f32,
    store_u16,
    u16,
    u32,
    u64,
)

device = cuda.jit(device=True)


def integer_of(type: QType):
    """integer(p0, ph, k): weight k of the row whose nibbles begin at p0 and whose high bits begin at ph."""
    HIGH = LAYOUTS[type].high

    @device
    def integer(p0, ph, k):
        q = (load_u32(p0 + u64(k >> i32(3)) * u64(4)) >> u32((k & i32(7)) * i32(4))) & u32(15)
        if HIGH:
            q |= (high_word(ph, k, HIGH) & u32((1 << HIGH) - 1)) << u32(4)
        return i32(q)

    return integer


@device
def high_word(p, k, high):
    """The word of high bits of weight k of the row that begins at p, turned so that its own come first."""
    word = load_u32(p + u64((k * i32(high)) >> i32(5)) * u64(4))
    eight = (k >> i32(3)) * i32(high)
    return rotate_right(word, u32(((k & i32(7)) * i32(4) + (eight & i32(3)) + i32(4)) & i32(31)))


def value_of(type: QType):
    """value(p0, p1, p2, p3, k): weight k of the row whose planes begin at p0..p3."""
    HIGH, integer = LAYOUTS[type].high, integer_of(type)

    @device
    def f32_value(p0, p1, p2, p3, k):
        return load_f32(p0 + u64(k) * u64(4))

    @device
    def f16_value(p0, p1, p2, p3, k):
        return f16_f32(load_u16(p0 + u64(k) * u64(2)))

    @device
    def bf16_value(p0, p1, p2, p3, k):
        return bits_f32(u32(load_u16(p0 + u64(k) * u64(2))) << u32(16))

    @device
    def q8_0_value(p0, p1, p2, p3, k):
        q = i32(load_u8(p0 + u64(k)) ^ u32(0x80)) - i32(128)
        return f16_f32(load_u16(p1 + u64(k >> i32(5)) * u64(2))) * f32(q)

    @device
    def with_scale(p0, p1, p2, p3, k):
        return f16_f32(load_u16(p1 + u64(k >> i32(5)) * u64(2))) * f32(integer(p0, p2, k) - i32(8 << HIGH))

    @device
    def with_least(p0, p1, p2, p3, k):
        dm = load_u32(p1 + u64(k >> i32(5)) * u64(4))
        return low_f16(dm) * f32(integer(p0, p2, k)) + high_f16(dm)

    @device
    def with_both_scaled(p0, p1, p2, p3, k):
        sm, dd = u32(load_u16(p1 + u64(k >> i32(5)) * u64(2))), load_u32(p2 + u64(k >> i32(8)) * u64(4))
        scale, least = low_f16(dd) * f32(i32(sm & u32(255))), high_f16(dd) * f32(i32(sm >> u32(8)))
        return scale * f32(integer(p0, p3, k)) - least

    @device
    def q6_k_value(p0, p1, p2, p3, k):
        scale = i32(load_u8(p1 + u64(k >> i32(4))) ^ u32(0x80)) - i32(128)
        return f16_f32(load_u16(p2 + u64(k >> i32(8)) * u64(2))) * f32(scale) * f32(integer(p0, p3, k) - i32(32))

    return {
        QType.F32: f32_value, QType.F16: f16_value, QType.BF16: bf16_value, QType.Q8_0: q8_0_value,
        QType.Q4_0: with_scale, QType.Q5_0: with_scale, QType.Q4_1: with_least, QType.Q5_1: with_least,
        QType.Q4_K: with_both_scaled, QType.Q5_K: with_both_scaled, QType.Q6_K: q6_k_value,
    }[type]  # fmt: skip


@device
def round_bf16(x):
    """float32 to bf16, ties to even; a NaN stays one."""
    bits = f32_bits(x)
    if x != x:
        return u16(0x7FC0)
    return u16((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@device
def round_f16(x):
    """float32 to f16; what is too large becomes the largest finite value, so that one outlier does not spread as
    infinity."""
    return f32_f16(min(max(x, f32(-65504)), f32(65504)))


def store_as(to: QType):
    """store(row, k, x): element k of a row of type `to`."""

    @device
    def as_f32(row, k, x):
        store_f32(row + u64(k) * u64(4), x)

    @device
    def as_f16(row, k, x):
        store_u16(row + u64(k) * u64(2), round_f16(x))

    @device
    def as_bf16(row, k, x):
        store_u16(row + u64(k) * u64(2), round_bf16(x))

    return {QType.F32: as_f32, QType.F16: as_f16, QType.BF16: as_bf16}[to]

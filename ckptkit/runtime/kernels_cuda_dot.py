"""One 16-byte vector of weights times float32 activations in shared memory, for every type (layouts: cuda_layout.py).

For each type: how to load a vector with its scales into registers, how to multiply them. Small integers are numbers
without being converted: masked where they lie they are subnormal floats, u 2^k, and the activations that they meet
were staged with what makes up for the power of two.
"""

# mypy: ignore-errors
# ruff: noqa: ARG001  functions of a family take the same arguments
from __future__ import annotations

from numba import cuda

from ..quant.types import QType
from .cuda_ptx import (
    and_or,
    bits_f32,
    f16_f32,
    f32,
    high_f16,
    i32,
    load_scale_u16,
    load_scale_u32,
    load_weights,
    load_weights_2,
    low_f16,
    pick_bytes,
    rotate_right,
    shared_f32x2,
    shared_f32x4,
    u16,
    u32,
    u64,
)

device = cuda.jit(device=True)


def loader(type: QType):
    """load(out, at, p0, p1, p2, p3, v): vector v of the row whose planes begin at p0..p3, into registers out[at:]."""

    @device
    def plain(out, at, p0, p1, p2, p3, v):
        w = load_weights(p0 + u64(v) * u64(16))
        out[at], out[at + 1], out[at + 2], out[at + 3] = w[0], w[1], w[2], w[3]

    @device
    def q8_0(out, at, p0, p1, p2, p3, v):
        plain(out, at, p0, p1, p2, p3, v)
        out[at + 4] = u32(load_scale_u16(p1 + u64(v >> i32(1)) * u64(2)))

    @device
    def q4_0(out, at, p0, p1, p2, p3, v):
        plain(out, at, p0, p1, p2, p3, v)
        out[at + 4] = u32(load_scale_u16(p1 + u64(v) * u64(2)))

    @device
    def q4_1(out, at, p0, p1, p2, p3, v):
        plain(out, at, p0, p1, p2, p3, v)
        out[at + 4] = load_scale_u32(p1 + u64(v) * u64(4))

    @device
    def q4_k(out, at, p0, p1, p2, p3, v):
        q4_0(out, at, p0, p1, p2, p3, v)
        out[at + 5] = load_scale_u32(p2 + u64(v >> i32(3)) * u64(4))

    @device
    def q6_k(out, at, p0, p1, p2, p3, v):
        plain(out, at, p0, p1, p2, p3, v)
        h = load_weights_2(p1 + u64(v) * u64(8))
        out[at + 4], out[at + 5] = h[0], h[1]
        out[at + 6] = u32(load_scale_u16(p2 + u64(v) * u64(2)))
        out[at + 7] = u32(load_scale_u16(p3 + u64(v >> i32(3)) * u64(2)))

    table = {QType.Q8_0: q8_0, QType.Q4_0: q4_0, QType.Q4_1: q4_1, QType.Q4_K: q4_k, QType.Q6_K: q6_k}
    return table.get(type, plain)


@device
def nibbles4(w, x, acc):
    """Four nibbles from bit 0 on times staged activations."""
    acc += bits_f32(w & u32(0xF)) * x[0]
    acc += bits_f32(w & u32(0xF0)) * x[1]
    acc += bits_f32(w & u32(0xF00)) * x[2]
    return acc + bits_f32(w & u32(0xF000)) * x[3]


@device
def sixbits4(w, h, x, acc):
    """Four 6-bit weights, nibbles in w from bit 0 on and high bits in h from bit 4 on, times staged activations."""
    acc += bits_f32(and_or(h, u32(0x30), w & u32(0xF))) * x[0]
    acc += bits_f32(and_or(h, u32(0x300), w & u32(0xF0))) * x[1]
    acc += bits_f32(and_or(h, u32(0x3000), w & u32(0xF00))) * x[2]
    return acc + bits_f32(and_or(h, u32(0x30000), w & u32(0xF000))) * x[3]


@device
def signed_byte(b):
    """A byte in the low bits of a word as a float."""
    return f32(i32(b ^ u32(0x80)) - i32(128))


def multiplier(type: QType):
    """dot(r, at, x, step, s, acc): acc + the vector in registers r[at:] times the activations, in its layout's scale.

    The float4 of activations p lies at shared address x + p * step; the sums of this vector's two 16 lie at s.
    """

    @device
    def dot_f32(r, at, x, step, s, acc):
        a = shared_f32x4(x)
        acc += bits_f32(r[at]) * a[0]
        acc += bits_f32(r[at + 1]) * a[1]
        acc += bits_f32(r[at + 2]) * a[2]
        acc += bits_f32(r[at + 3]) * a[3]
        return acc

    @device
    def dot_bf16(r, at, x, step, s, acc):
        a, b = shared_f32x4(x), shared_f32x4(x + step)
        high, half = u32(0xFFFF0000), u32(16)
        acc += bits_f32(r[at] << half) * a[0]
        acc += bits_f32(r[at] & high) * a[1]
        acc += bits_f32(r[at + 1] << half) * a[2]
        acc += bits_f32(r[at + 1] & high) * a[3]
        acc += bits_f32(r[at + 2] << half) * b[0]
        acc += bits_f32(r[at + 2] & high) * b[1]
        acc += bits_f32(r[at + 3] << half) * b[2]
        acc += bits_f32(r[at + 3] & high) * b[3]
        return acc

    @device
    def dot_f16(r, at, x, step, s, acc):
        a, b = shared_f32x4(x), shared_f32x4(x + step)
        acc += low_f16(r[at]) * a[0]
        acc += high_f16(r[at]) * a[1]
        acc += low_f16(r[at + 1]) * a[2]
        acc += high_f16(r[at + 1]) * a[3]
        acc += low_f16(r[at + 2]) * b[0]
        acc += high_f16(r[at + 2]) * b[1]
        acc += low_f16(r[at + 3]) * b[2]
        acc += high_f16(r[at + 3]) * b[3]
        return acc

    @device
    def bytes4(w, a, t):
        # u = byte + 128 in the low mantissa of 2^23 is exact; so is the difference
        w = w ^ u32(0x80808080)
        big, base = u32(0x4B000000), f32(8388736.0)
        t += (bits_f32(pick_bytes(w, big, u32(0x7440))) - base) * a[0]
        t += (bits_f32(pick_bytes(w, big, u32(0x7441))) - base) * a[1]
        t += (bits_f32(pick_bytes(w, big, u32(0x7442))) - base) * a[2]
        t += (bits_f32(pick_bytes(w, big, u32(0x7443))) - base) * a[3]
        return t

    @device
    def dot_q8_0(r, at, x, step, s, acc):
        t = bytes4(r[at], shared_f32x4(x), f32(0))
        t = bytes4(r[at + 1], shared_f32x4(x + step), t)
        t = bytes4(r[at + 2], shared_f32x4(x + step * u32(2)), t)
        t = bytes4(r[at + 3], shared_f32x4(x + step * u32(3)), t)
        return acc + f16_f32(u16(r[at + 4])) * t

    @device
    def nibbles32(r, at, x, step):
        t, half = f32(0), u32(16)
        for j in range(4):
            t = nibbles4(r[at + j], shared_f32x4(x + step * u32(2 * j)), t)
            t = nibbles4(r[at + j] >> half, shared_f32x4(x + step * u32(2 * j + 1)), t)
        return t

    @device
    def sum32(s):
        halves = shared_f32x2(s)
        return halves[0] + halves[1]

    @device
    def dot_q4_0(r, at, x, step, s, acc):
        return acc + f16_f32(u16(r[at + 4])) * (nibbles32(r, at, x, step) - f32(8) * sum32(s))

    @device
    def dot_q4_1(r, at, x, step, s, acc):
        return acc + low_f16(r[at + 4]) * nibbles32(r, at, x, step) + high_f16(r[at + 4]) * sum32(s)

    @device
    def dot_q4_k(r, at, x, step, s, acc):
        scale = low_f16(r[at + 5]) * f32(i32(r[at + 4] & u32(255)))
        least = high_f16(r[at + 5]) * f32(i32(r[at + 4] >> u32(8)))
        return acc + scale * nibbles32(r, at, x, step) - least * sum32(s)

    @device
    def sixbits16(w, v, h, x, step):
        t = sixbits4(w, h, shared_f32x4(x), f32(0))
        t = sixbits4(w >> u32(16), rotate_right(h, u32(16)), shared_f32x4(x + step), t)
        t = sixbits4(v, rotate_right(h, u32(2)), shared_f32x4(x + step * u32(2)), t)
        return sixbits4(v >> u32(16), rotate_right(h, u32(18)), shared_f32x4(x + step * u32(3)), t)

    @device
    def dot_q6_k(r, at, x, step, s, acc):
        sums = shared_f32x2(s)
        t = sixbits16(r[at], r[at + 1], r[at + 4], x, step) - f32(32) * sums[0]
        u = sixbits16(r[at + 2], r[at + 3], r[at + 5], x + step * u32(4), step) - f32(32) * sums[1]
        d = f16_f32(u16(r[at + 7]))
        return acc + d * (signed_byte(r[at + 6] & u32(255)) * t + signed_byte(r[at + 6] >> u32(8)) * u)

    return {
        QType.F32: dot_f32, QType.F16: dot_f16, QType.BF16: dot_bf16, QType.Q8_0: dot_q8_0,
        QType.Q4_0: dot_q4_0, QType.Q4_1: dot_q4_1, QType.Q4_K: dot_q4_k, QType.Q6_K: dot_q6_k,
    }[type]  # fmt: skip

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
from .cuda_layout import LAYOUTS
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
    def scale(out, at, p0, p1, p2, p3, v):
        plain(out, at, p0, p1, p2, p3, v)
        out[at + 4] = u32(load_scale_u16(p1 + u64(v) * u64(2)))

    @device
    def scale_and_least(out, at, p0, p1, p2, p3, v):
        plain(out, at, p0, p1, p2, p3, v)
        out[at + 4] = load_scale_u32(p1 + u64(v) * u64(4))

    @device
    def scales_k(out, at, p0, p1, p2, p3, v):
        scale(out, at, p0, p1, p2, p3, v)
        out[at + 5] = load_scale_u32(p2 + u64(v >> i32(3)) * u64(4))

    @device
    def scales_q6_k(out, at, p0, p1, p2, p3, v):
        scale(out, at, p0, p1, p2, p3, v)
        out[at + 5] = u32(load_scale_u16(p2 + u64(v >> i32(3)) * u64(2)))

    load = {
        QType.Q8_0: q8_0, QType.Q4_0: scale, QType.Q5_0: scale, QType.Q4_1: scale_and_least,
        QType.Q5_1: scale_and_least, QType.Q4_K: scales_k, QType.Q5_K: scales_k, QType.Q6_K: scales_q6_k,
    }.get(type, plain)  # fmt: skip
    HIGH, REGS, LAST = LAYOUTS[type].high, LAYOUTS[type].registers, len(LAYOUTS[type].planes) - 1

    @device
    def with_high(out, at, p0, p1, p2, p3, v):
        load(out, at, p0, p1, p2, p3, v)
        p = p2 if LAST == 2 else p3
        if HIGH == 1:
            out[at + REGS - 1] = load_scale_u32(p + u64(v) * u64(4))
        else:
            h = load_weights_2(p + u64(v) * u64(8))
            out[at + REGS - 2], out[at + REGS - 1] = h[0], h[1]

    return with_high if HIGH else load


def four_of(high: int):
    """four(w, h, x, acc): acc + four weights times staged activations; nibbles in w from bit 0 on, `high` bits of each
    in h from bit 4 on."""
    H = ((1 << high) - 1) << 4
    H0, H1, H2, H3 = H, H << 4, H << 8, H << 12

    @device
    def nibbles(w, h, x, acc):
        acc += bits_f32(w & u32(0xF)) * x[0]
        acc += bits_f32(w & u32(0xF0)) * x[1]
        acc += bits_f32(w & u32(0xF00)) * x[2]
        return acc + bits_f32(w & u32(0xF000)) * x[3]

    @device
    def wider(w, h, x, acc):
        acc += bits_f32(and_or(h, u32(H0), w & u32(0xF))) * x[0]
        acc += bits_f32(and_or(h, u32(H1), w & u32(0xF0))) * x[1]
        acc += bits_f32(and_or(h, u32(H2), w & u32(0xF00))) * x[2]
        return acc + bits_f32(and_or(h, u32(H3), w & u32(0xF000))) * x[3]

    return wider if high else nibbles


@device
def signed_byte(b):
    """A byte in the low bits of a word as a float."""
    return f32(i32(b ^ u32(0x80)) - i32(128))


def multiplier(type: QType, rows: int):
    """dot(r, at, x, step, s, acc): acc[k] += the vector of row k times the activations, in the layout's scale.

    Row k's vector lies in registers r[at + k * registers:]. The float4 of activations p lies at shared address
    x + p * step; the sums of this vector's two 16 lie at s.
    """
    ROWS, REGS, HIGH = rows, LAYOUTS[type].registers, LAYOUTS[type].high
    HIGH_AT, AROUND = REGS - HIGH, 4 // max(HIGH, 1)  # words of high bits, and how many words of nibbles have one
    four = four_of(HIGH)

    @device
    def dot_f32(r, at, x, step, s, acc):
        a = shared_f32x4(x)
        for k in range(ROWS):
            w, t = at + k * REGS, acc[k]
            t += bits_f32(r[w]) * a[0]
            t += bits_f32(r[w + 1]) * a[1]
            t += bits_f32(r[w + 2]) * a[2]
            acc[k] = t + bits_f32(r[w + 3]) * a[3]

    @device
    def dot_bf16(r, at, x, step, s, acc):
        a, b = shared_f32x4(x), shared_f32x4(x + step)
        high, half = u32(0xFFFF0000), u32(16)
        for k in range(ROWS):
            w, t = at + k * REGS, acc[k]
            t += bits_f32(r[w] << half) * a[0]
            t += bits_f32(r[w] & high) * a[1]
            t += bits_f32(r[w + 1] << half) * a[2]
            t += bits_f32(r[w + 1] & high) * a[3]
            t += bits_f32(r[w + 2] << half) * b[0]
            t += bits_f32(r[w + 2] & high) * b[1]
            t += bits_f32(r[w + 3] << half) * b[2]
            acc[k] = t + bits_f32(r[w + 3] & high) * b[3]

    @device
    def dot_f16(r, at, x, step, s, acc):
        a, b = shared_f32x4(x), shared_f32x4(x + step)
        for k in range(ROWS):
            w, t = at + k * REGS, acc[k]
            t += low_f16(r[w]) * a[0]
            t += high_f16(r[w]) * a[1]
            t += low_f16(r[w + 1]) * a[2]
            t += high_f16(r[w + 1]) * a[3]
            t += low_f16(r[w + 2]) * b[0]
            t += high_f16(r[w + 2]) * b[1]
            t += low_f16(r[w + 3]) * b[2]
            acc[k] = t + high_f16(r[w + 3]) * b[3]

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
        t = cuda.local.array(ROWS, f32)
        for j in range(4):
            a = shared_f32x4(x + step * u32(j))
            for k in range(ROWS):
                t[k] = bytes4(r[at + k * REGS + j], a, t[k] if j else f32(0))
        for k in range(ROWS):
            acc[k] += f16_f32(u16(r[at + k * REGS + 4])) * t[k]

    @device
    def words(r, at, first, n, x, step, t):
        """t[k] = the integers in words first..first + n of row k times the activations."""
        for j in range(n):
            at_x = x + step * u32(2 * (first + j))
            a, b = shared_f32x4(at_x), shared_f32x4(at_x + step)
            for k in range(ROWS):
                w, h = r[at + k * REGS + first + j], u32(0)
                if HIGH:
                    h = rotate_right(r[at + k * REGS + HIGH_AT + (first + j) // AROUND], u32(HIGH * (j % AROUND)))
                t[k] = four(w, h, a, t[k] if j else f32(0))
                if HIGH:
                    h = rotate_right(h, u32(16))
                t[k] = four(w >> u32(16), h, b, t[k])

    @device
    def sum32(s):
        halves = shared_f32x2(s)
        return halves[0] + halves[1]

    @device
    def with_scale(r, at, x, step, s, acc):
        t = cuda.local.array(ROWS, f32)
        words(r, at, 0, 4, x, step, t)
        offset = f32(8 << HIGH) * sum32(s)
        for k in range(ROWS):
            acc[k] += f16_f32(u16(r[at + k * REGS + 4])) * (t[k] - offset)

    @device
    def with_least(r, at, x, step, s, acc):
        t = cuda.local.array(ROWS, f32)
        words(r, at, 0, 4, x, step, t)
        total = sum32(s)
        for k in range(ROWS):
            both = r[at + k * REGS + 4]
            acc[k] += low_f16(both) * t[k] + high_f16(both) * total

    @device
    def with_both_scaled(r, at, x, step, s, acc):
        t = cuda.local.array(ROWS, f32)
        words(r, at, 0, 4, x, step, t)
        total = sum32(s)
        for k in range(ROWS):
            small, large = r[at + k * REGS + 4], r[at + k * REGS + 5]
            scale = low_f16(large) * f32(i32(small & u32(255)))
            least = high_f16(large) * f32(i32(small >> u32(8)))
            acc[k] += scale * t[k] - least * total

    @device
    def dot_q6_k(r, at, x, step, s, acc):
        t = cuda.local.array(ROWS, f32)
        sums = shared_f32x2(s)
        for half in range(2):
            words(r, at, 2 * half, 2, x, step, t)
            for k in range(ROWS):
                scale = signed_byte((r[at + k * REGS + 4] >> u32(8 * half)) & u32(255))
                acc[k] += f16_f32(u16(r[at + k * REGS + 5])) * scale * (t[k] - f32(32) * sums[half])

    return {
        QType.F32: dot_f32, QType.F16: dot_f16, QType.BF16: dot_bf16, QType.Q8_0: dot_q8_0,
        QType.Q4_0: with_scale, QType.Q5_0: with_scale, QType.Q4_1: with_least, QType.Q5_1: with_least,
        QType.Q4_K: with_both_scaled, QType.Q5_K: with_both_scaled, QType.Q6_K: dot_q6_k,
    }[type]  # fmt: skip

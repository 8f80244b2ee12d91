"""Rows of a matrix decoded to f32, f16 or bf16, for a matrix product on the tensor cores; eight weights a thread."""

# mypy: ignore-errors
# ruff: noqa: ARG001  functions of a family take the same arguments
from __future__ import annotations

from numba import cuda

from ..quant.types import QType
from .cuda_layout import LAYOUTS
from .cuda_plan import PIECE, Decode
from .cuda_ptx import (
    bits_f32,
    f16_f32,
    f32,
    f32_f16,
    high_f16,
    i32,
    load_u8,
    load_u16,
    load_u32,
    load_u32x4,
    low_f16,
    pack_f16,
    store_f32x4,
    store_u32x4,
    u32,
    u64,
)
from .kernels_cuda_dot import signed_byte
from .kernels_cuda_embed import pitches
from .kernels_cuda_value import high_word, round_bf16, store_as, value_of

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 6


def eight_of(type: QType):
    """eight(out, p0, p1, p2, p3, g): weights 8 g .. 8 g + 7 of the row whose planes begin at p0..p3, as float32."""

    @device
    def halves(out, p0, p1, p2, p3, g):
        v = load_u32x4(p0 + u64(g) * u64(16))
        for e in range(4):
            out[2 * e], out[2 * e + 1] = low_f16(v[e]), high_f16(v[e])

    @device
    def brains(out, p0, p1, p2, p3, g):
        v = load_u32x4(p0 + u64(g) * u64(16))
        for e in range(4):
            out[2 * e], out[2 * e + 1] = bits_f32(v[e] << u32(16)), bits_f32(v[e] & u32(0xFFFF0000))

    @device
    def bytes8(out, p0, p1, p2, p3, g):
        scale = f16_f32(load_u16(p1 + u64(g >> i32(2)) * u64(2)))
        for h in range(2):
            word = load_u32(p0 + u64(g) * u64(8) + u64(4 * h))
            for e in range(4):
                out[4 * h + e] = scale * signed_byte((word >> u32(8 * e)) & u32(255))

    HIGH = LAYOUTS[type].high

    @device
    def integers(out, p0, high_plane, g):
        """Nibbles with their high bits."""
        low, above = load_u32(p0 + u64(g) * u64(4)), u32(0)
        if HIGH:
            above = high_word(high_plane, g * i32(8), HIGH)
        for e in range(8):
            q = (low >> u32(4 * e)) & u32(15)
            if HIGH:
                q |= ((above >> u32(4 * e)) & u32((1 << HIGH) - 1)) << u32(4)
            out[e] = f32(i32(q))

    @device
    def with_scale(out, p0, p1, p2, p3, g):
        scale = f16_f32(load_u16(p1 + u64(g >> i32(2)) * u64(2)))
        integers(out, p0, p2, g)
        for e in range(8):
            out[e] = scale * (out[e] - f32(8 << HIGH))

    @device
    def with_least(out, p0, p1, p2, p3, g):
        dm = load_u32(p1 + u64(g >> i32(2)) * u64(4))
        integers(out, p0, p2, g)
        for e in range(8):
            out[e] = low_f16(dm) * out[e] + high_f16(dm)

    @device
    def with_both_scaled(out, p0, p1, p2, p3, g):
        sm, dd = u32(load_u16(p1 + u64(g >> i32(2)) * u64(2))), load_u32(p2 + u64(g >> i32(5)) * u64(4))
        scale, least = low_f16(dd) * f32(i32(sm & u32(255))), high_f16(dd) * f32(i32(sm >> u32(8)))
        integers(out, p0, p3, g)
        for e in range(8):
            out[e] = scale * out[e] - least

    @device
    def q6_k(out, p0, p1, p2, p3, g):
        scale = f16_f32(load_u16(p2 + u64(g >> i32(5)) * u64(2))) * signed_byte(load_u8(p1 + u64(g >> i32(1))))
        integers(out, p0, p3, g)
        for e in range(8):
            out[e] = scale * (out[e] - f32(32))

    return {
        QType.F16: halves, QType.BF16: brains, QType.Q8_0: bytes8,
        QType.Q4_0: with_scale, QType.Q5_0: with_scale, QType.Q4_1: with_least, QType.Q5_1: with_least,
        QType.Q4_K: with_both_scaled, QType.Q5_K: with_both_scaled, QType.Q6_K: q6_k,
    }[type]  # fmt: skip


def kernel(p: Decode):
    """The kernel function of a Decode plan; grid (rows,). The second piece goes to `rest`."""
    N, THREADS, PIECES = p.n_in, p.threads, p.pieces
    A0, A1, A2, A3 = pitches(p.type, N)
    WIDE, HALF = p.to == QType.F32, p.to == QType.F16
    ROW = N * (4 if WIDE else 2)
    WHOLE = N % 8 == 0
    GROUPS = N // 8
    value, store, eight = value_of(p.type), store_as(p.to), eight_of(p.type)

    @device
    def two_bf16(a, b):
        return u32(round_bf16(a)) | (u32(round_bf16(b)) << u32(16))

    @device
    def two_f16(a, b):
        return pack_f16(a, b)

    @device
    def rest_of_bf16(x):
        return x - bits_f32(u32(round_bf16(x)) << u32(16))

    @device
    def rest_of_f16(x):
        return (x - f16_f32(f32_f16(x))) * f32(PIECE)

    two, rest_of = (two_f16, rest_of_f16) if HALF else (two_bf16, rest_of_bf16)

    def decode(out, rest, w0, w1, w2, w3):
        v = cuda.local.array(8, f32)
        row = i32(cuda.blockIdx.x)
        p0, p1 = w0 + u64(row) * u64(A0), w1 + u64(row) * u64(A1)
        p2, p3 = w2 + u64(row) * u64(A2), w3 + u64(row) * u64(A3)
        to, left = out + u64(row) * u64(ROW), rest + u64(row) * u64(ROW)
        if WHOLE:
            for g in range(i32(cuda.threadIdx.x), GROUPS, THREADS):
                eight(v, p0, p1, p2, p3, i32(g))
                if WIDE:
                    store_f32x4(to + u64(g) * u64(32), v[0], v[1], v[2], v[3])
                    store_f32x4(to + u64(g) * u64(32) + u64(16), v[4], v[5], v[6], v[7])
                else:
                    for piece in range(PIECES):
                        at = (to if piece == 0 else left) + u64(g) * u64(16)
                        store_u32x4(at, two(v[0], v[1]), two(v[2], v[3]), two(v[4], v[5]), two(v[6], v[7]))
                        for e in range(8):
                            v[e] = rest_of(v[e])
        else:
            for k in range(i32(cuda.threadIdx.x), N, THREADS):
                x = value(p0, p1, p2, p3, i32(k))
                store(to, i32(k), x)
                if PIECES > 1:
                    store(left, i32(k), rest_of(x))

    return decode

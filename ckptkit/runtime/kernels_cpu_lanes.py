# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Block types on the CPU: sixteen weight rows at a time, a lane a row. One table row per type.

At load the blocks of sixteen rows are interleaved byte by byte (`interleave`): byte i of the sixteen blocks lies
together. Then one load gives a field of sixteen blocks, whatever the type, scales included; a product needs no sum
across lanes and no scalar work:

    group g: (blocks of a row, bytes of a block, 16) u8

Every value is scale * raw + shift, where `raw` costs two instructions: the number's bits are moved to the top of a
float's mantissa and joined with 1.0, which makes 1 + q / 2**n. Per sub-block the sum of raw * x is multiplied by the
scale, and the shift by the sum of x, which is known beforehand. `ROWS` below is a table of Python functions that emit
LLVM; loops over a block are unrolled here.

Source of truth for the blocks: ggml-common.h and ggml-quants.c of llama.cpp (byte tables in kernels_cpu_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from ..quant.types import BLOCKS, QType
from .simd import F32, I8, I64, LANES, VF, VI, _fn, _load, _splat, _store, f32x16, fetch_ahead, i64, void

AHEAD = 6144  # bytes of weights asked for before they are needed
V8 = ir.VectorType(I8, LANES)


def _c(x):
    return ir.Constant(VI, [x] * LANES) if isinstance(x, int) else ir.Constant(VF, [x] * LANES)


class Block:
    """Sixteen interleaved blocks at an address: fields as vectors, each loaded once."""

    def __init__(self, builder, address):
        self.b, self.address, self.seen = builder, address, {}

    def _bytes(self, i):
        return _load(self.b, self.b.add(self.address, ir.Constant(I64, LANES * i)), V8, 1)

    def once(self, key, make):
        if key not in self.seen:
            self.seen[key] = make()
        return self.seen[key]

    def forget(self):
        """Load bytes again: values kept too long only travel to memory and back."""
        self.seen = {key: x for key, x in self.seen.items() if key[0] != "u8"}

    def u8(self, i):
        """Byte i, 0 .. 255."""
        return self.once(("u8", i), lambda: self.b.zext(self._bytes(i), VI))

    def i8(self, i):
        """Byte i as a float, -128 .. 127."""
        return self.b.sitofp(self.b.sext(self._bytes(i), VI), VF)

    def f16(self, i):
        """The half at bytes i, i + 1, by integer arithmetic: the conversion instruction is slow for the subnormal
        scales that K-quants are full of."""

        def make():
            b = self.b
            word = b.or_(b.zext(self._bytes(i), VI), b.shl(b.zext(self._bytes(i + 1), VI), _c(8)))
            size = b.and_(word, _c(0x7FFF))
            normal = b.bitcast(b.add(b.shl(size, _c(13)), _c(112 << 23)), VF)
            subnormal = b.fmul(b.sitofp(size, VF), _c(2.0**-24))
            value = b.select(b.icmp_signed("<", size, _c(0x400)), subnormal, normal)
            sign = b.shl(b.and_(word, _c(0x8000)), _c(16))
            return b.bitcast(b.or_(b.bitcast(value, VI), sign), VF)

        return self.once(("f16", i), make)

    def bits(self, x, first, n, to):
        """n bits of x from bit `first` on, moved to bit `to`."""
        if to > first:
            x = self.b.shl(x, _c(to - first))
        elif first > to:
            x = self.b.lshr(x, _c(first - to))
        return self.b.and_(x, _c(((1 << n) - 1) << to))

    def raw(self, n, *pieces):
        """1 + q / 2**n, q put together from (byte, first bit, bits) from its low bits on."""
        word, at = _c(0x3F800000), 23 - n
        for i, first, width in pieces:
            word = self.b.or_(word, self.bits(self.u8(i), first, width, at))
            at += width
        return self.b.bitcast(word, VF)

    def number(self, *pieces):
        """An integer put together in the same way, as a float."""
        word, at = _c(0), 0
        for i, first, width in pieces:
            word = self.b.or_(word, self.bits(self.u8(i), first, width, at))
            at += width
        return self.b.sitofp(word, VF)

    def mul(self, x, y):
        return self.b.fmul(x, _c(y) if isinstance(y, float) else y)

    def sub(self, x, y):
        return self.b.fsub(x, _c(y) if isinstance(y, float) else y)

    def neg(self, x):
        return self.b.fmul(x, _c(-1.0))


@dataclass(frozen=True)
class Row:
    """`raw(block, k)`: value k before scaling. `affine(block, s)`: scale and shift (None: 0) of sub-block s of `sub`
    values.

    `together`: sub-blocks whose values share bytes, so that they are worked on side by side.
    """

    sub: int
    raw: Callable
    affine: Callable
    together: tuple[tuple[int, ...], ...] = ((0,),)


def _symmetric(at, n):
    """d (q - 2**(n - 1)) = d 2**n (raw - 1.5)."""

    def affine(e, _s):
        scale = e.once("scale", lambda: e.mul(e.f16(at), float(1 << n)))
        return scale, e.once("shift", lambda: e.mul(scale, -1.5))

    return affine


def _with_min(n):
    """d q + m = d 2**n raw + (m - d 2**n)."""

    def affine(e, _s):
        scale = e.once("scale", lambda: e.mul(e.f16(0), float(1 << n)))
        return scale, e.once("shift", lambda: e.sub(e.f16(2), scale))

    return affine


def _six_bits(n):
    """d scale q - dmin min; scales and minima as packed by Q4_K and Q5_K in bytes 4 .. 15."""

    def affine(e, s):
        if s < 4:
            scale, low = e.number((4 + s, 0, 6)), e.number((8 + s, 0, 6))
        else:
            scale, low = e.number((8 + s, 0, 4), (s, 6, 2)), e.number((8 + s, 4, 4), (4 + s, 6, 2))
        scale = e.mul(e.mul(e.f16(0), float(1 << n)), scale)
        return scale, e.neg(e.b.fadd(e.mul(e.f16(2), low), scale))

    return affine


def _q6_affine(e, s):
    scale = e.mul(e.mul(e.f16(208), 64.0), e.i8(192 + s))
    return scale, e.mul(scale, -1.5)


def _q2_affine(e, s):
    scale = e.mul(e.mul(e.f16(80), 4.0), e.number((s, 0, 4)))
    return scale, e.neg(e.b.fadd(e.mul(e.f16(82), e.number((s, 4, 4))), scale))


def _q3_affine(e, s):
    """Six-bit scales less 32: low four bits in halves of bytes 96 .. 103, top two in bytes 104 .. 107."""
    scale = e.number((96 + s % 8, 4 * (s // 8), 4), (104 + s % 4, 2 * (s // 4), 2))
    scale = e.mul(e.mul(e.f16(108), 8.0), e.sub(scale, 32.0))
    return scale, e.mul(scale, -1.5)


PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
QUARTERS = ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))

ROWS: dict[QType, Row] = {
    QType.Q8_0: Row(32, lambda e, k: e.i8(2 + k), lambda e, s: (e.f16(0), None)),
    QType.Q4_0: Row(32, lambda e, k: e.raw(4, (2 + k % 16, k // 16 * 4, 4)), _symmetric(0, 4)),
    QType.Q4_1: Row(32, lambda e, k: e.raw(4, (4 + k % 16, k // 16 * 4, 4)), _with_min(4)),
    QType.Q5_0: Row(32, lambda e, k: e.raw(5, (6 + k % 16, k // 16 * 4, 4), (2 + k // 8, k % 8, 1)), _symmetric(0, 5)),
    QType.Q5_1: Row(32, lambda e, k: e.raw(5, (8 + k % 16, k // 16 * 4, 4), (4 + k // 8, k % 8, 1)), _with_min(5)),
    QType.Q2_K: Row(16, lambda e, k: e.raw(2, (16 + k // 128 * 32 + k % 32, k % 128 // 32 * 2, 2)), _q2_affine, QUARTERS),  # noqa: E501
    QType.Q3_K: Row(16, lambda e, k: e.raw(3, (32 + k // 128 * 32 + k % 32, k % 128 // 32 * 2, 2), (k % 32, k // 32, 1)),  # noqa: E501
                    _q3_affine, QUARTERS),
    QType.Q4_K: Row(32, lambda e, k: e.raw(4, (16 + k // 64 * 32 + k % 32, k // 32 % 2 * 4, 4)), _six_bits(4), PAIRS),
    QType.Q5_K: Row(32, lambda e, k: e.raw(5, (48 + k // 64 * 32 + k % 32, k // 32 % 2 * 4, 4), (16 + k % 32, k // 32, 1)),  # noqa: E501
                    _six_bits(5), PAIRS),
    QType.Q6_K: Row(16, lambda e, k: e.raw(6, (k // 128 * 64 + k % 64, k % 128 // 64 * 4, 4),
                                           (128 + k // 128 * 32 + k % 32, k % 128 // 32 * 2, 2)), _q6_affine, QUARTERS),
}  # fmt: skip


def _inside(sub, alone):
    """Places in a sub-block in the order of work: two by two, and where it stands alone k and k + 16 (of one byte)
    together."""
    return [k for j in range(0, 16, 2) for k in (j, j + 1, j + 16, j + 17)] if alone and sub == 32 else list(range(sub))


@intrinsic(prefer_literal=True)
def lanes_dot(typingctx, t, block, x, sums, total):
    """total + (one block of sixteen rows) times x: f32 values at x, at `sums` the sum of every 16 of them."""
    row, n = ROWS[QType(t.literal_value)], BLOCKS[QType(t.literal_value)].elements

    def codegen(context, b, sig, args):
        _, block, x, sums, total = args
        e = Block(b, block)
        fma = _fn(b, "llvm.fma.v16f32", VF, VF, VF, VF)

        def at(address, i):
            return _load(b, b.add(address, ir.Constant(I64, 4 * i)), F32, 4)

        # Large blocks are read in an order that no hardware foresees: ask for later bytes, one line at a time.
        lines = range(0, LANES * BLOCKS[QType(t.literal_value)].nbytes, 64)
        done = 0
        for group in row.together:
            parts = {s: [_c(0.0)] * (4 // len(group)) for s in group}  # independent sums: a product takes four cycles
            for i, place in enumerate(_inside(row.sub, len(group) == 1)):
                for s in group:
                    for line in lines[done * len(lines) // n : (done + 1) * len(lines) // n]:
                        fetch_ahead(b, b.add(block, ir.Constant(I64, AHEAD + line)))
                    done += 1
                    k, part = s * row.sub + place, i % len(parts[s])
                    parts[s][part] = b.call(fma, [row.raw(e, k), _splat(b, at(x, k), VF), parts[s][part]])
            e.forget()
            for s in group:
                scale, shift = row.affine(e, s)
                part = parts[s][0]
                for other in parts[s][1:]:
                    part = b.fadd(part, other)
                total = b.call(fma, [part, scale, total])
                if shift is not None:
                    first = s * row.sub // 16
                    whole = at(sums, first) if row.sub == 16 else b.fadd(at(sums, first), at(sums, first + 1))
                    total = b.call(fma, [shift, _splat(b, whole, VF), total])
        return total

    return f32x16(t, i64, i64, i64, f32x16), codegen


@intrinsic(prefer_literal=True)
def lanes_decode(typingctx, t, pairs, block, out, step):
    """One block of sixteen rows decoded: value k at out + k * step, f32; pairs 1: values k, k + 1 as bf16 at out + k
    / 2 * step."""
    row = ROWS[QType(t.literal_value)]
    as_pairs = bool(pairs.literal_value)

    def codegen(context, b, sig, args):
        _, _, block, out, step = args
        e = Block(b, block)
        fma = _fn(b, "llvm.fma.v16f32", VF, VF, VF, VF)
        low = {}
        for group in row.together:
            affine = {s: row.affine(e, s) for s in group}
            for place in _inside(row.sub, len(group) == 1):
                for s in group:
                    k = s * row.sub + place
                    raw, (scale, shift) = row.raw(e, k), affine[s]
                    value = b.fmul(raw, scale) if shift is None else b.call(fma, [raw, scale, shift])
                    if not as_pairs:
                        _store(b, b.add(out, b.mul(step, ir.Constant(I64, k))), value, 4)
                        continue
                    # To the nearest bf16; ties go up, which the random bits below do not notice.
                    word = b.add(b.bitcast(value, VI), _c(0x8000))
                    if k % 2 == 0:
                        low[s] = b.lshr(word, _c(16))
                    else:
                        pair = b.or_(b.and_(word, _c(0xFFFF0000)), low[s])
                        _store(b, b.add(out, b.mul(step, ir.Constant(I64, k // 2))), pair, 4)
            e.forget()
        return context.get_dummy_value()

    return void(t, pairs, i64, i64, i64), codegen


def interleave(rows: np.ndarray) -> np.ndarray:
    """Rows of blocks, u8 (n, bytes of a row), as u8 (ceil(n / 16), bytes of a row, 16); missing rows are zero."""
    n, width = rows.shape
    groups = -(-n // LANES)
    if n % LANES:
        rows = np.concatenate([rows, np.zeros((groups * LANES - n, width), np.uint8)])
    return rows.reshape(groups, LANES, width).transpose(0, 2, 1)

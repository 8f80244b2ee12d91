# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Block types on the CPU: sixteen weight rows at a time, a lane a row. One table row per type.

At load the blocks of sixteen rows are interleaved by words of 32 bits (`interleave`): word i of the sixteen blocks lies
together, in one vector. A block whose size is no multiple of four has one half (its scale d) beside its words; the
halves follow behind the words of all blocks:

    group g: (blocks of a row, words of a block, 16) u32, (blocks of a row, 16) u16 where there is a half

So one load gives four bytes of sixteen rows, whatever the type, scales included, and a product needs no sum across
lanes and no scalar work. Every value is d * scale * (q - zero) + m * low, with q put together from bits of the block's
bytes. `Block` gives q in two forms:

* `raw`: 1 + q / 2**n as a float, by moving the bits to the top of a mantissa: products with float32 activations.
* `quad`: four neighbouring q as the bytes of a word: integer products with activations in bytes.

`ROWS` below is a table of Python functions that emit LLVM; kernels_cpu_lanes_dot.py holds the products, with the loops
over a block unrolled.

Source of truth for the blocks: ggml-common.h and ggml-quants.c of llama.cpp (byte tables in kernels_cpu_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from ..quant.types import BLOCKS, QType
from .simd import I16, I64, LANES, VF, VI, _load

LINE = 64  # groups begin at cache lines


def _c(x):
    return ir.Constant(VI, [x] * LANES) if isinstance(x, int) else ir.Constant(VF, [x] * LANES)


@dataclass(frozen=True)
class Row:
    """How the values of a block are stored: value k is d * scale(k // sub) * (q - zero) + m * low(k // sub).

    `pieces(k)`: (byte, first bit, bits) of q from its low bits on; bytes and offsets count as in the file. `d`, `m`:
    offsets of halves (m None: there is no shift), `sign` of m. `scale(block, s)`, `low(block, s)`: factors of sub-block
    s as floats, None: 1. `signed`: q is a signed byte. `together`: sub-blocks whose values share bytes, so that they
    are worked on side by side.
    """

    sub: int
    bits: int
    pieces: Callable
    zero: int = 0
    d: int = 0
    m: int | None = None
    sign: float = 1.0
    scale: Callable | None = None
    low: Callable | None = None
    signed: bool = False
    together: tuple[tuple[int, ...], ...] = ((0,),)


def _six_bits(at):
    """Six-bit numbers of Q4_K and Q5_K: 0-3 whole in the bytes from `at` on, 4-7 in halves of bytes 12 .. 15 and the
    top two bits of the first ones."""
    half = 0 if at == 4 else 4

    def number(e, s):
        return e.number((at + s, 0, 6)) if s < 4 else e.number((8 + s, half, 4), (at + s - 4, 6, 2))

    return number


def _q3_scale(e, s):
    """Six bits less 32: low four in halves of bytes 96 .. 103, top two in bytes 104 .. 107."""
    return e.b.fsub(e.number((96 + s % 8, 4 * (s // 8), 4), (104 + s % 4, 2 * (s // 4), 2)), _c(32.0))


PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
QUARTERS = ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))

ROWS: dict[QType, Row] = {
    QType.Q8_0: Row(32, 8, lambda k: ((2 + k, 0, 8),), signed=True),
    QType.Q4_0: Row(32, 4, lambda k: ((2 + k % 16, k // 16 * 4, 4),), zero=8),
    QType.Q4_1: Row(32, 4, lambda k: ((4 + k % 16, k // 16 * 4, 4),), m=2),
    QType.Q5_0: Row(32, 5, lambda k: ((6 + k % 16, k // 16 * 4, 4), (2 + k // 8, k % 8, 1)), zero=16),
    QType.Q5_1: Row(32, 5, lambda k: ((8 + k % 16, k // 16 * 4, 4), (4 + k // 8, k % 8, 1)), m=2),
    QType.Q2_K: Row(16, 2, lambda k: ((16 + k // 128 * 32 + k % 32, k % 128 // 32 * 2, 2),), d=80, m=82, sign=-1.0,
                    scale=lambda e, s: e.number((s, 0, 4)), low=lambda e, s: e.number((s, 4, 4)), together=QUARTERS),
    QType.Q3_K: Row(16, 3, lambda k: ((32 + k // 128 * 32 + k % 32, k % 128 // 32 * 2, 2), (k % 32, k // 32, 1)), zero=4,  # noqa: E501
                    d=108, scale=_q3_scale, together=QUARTERS),
    QType.Q4_K: Row(32, 4, lambda k: ((16 + k // 64 * 32 + k % 32, k // 32 % 2 * 4, 4),), m=2, sign=-1.0,
                    scale=_six_bits(4), low=_six_bits(8), together=PAIRS),
    QType.Q5_K: Row(32, 5, lambda k: ((48 + k // 64 * 32 + k % 32, k // 32 % 2 * 4, 4), (16 + k % 32, k // 32, 1)), m=2,
                    sign=-1.0, scale=_six_bits(4), low=_six_bits(8), together=PAIRS),
    QType.Q6_K: Row(16, 6, lambda k: ((k // 128 * 64 + k % 64, k % 128 // 64 * 4, 4),
                                      (128 + k // 128 * 32 + k % 32, k % 128 // 32 * 2, 2)), zero=32, d=208,
                    scale=lambda e, s: e.i8(192 + s), together=QUARTERS),
}  # fmt: skip


def words_bytes(type: QType) -> int:
    """Bytes of a block that are whole words."""
    return BLOCKS[type].nbytes // 4 * 4


class Block:
    """Sixteen interleaved blocks: fields as vectors, each loaded once."""

    def __init__(self, builder, type, words, halves):
        self.b, self.words, self.halves, self.seen = builder, words, halves, {}
        self.row = ROWS[type]
        self.odd = self.row.d if BLOCKS[type].nbytes % 4 else None  # where the half lay that no word holds

    def once(self, key, make):
        if key not in self.seen:
            self.seen[key] = make()
        return self.seen[key]

    def forget(self):
        """Load words again: values kept too long only travel to memory and back."""
        self.seen = {key: x for key, x in self.seen.items() if key[0] != "word"}

    def word(self, i):
        """Word i of the block."""

        def make():
            return _load(self.b, self.b.add(self.words, ir.Constant(I64, 4 * LANES * i)), VI, 4)

        return self.once(("word", i), make)

    def place(self, i):
        """The word that byte i of a block went to, and its first bit there."""
        if self.odd is not None and i > self.odd:
            i -= 2
        return self.word(i // 4), 8 * (i % 4)

    def shifted(self, x, by):
        """Left by so many bits, or right where that is negative."""
        return self.b.shl(x, _c(by)) if by > 0 else self.b.lshr(x, _c(-by)) if by else x

    def bits(self, i, first, n, to):
        """n bits of byte i from bit `first` on, moved to bit `to` of the word."""
        word, at = self.place(i)
        return self.b.and_(self.shifted(word, to - at - first), _c(((1 << n) - 1) << to))

    def i8(self, i):
        """Byte i as a float, -128 .. 127."""
        word, at = self.place(i)
        return self.b.sitofp(self.b.ashr(self.shifted(word, 24 - at), _c(24)), VF)

    def f16(self, i):
        """The half at bytes i, i + 1, by integer arithmetic: the conversion instruction is slow for the subnormal
        scales that K-quants are full of."""

        def make():
            b = self.b
            if i == self.odd:
                word = b.zext(_load(b, self.halves, ir.VectorType(I16, LANES), 2), VI)
            else:
                word, at = self.place(i)
                word = self.shifted(word, -at)
            size = b.and_(word, _c(0x7FFF))
            normal = b.bitcast(b.add(b.shl(size, _c(13)), _c(112 << 23)), VF)
            subnormal = b.fmul(b.sitofp(size, VF), _c(2.0**-24))
            value = b.select(b.icmp_signed("<", size, _c(0x400)), subnormal, normal)
            sign = b.shl(b.and_(word, _c(0x8000)), _c(16))
            return b.bitcast(b.or_(b.bitcast(value, VI), sign), VF)

        return self.once(("f16", i), make)

    def number(self, *pieces):
        """An integer put together from (byte, first bit, bits), as a float."""
        word, at = _c(0), 0
        for i, first, width in pieces:
            word = self.b.or_(word, self.bits(i, first, width, at))
            at += width
        return self.b.sitofp(word, VF)

    def raw(self, k):
        """1 + q / 2**bits of value k; q itself where bytes are signed."""
        pieces = self.row.pieces(k)
        if self.row.signed:
            return self.i8(pieces[0][0])
        word, at = _c(0x3F800000), 23 - self.row.bits
        for i, first, width in pieces:
            word = self.b.or_(word, self.bits(i, first, width, at))
            at += width
        return self.b.bitcast(word, VF)

    def affine(self, s):
        """(scale, shift) of sub-block s: a value is scale * raw + shift; shift None is 0."""
        b, row = self.b, self.row
        if row.signed:
            return self.f16(row.d), None
        scale = self.once(("d",), lambda: b.fmul(self.f16(row.d), _c(float(1 << row.bits))))
        if row.scale is not None:
            scale = b.fmul(scale, row.scale(self, s))
        shift = b.fmul(scale, _c(-1.0 - row.zero / (1 << row.bits)))
        if row.m is not None:
            low = self.f16(row.m) if row.low is None else b.fmul(self.f16(row.m), row.low(self, s))
            shift = (b.fadd if row.sign > 0 else b.fsub)(shift, low)
        return scale, shift

    def quad(self, k):
        """q of values k .. k + 3 (k a multiple of four) as the bytes of a word."""
        total, at, after = None, 0, self.row.pieces(k + 1)
        for (i, first, width), (j, _, _) in zip(self.row.pieces(k), after, strict=True):
            word, shift = self.place(i)
            if i == j:  # four neighbouring bits: copies of them 7 bits apart have one in each byte
                four = self.b.and_(self.shifted(word, -shift - first), _c(15))
                spread = self.b.and_(self.b.mul(four, _c(0x00204081)), _c(0x01010101))
                part = self.shifted(spread, at)
            else:
                mask = (((1 << width) - 1) << at) * 0x01010101
                part = word if width == 8 else self.b.and_(self.shifted(word, at - first), _c(mask))
            total = part if total is None else self.b.or_(total, part)
            at += width
        return total


def group_bytes(type: QType, width: int) -> int:
    """Bytes of sixteen interleaved rows of `width` bytes, up to a whole cache line."""
    return -(-LANES * width // LINE) * LINE


def interleave(rows: np.ndarray, type: QType, out: np.ndarray) -> None:
    """Rows of blocks, u8 (n, bytes of a row), into out u8 (ceil(n / 16), group_bytes); missing rows are zero."""
    n, width = rows.shape
    groups = -(-n // LANES)
    if n % LANES:
        rows = np.concatenate([rows, np.zeros((groups * LANES - n, width), np.uint8)])
    size, whole = BLOCKS[type].nbytes, words_bytes(type)
    blocks = rows.reshape(groups, LANES, width // size, size)
    words = out[:, : LANES * width // size * whole].view(np.uint32).reshape(groups, width // size, whole // 4, LANES)
    at = ROWS[type].d if size != whole else size
    for lo, hi, to in ((0, at, 0), (at + size - whole, size, at // 4)):  # words before the half, and behind
        if hi > lo:
            words[:, :, to : to + (hi - lo) // 4] = _units(blocks[..., lo:hi], np.uint32)
    if size != whole:
        halves = out[:, words.nbytes // groups : words.nbytes // groups + 2 * LANES * width // size]
        halves.view(np.uint16).reshape(groups, width // size, 1, LANES)[:] = _units(blocks[..., at : at + 2], np.uint16)


def _units(part, unit):
    """u8 (groups, 16, blocks, bytes) as units (groups, blocks, units, 16)."""
    return np.ascontiguousarray(part).view(unit).transpose(0, 2, 3, 1)

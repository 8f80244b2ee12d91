# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Block types on the CPU: sixteen weight rows at a time, a lane a row. One table row per type.

At load the blocks of sixteen rows are interleaved by words of 32 bits (`interleave`): word i of the sixteen blocks lies
together, in one vector, and the words lie as they are needed. A block whose size is no multiple of four has one half
(its scale d) beside its words; the halves of two blocks lie in one cache line before them:

    group g: (blocks of a row, words of a block, 16) u32, before every two blocks (2, 16) u16 where there are halves

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
from functools import cache

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


def odd_half(type: QType) -> int | None:
    """Where the half lies that no word holds."""
    return ROWS[type].d if BLOCKS[type].nbytes % 4 else None


def word_of(type: QType, i: int) -> tuple[int, int]:
    """The word of byte i among those of a block as stored, and its first bit there."""
    odd = odd_half(type)
    i -= 2 if odd is not None and i > odd else 0
    return i // 4, 8 * (i % 4)


@cache
def order(type: QType) -> tuple[int, ...]:
    """Words of a block as they are needed, scales before all q: read in another order than they lie in, large blocks
    come from memory at a third of its speed."""
    row = ROWS[type]
    places = [s * row.sub + at for group in row.together for s in group for at in range(0, row.sub, 4)]
    needed = list(dict.fromkeys(word_of(type, i)[0] for k in places for i, _, _ in row.pieces(k)))
    return (*(i for i in range(words_bytes(type) // 4) if i not in needed), *needed)


class Block:
    """Sixteen interleaved blocks: fields as vectors, each loaded once."""

    def __init__(self, builder, type, words, halves):
        self.b, self.words, self.halves, self.seen = builder, words, halves, {}
        self.type, self.row, self.odd = type, ROWS[type], odd_half(type)
        self.order = order(type)

    def once(self, key, make):
        if key not in self.seen:
            self.seen[key] = make()
        return self.seen[key]

    def forget(self):
        """Load words again: values kept too long only travel to memory and back. LLVM would still keep them, if it
        knew that the address is the same."""
        self.seen = {key: x for key, x in self.seen.items() if key[0] != "word"}
        same = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0", side_effect=True)
        self.words = self.b.call(same, [self.words])

    def place(self, i):
        """The word that byte i of a block went to, and its first bit there."""
        word, at = word_of(self.type, i)

        def make():
            to = 4 * LANES * self.order.index(word)
            return _load(self.b, self.b.add(self.words, ir.Constant(I64, to)), VI, 4)

        return self.once(("word", word), make), at

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
    """Bytes of sixteen interleaved rows of `width` bytes."""
    n = width // BLOCKS[type].nbytes
    return n * LANES * words_bytes(type) + (0 if odd_half(type) is None else -(-n // 2) * LINE)


def block_at(type: QType) -> Callable:
    """The function (t, group, i) -> addresses of words and halves of block i of a group; t and the rest are int64."""
    size, line = LANES * words_bytes(type), 0 if odd_half(type) is None else LINE

    def where(t, group, i):
        pair = group + (i >> 1) * (line + 2 * size)
        return pair + line + (i & 1) * size, pair + (i & 1) * 32

    return where


def interleave(rows: np.ndarray, type: QType, out: np.ndarray) -> None:
    """Rows of blocks, u8 (n, bytes of a row), into out u8 (ceil(n / 16), group_bytes); missing rows are zero."""
    n, width = rows.shape
    groups, size, odd, where = -(-n // LANES), BLOCKS[type].nbytes, odd_half(type), block_at(type)
    if n % LANES:
        rows = np.concatenate([rows, np.zeros((groups * LANES - n, width), np.uint8)])
    for i in range(width // size):
        block = rows.reshape(groups, LANES, width)[..., i * size : (i + 1) * size]
        words, halves = where(0, 0, i)
        if odd is not None:
            half = block[..., odd : odd + 2]
            out[:, halves : halves + 2 * LANES].reshape(groups, LANES, 2)[:] = half
            block = np.concatenate([block[..., :odd], block[..., odd + 2 :]], -1)
        units = np.ascontiguousarray(block).view(np.uint32)[..., list(order(type))]
        target = out[:, words : words + LANES * words_bytes(type)].view(np.uint32)
        target.reshape(groups, -1, LANES)[:] = units.transpose(0, 2, 1)

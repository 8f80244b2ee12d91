# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Products with interleaved blocks, one block of sixteen rows at a time: exact, in integers, and decoding.

Exact: per sub-block the sum of raw * x is multiplied by the scale, and the shift by the sum of x, known beforehand.

In integers: activations are rounded once per row to 255 high + low, two signed bytes, with a scale for each block: some
fifteen bits. Products of bytes add up without error; only scales are floats. A CPU that has no instruction for it
computes exactly instead (`has_byte_dot`):

| instruction | sixteen rows times four values |
|---|---|
| AVX512-VNNI vpdpbusd | one for high, one for low |
| AVX2 vpmaddubsw | two for each, sums of 16 bits that are widened before they can overflow |
"""

from __future__ import annotations

from itertools import chain

from llvmlite import ir
from numba.extending import intrinsic, overload

from ..quant.types import BLOCKS, QType
from .kernels_cpu_lanes import ROWS, Block, _c, block_at, words_bytes
from .simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    _fn,
    _load,
    _splat,
    _store,
    emit_fma,
    f32,
    f32x16,
    features,
    i64,
    void,
)
from .simd_memory import fetch_ahead

AHEAD = 6144  # bytes of weights asked for before they are needed
HIGH = 255  # a rounded activation is HIGH * high + low
B32, W16, D8 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)


def has_byte_dot() -> bool:
    """Whether `lanes_dot_bytes` exists on this CPU."""
    return not features().isdisjoint(("avx512vnni", "avx2"))


def _inside(sub, alone):
    """Places in a sub-block in the order of work: two by two, and where it stands alone k and k + 16 (of one byte)
    together."""
    return [k for j in range(0, 16, 2) for k in (j, j + 1, j + 16, j + 17)] if alone and sub == 32 else list(range(sub))


class Ahead:
    """Large blocks are read in an order that no hardware foresees: ask for later bytes, one line at a time."""

    def __init__(self, b, type, block, steps):
        self.b, self.block, self.steps, self.done = b, block, steps, 0
        self.lines = range(0, LANES * words_bytes(type), 64)

    def step(self):
        n = len(self.lines)
        for line in self.lines[self.done * n // self.steps : (self.done + 1) * n // self.steps]:
            fetch_ahead(self.b, self.b.add(self.block, ir.Constant(I64, AHEAD + line)))
        self.done += 1


def _at(b, address, i, type=F32):
    return _load(b, b.add(address, ir.Constant(I64, 4 * i)), type, 4)


def _sum_of(b, sums, row, s):
    """The sum of sub-block s's x, from sums of sixteen, in all lanes."""
    first = s * row.sub // 16
    whole = _at(b, sums, first) if row.sub == 16 else b.fadd(_at(b, sums, first), _at(b, sums, first + 1))
    return _splat(b, whole, VF)


def find_block(t, group, i):
    """Addresses of words and halves of block i of a group of type t."""


@overload(find_block, prefer_literal=True)
def _find_block(t, group, i):
    return block_at(QType(t.literal_value))


@intrinsic(prefer_literal=True)
def lanes_dot(typingctx, t, block, halves, x, sums, total):
    """total + (one block of sixteen rows) times x: f32 values at x, at `sums` the sum of every 16 of them."""
    type = QType(t.literal_value)
    row, n = ROWS[type], BLOCKS[type].elements

    def codegen(context, b, sig, args):
        _, block, halves, x, sums, total = args
        e, ahead = Block(b, type, block, halves), Ahead(b, type, block, n)
        for group in row.together:
            parts = {s: [_c(0.0)] * (4 // len(group)) for s in group}  # independent sums: a product takes four cycles
            for i, place in enumerate(_inside(row.sub, len(group) == 1)):
                for s in group:
                    ahead.step()
                    k, part = s * row.sub + place, i % len(parts[s])
                    parts[s][part] = emit_fma(b, e.raw(k), _splat(b, _at(b, x, k), VF), parts[s][part])
            e.forget()
            for s in group:
                scale, shift = e.affine(s)
                part = parts[s][0]
                for other in parts[s][1:]:
                    part = b.fadd(part, other)
                total = emit_fma(b, part, scale, total)
                if shift is not None:
                    total = emit_fma(b, shift, _sum_of(b, sums, row, s), total)
        return total

    return f32x16(t, i64, i64, i64, i64, f32x16), codegen


class _Vnni:
    """Sums of products of bytes in 32 bits, by one instruction for four."""

    def __init__(self, b, row):
        self.b, self.flip = b, row.signed
        self.zero = 128 if row.signed else row.zero
        self.sums = [_c(0), _c(0)]

    def add(self, q, x):
        """Sixteen rows' four q times four high and four low parts."""
        b = self.b
        dot = _fn(b, "llvm.x86.avx512.vpdpbusd.512", VI, VI, VI, VI)
        q = b.xor(q, _c(-0x7F7F7F80)) if self.flip else q  # signed bytes as 0 .. 255
        self.sums = [b.call(dot, [p, q, _splat(b, one, VI)]) for p, one in zip(self.sums, x, strict=True)]

    def take(self):
        """The sums of high and low products as floats; begins anew."""
        sums, self.sums = self.sums, [_c(0), _c(0)]
        return [self.b.sitofp(p, VF) for p in sums]


class _Madd:
    """The same in halves of eight rows: pairs of products in 16 bits, added up there as long as they surely fit."""

    def __init__(self, b, row):
        self.b, self.zero, self.signed = b, row.zero, row.signed
        largest = 128 if row.signed else (1 << row.bits) - 1
        self.room = 32767 // (2 * 127 * largest)  # pairs of products
        self.sums, self.narrow, self.count = [], [], 0

    def add(self, q, x):
        b = self.b
        madd = _fn(b, "llvm.x86.avx2.pmadd.ub.sw", W16, B32, B32)
        sign, size = _fn(b, "llvm.x86.avx2.psign.b", B32, B32, B32), _fn(b, "llvm.abs.v32i8", B32, B32, ir.IntType(1))
        new = []
        for h in range(2):
            mask = ir.Constant(D8, [8 * h + i for i in range(8)])
            w = b.bitcast(b.shuffle_vector(q, q, mask), B32)
            w_size = b.call(size, [w, ir.Constant(ir.IntType(1), 0)]) if self.signed else w
            for one in x:
                y = b.insert_element(ir.Constant(D8, ir.Undefined), one, ir.Constant(I32, 0))
                y = b.bitcast(b.shuffle_vector(y, y, ir.Constant(D8, [0] * 8)), B32)
                y = b.call(sign, [y, w]) if self.signed else y
                new.append(b.call(madd, [w_size, y]))
        self.narrow = [b.add(p, y) for p, y in zip(self.narrow, new, strict=True)] if self.narrow else new
        self.count += 1
        if self.count == self.room:
            self._widen()

    def _widen(self):
        b = self.b
        wide = _fn(b, "llvm.x86.avx2.pmadd.wd", D8, W16, W16)
        new = [b.call(wide, [p, ir.Constant(W16, [1] * 16)]) for p in self.narrow]
        if new:
            self.sums = [b.add(p, y) for p, y in zip(self.sums, new, strict=True)] if self.sums else new
        self.narrow, self.count = [], 0

    def take(self):
        self._widen()
        both, sums = ir.Constant(VI, list(range(16))), self.sums
        self.sums = []
        return [self.b.sitofp(self.b.shuffle_vector(sums[i], sums[2 + i], both), VF) for i in range(2)]


@intrinsic(prefer_literal=True)
def lanes_dot_bytes(typingctx, t, block, halves, high, low, sums, scale, total):
    """total + (one block of sixteen rows) times rounded activations: signed bytes at `high` and `low`, f32 sums of
    every 16 of HIGH * high + low at `sums`, and what one unit is worth in `scale`."""
    type = QType(t.literal_value)
    row, n = ROWS[type], BLOCKS[type].elements

    def codegen(context, b, sig, args):
        _, block, halves, high, low, sums, worth, total = args
        e, ahead = Block(b, type, block, halves), Ahead(b, type, block, n // 4)
        products = (_Vnni if "avx512vnni" in features() else _Madd)(b, row)
        worth = _splat(b, worth, VF)
        whole, shifts = _c(0.0), _c(0.0)
        for s in chain(*row.together):  # one after another: the sums of more would not stay in registers
            for k in range(s * row.sub, (s + 1) * row.sub, 4):
                ahead.step()
                x = [_load(b, b.add(a, ir.Constant(I64, k)), I32, 4) for a in (high, low)]
                products.add(e.quad(k), x)
            p, q = products.take()
            part = emit_fma(b, p, _c(float(HIGH)), q)
            of_x = _sum_of(b, sums, row, s)
            if products.zero:
                part = emit_fma(b, of_x, _c(-float(products.zero)), part)
            whole = b.fadd(whole, part) if row.scale is None else emit_fma(b, part, row.scale(e, s), whole)
            if row.m is not None:
                shifts = of_x if row.low is None else emit_fma(b, of_x, row.low(e, s), shifts)
            e.forget()
        total = emit_fma(b, b.fmul(e.f16(row.d), worth), whole, total)
        if row.m is not None:
            total = emit_fma(b, b.fmul(e.f16(row.m), b.fmul(worth, _c(row.sign))), shifts, total)
        return total

    return f32x16(t, i64, i64, i64, i64, i64, f32, f32x16), codegen


@intrinsic(prefer_literal=True)
def lanes_decode(typingctx, t, pairs, block, halves, out, step):
    """One block of sixteen rows decoded: value k at out + k * step, f32; pairs 1: values k, k + 1 as bf16 at out + k
    / 2 * step."""
    type = QType(t.literal_value)
    row = ROWS[type]
    as_pairs = bool(pairs.literal_value)

    def codegen(context, b, sig, args):
        _, _, block, halves, out, step = args
        e = Block(b, type, block, halves)
        low = {}
        for group in row.together:
            affine = {s: e.affine(s) for s in group}
            for place in _inside(row.sub, len(group) == 1):
                for s in group:
                    k = s * row.sub + place
                    raw, (scale, shift) = e.raw(k), affine[s]
                    value = b.fmul(raw, scale) if shift is None else emit_fma(b, raw, scale, shift)
                    if not as_pairs:
                        _store(b, b.add(out, b.mul(step, ir.Constant(I64, k))), value, 4)
                        continue
                    # To the nearest bf16; ties go up, which the random bits below do not notice.
                    word = b.add(b.bitcast(value, VI), _c(0x8000))
                    if k % 2 == 0:
                        low[s] = b.lshr(word, _c(16))
                    else:
                        pair = b.or_(b.and_(word, _c(-0x10000)), low[s])
                        _store(b, b.add(out, b.mul(step, ir.Constant(I64, k // 2))), pair, 4)
            e.forget()
        return context.get_dummy_value()

    return void(t, pairs, i64, i64, i64, i64), codegen

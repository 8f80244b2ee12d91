"""Decoders of the halves, the 32-element blocks and the K-quants: LLVM IR, compiled when first used (no numba).

The layouts are those of encode_kernels.py and encode_kernels_k.py. Each value is scale times level, minus or plus an
offset, with every product and sum rounded once, as the decoders of ggml and of the `gguf` package do.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from .encode_kernels import unit
from .lanes import F32, I8, I16, I32, I64, Code, Lanes, N, address, from_half, loop, store
from .types import BLOCKS, QType


class Block:
    """One block in memory, read by offsets in bytes."""

    def __init__(self, b, at):
        self.b, self.at = b, at

    def half(self, offset):
        """A half as a float."""
        return from_half(self.one(offset, I16))

    def one(self, offset, type=I8, signed=False):
        """An integer of a type, as a scalar."""
        pointer = self.b.bitcast(address(self.b, self.at, offset), type.as_pointer())
        value = self.b.load(pointer, align=1, typ=type)
        if type.width < I32.width:
            value = (self.b.sext if signed else self.b.zext)(value, I32)
        return Lanes(self.b, value)

    def many(self, offset, type=I8, signed=False):
        """16 integers of a type that follow each other."""
        pointer = self.b.bitcast(address(self.b, self.at, offset), ir.VectorType(type, N).as_pointer())
        value = self.b.load(pointer, align=1, typ=ir.VectorType(type, N))
        return Lanes(self.b, (self.b.sext if signed else self.b.zext)(value, ir.VectorType(I32, N)))


def f16(block):
    """IEEE halves."""
    return [from_half(block.many(0, I16))]


def bf16(block):
    """Upper halves of float32."""
    return [(block.many(0, I16) << 16).from_bits()]


def q8_0(block):
    """Bytes under one scale."""
    return [block.many(2 + N * k, signed=True).to_float() * block.half(0) for k in (0, 1)]


def nibbles(block, at, fifth=None):
    """Nibble pairs, and above them the bits of an integer, element j in bit j."""
    pairs = block.many(at)
    q = [pairs & 15, pairs >> 4]
    if fifth is not None:
        bits = block.one(fifth, I32)
        places = Lanes(block.b, ir.Constant(ir.VectorType(I32, N), [I32(k) for k in range(N)]))
        q = [v | (((pairs.like(bits) >> (places + N * k)) & 1) << 4) for k, v in enumerate(q)]
    return q


def q4_0(block):
    """Levels -8..7."""
    return [(q - 8).to_float() * block.half(0) for q in nibbles(block, 2)]


def q4_1(block):
    """Levels 0..15 above an offset."""
    return [q.to_float() * block.half(0) + block.half(2) for q in nibbles(block, 4)]


def q5_0(block):
    """Levels -16..15."""
    return [(q - 16).to_float() * block.half(0) for q in nibbles(block, 6, 2)]


def q5_1(block):
    """Levels 0..31 above an offset."""
    return [q.to_float() * block.half(0) + block.half(2) for q in nibbles(block, 8, 4)]


def twos(block, start, t):
    """2-bit levels of elements 16t..16t+15 in 64 bytes: of each 128, four to a byte."""
    return (block.many(start + t // 8 * 32 + t % 2 * N) >> (t % 8 // 2 * 2)) & 3


def q2_k(block):
    """4-bit scales and offsets under d and dmin."""
    d, dmin = block.half(80), block.half(82)
    out = []
    for t in range(16):
        pair = block.one(t)
        q = twos(block, 16, t).to_float()
        out.append(q * ((pair & 15).to_float() * d) - q.like((pair >> 4).to_float() * dmin))
    return out


def q3_k(block):
    """6-bit scales from -32 under d; levels -4..3, the third bit set for the upper ones."""
    d = block.half(108)
    out = []
    for t in range(16):
        low = (block.one(96 + t % 8) >> (t // 8 * 4)) & 15
        high = (block.one(96 + 8 + t % 4) >> (t // 4 * 2)) & 3
        scale = ((low | (high << 4)) - 32).to_float() * d
        third = (block.many(t % 2 * N) >> (t // 2)) & 1
        out.append(((twos(block, 32, t) | (third << 2)) - 4).to_float() * scale)
    return out


def scale_and_offset(block, j):
    """The j-th pair of 6-bit numbers of a Q4_K or Q5_K block."""
    if j < 4:
        return block.one(4 + j) & 63, block.one(8 + j) & 63
    pair = block.one(8 + j)
    return (pair & 15) | (block.one(j) >> 6 << 4), (pair >> 4) | (block.one(4 + j) >> 6 << 4)


def q45_k(block, start, fifth=None):
    """Sub-blocks of 32 with 6-bit scale and offset under d and dmin; two sub-blocks share a byte."""
    d, dmin = block.half(0), block.half(2)
    out = []
    for t in range(16):
        j = t // 2
        s, m = scale_and_offset(block, j)
        q = (block.many(start + j // 2 * 32 + t % 2 * N) >> (j % 2 * 4)) & 15
        if fifth is not None:
            q = q | (((block.many(fifth + t % 2 * N) >> j) & 1) << 4)
        q = q.to_float()
        out.append(q * (s.to_float() * d) - q.like(m.to_float() * dmin))
    return out


def q6_k(block):
    """8-bit scales under d; levels -32..31."""
    d = block.half(208)
    out = []
    for t in range(16):
        half, part = divmod(t, 8)
        q = (block.many(half * 64 + part % 4 * N) >> (part // 4 * 4)) & 15
        scale = block.one(192 + t, signed=True).to_float() * d
        out.append(((q | (twos(block, 128, t) << 4)) - 32).to_float() * scale)
    return out


EMIT = {
    QType.F16: f16,
    QType.BF16: bf16,
    QType.Q8_0: q8_0,
    QType.Q4_0: q4_0,
    QType.Q4_1: q4_1,
    QType.Q5_0: q5_0,
    QType.Q5_1: q5_1,
    QType.Q2_K: q2_k,
    QType.Q3_K: q3_k,
    QType.Q4_K: lambda block: q45_k(block, 16),
    QType.Q5_K: lambda block: q45_k(block, 48, 16),
    QType.Q6_K: q6_k,
}


@cache
def kernel(type: QType) -> Callable[[int, int, int], None]:
    """Compiled `(source, target, n_units)`; lets other threads run."""
    module = ir.Module(type.name)
    f = ir.Function(module, ir.FunctionType(ir.VoidType(), [I8.as_pointer(), F32.as_pointer(), I64]), "decode")
    source, target, n_units = f.args
    b = ir.IRBuilder(f.append_basic_block("entry"))
    nbytes = unit(type) // BLOCKS[type].elements * BLOCKS[type].nbytes
    with loop(b, I64(0), n_units) as i:
        values = EMIT[type](Block(b, address(b, source, b.mul(i, I64(nbytes)))))
        start = b.mul(i, I64(unit(type)))
        for k, v in enumerate(values):
            store(b, v.v, address(b, target, b.add(start, I64(N * k))))
    b.ret_void()
    return Code(module).function("decode", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

"""Encoders of the halves and the 32-element block types: LLVM IR, compiled when first used (20 ms each, no numba).

Layouts, with d and m IEEE halves and x the decoded value; a nibble pair holds element j low and element j + 16 high:

    F16    2 bytes  IEEE half, ties to even          out of range becomes infinite
    BF16   2 bytes  upper half of a float32          ties to even
    Q8_0  34 bytes  d, int8 q[32]                    x = d * q
    Q4_0  18 bytes  d, nibble pairs[16]              x = d * (q - 8)
    Q4_1  20 bytes  d, m, nibble pairs[16]           x = d * q + m
    Q5_0  22 bytes  d, uint32 fifth bits, pairs[16]  x = d * (q - 16)
    Q5_1  24 bytes  d, m, uint32 fifth bits, pairs   x = d * q + m

Source of truth: the reference quantisers of ggml (ggml-quants.c), which these equal bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, reduce

from llvmlite import ir

from .lanes import F32, I8, I16, I32, I64, Code, Lanes, N, address, from_half, load, loop, record, store
from .types import BLOCKS, QType


def scale_of(step):
    """1 / step as the reference takes it: 0 for a step of zero."""
    return (step.like(1.0) / step).where(step.differs(0.0), 0.0)


def mask_bits(b, masks):
    """Two masks of 16 lanes as one 32-bit integer, element j in bit j."""
    low, high = (b.zext(b.bitcast(m.v, ir.IntType(N)), I32) for m in masks)
    return Lanes(b, b.or_(low, b.shl(high, I32(N))))


def signed_as_first(size, x, masks):
    """`size` (a scalar >= 0) with the sign of the first element that a mask marks."""
    b = size.b
    marked = mask_bits(b, masks)
    first = marked & Lanes(b, b.neg(marked.v))
    negative = mask_bits(b, [v.bits() < 0 for v in x])
    sign = marked.like(-0x80000000).where((first & negative).differs(0), 0)
    return (size.bits() | sign).from_bits()


def largest(x):
    """Bits of the largest magnitude: for values >= 0 the order of the bits is the order of the values."""
    sizes = [v.bits() & 0x7FFFFFFF for v in x]
    return reduce(Lanes.at_least, sizes).reduce("smax")


def ordered(bits):
    """Float bits to integers of the same order, -0.0 just below 0.0; its own inverse."""
    return Lanes(bits.b, bits.b.xor(bits.v, (Lanes(bits.b, bits.b.ashr(bits.v, bits.like(31).v)) & 0x7FFFFFFF).v))


def pack(b, at, q, five_bits):
    """Nibble pairs at an address, preceded by the fifth bits if there are any."""
    if five_bits:
        store(b, mask_bits(b, [(v & 0x10).differs(0) for v in q]).v, at)
        at, q = address(b, at, 4), [v & 0x0F for v in q]
    (q[0] | (q[1] << 4)).bytes_to(at)


def f16(_b, x, _peak, out):
    """IEEE halves."""
    h = x[0].half()
    h.bytes_to(out, I16)
    return [from_half(h)]


def bf16(_b, x, _peak, out):
    """Upper halves, a NaN kept one by its quiet bit."""
    bits = x[0].bits()
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper = ((bits >> 16) | 64).where((bits & 0x7FFFFFFF) > 0x7F800000, upper)
    upper.bytes_to(out, I16)
    return [(upper << 16).from_bits()]


def q8_0(b, x, peak, out):
    """Symmetric, 255 levels; round half away from zero."""
    d = peak.from_bits() / 127.0
    stored_d = d.half_to(out)
    scale = scale_of(d)
    q = [(v * scale).call("llvm.round").to_int() for v in x]
    for k, v in enumerate(q):
        v.bytes_to(address(b, out, 2 + N * k))
    return [v.to_float() * stored_d for v in q]


def symmetric(b, x, peak, out, five_bits):
    """Q4_0, Q5_0: the value of largest magnitude, the first if several, takes the lowest level."""
    half = 16 if five_bits else 8
    top = signed_as_first(peak.from_bits(), x, [(v.bits() & 0x7FFFFFFF).equals(peak) for v in x])
    top = top.where(peak.differs(0), 0.0)
    d = top / float(-half)
    stored_d = d.half_to(out)
    scale = scale_of(d)
    q = [(v * scale + (half + 0.5)).to_int().as_int8().at_most(2 * half - 1) for v in x]
    pack(b, address(b, out, 2), q, five_bits)
    return [((v & (2 * half - 1)) - half).to_float() * stored_d for v in q]


def affine(b, x, _peak, out, five_bits):
    """Q4_1, Q5_1: levels from the smallest value to the largest."""
    levels = 31 if five_bits else 15
    keys = [ordered(v.bits()) for v in x]
    low = ordered(keys[0].at_most(keys[1]).reduce("smin")).from_bits()
    high = ordered(keys[0].at_least(keys[1]).reduce("smax")).from_bits()
    low = signed_as_first(low.abs(), x, [v.equals(low) for v in x])  # which zero it is shows in m
    d = (high + 0.0 - low) / float(levels)
    stored_d, stored_low = d.half_to(out), low.half_to(address(b, out, 2))
    scale = scale_of(d)
    q = [((v - low) * scale + 0.5).to_int().as_int8() for v in x]
    if not five_bits:
        q = [v.at_most(levels) for v in q]
    pack(b, address(b, out, 4), q, five_bits)
    return [(v & levels).to_float() * stored_d + stored_low for v in q]


EMIT = {
    QType.F16: f16,
    QType.BF16: bf16,
    QType.Q8_0: q8_0,
    QType.Q4_0: lambda *a: symmetric(*a, five_bits=False),
    QType.Q4_1: lambda *a: affine(*a, five_bits=False),
    QType.Q5_0: lambda *a: symmetric(*a, five_bits=True),
    QType.Q5_1: lambda *a: affine(*a, five_bits=True),
}


def unit(type: QType) -> int:
    """Elements that a kernel takes at a time."""
    return max(BLOCKS[type].elements, N)


@cache
def kernel(type: QType) -> Callable[[int, int, int, int], int]:
    """Compiled `(source, target, n_units, errors) -> bits of the largest magnitude`; lets other threads run."""
    return begin(type).function(
        "encode", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    )


@cache
def begin(type: QType) -> Code:
    """Have the kernel of a type compiled, while other things are done."""
    module = ir.Module(type.name)
    arguments = [F32.as_pointer(), I8.as_pointer(), I64, I8.as_pointer()]
    f = ir.Function(module, ir.FunctionType(I32, arguments), "encode")
    source, target, n_units, errors = f.args
    b = ir.IRBuilder(f.append_basic_block("entry"))
    peaks = b.alloca(I32)
    b.store(I32(0), peaks)
    nbytes = unit(type) // BLOCKS[type].elements * BLOCKS[type].nbytes
    with loop(b, I64(0), n_units) as i:
        start = b.mul(i, I64(unit(type)))
        x = [load(b, address(b, source, b.add(start, I64(k)))) for k in range(0, unit(type), N)]
        peak = largest(x)
        b.store(peak.at_least(Lanes(b, b.load(peaks, typ=I32))).v, peaks)
        stored = EMIT[type](b, x, peak, address(b, target, b.mul(i, I64(nbytes))))
        record(errors, list(zip(x, stored, strict=True)))
    b.ret(b.load(peaks, typ=I32))
    return Code(module)

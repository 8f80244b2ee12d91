# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""The exponential of SIMD values and of scalars inside Numba."""

from __future__ import annotations

import struct

from llvmlite import ir

from .simd import F32, I32, LANES, VF, VI, _fn, _op, emit_fma, f32, f32x16


def _exp(b, x, vf, vi, suffix):
    """Cephes' way: e**x = 2**n e**r with |r| <= ln 2 / 2, and a polynomial for e**r."""

    def c(value):
        return ir.Constant(vf, [_f32(value)] * LANES if vf is VF else _f32(value))

    def k(value):
        return ir.Constant(vi, [value] * LANES if vf is VF else value)

    def fma_(p, q, r):
        return emit_fma(b, p, q, r)

    x = b.select(b.fcmp_ordered(">", x, c(-87.0)), x, c(-87.0))
    x = b.select(b.fcmp_ordered("<", x, c(88.0)), x, c(88.0))
    n = b.call(_fn(b, f"llvm.rint.{suffix}", vf, vf), [b.fmul(x, c(1.4426950408889634))])
    r = fma_(n, c(-0.693145751953125), x)  # ln 2 in two parts: n times the first is exact
    r = fma_(n, c(-1.42860682030941723212e-6), r)
    p = c(1 / 5040)
    for value in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = fma_(p, r, c(value))
    power = b.shl(b.add(b.fptosi(n, vi), k(127)), k(23))
    return b.fmul(p, b.bitcast(power, vf))


@_op(f32x16, f32x16)
def exp(b, x):
    """e**x to about 2 ulp, x taken into -87 .. 88: at the lower end it stays 1.6e-38, which no sum here notices."""
    return _exp(b, x, VF, VI, "v16f32")


@_op(f32, f32)
def exp1(b, x):
    """The same for one value."""
    return _exp(b, x, F32, I32, "f32")


def _f32(x: float) -> float:
    """The float32 nearest to x: LLVM refuses a constant that has more digits."""
    return struct.unpack("f", struct.pack("f", x))[0]

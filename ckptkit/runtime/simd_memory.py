# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Loads that widen, stores that narrow, prefetches inside Numba: scalars and SIMD values by address in bytes."""

from __future__ import annotations

from llvmlite import ir

from .simd import (
    F32,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VH,
    VI,
    _fn,
    _load,
    _op,
    _store,
    emit_narrow,
    emit_widen,
    f32,
    f32x16,
    i32x16,
    i64,
    void,
)

# --- scalars ---


@_op(i64, i64)
def get_i64(b, address):
    return _load(b, address, I64, 8)


@_op(i64, i64)
def get_i32(b, address):
    return b.sext(_load(b, address, I32, 4), I64)


@_op(i64, i64)
def get_u32(b, address):
    return b.zext(_load(b, address, I32, 1), I64)


@_op(i64, i64)
def get_u8(b, address):
    return b.zext(_load(b, address, I8, 1), I64)


@_op(i64, i64)
def get_i8(b, address):
    return b.sext(_load(b, address, I8, 1), I64)


@_op(f32, i64)
def get_f32(b, address):
    return _load(b, address, F32, 4)


@_op(f32, i64)
def get_f16(b, address):
    return emit_widen(b, _load(b, address, HALF, 1))


@_op(f32, i64)
def get_bf16(b, address):
    return b.bitcast(b.shl(b.zext(_load(b, address, I16, 1), I32), ir.Constant(I32, 16)), F32)


@_op(void, i64, f32)
def put_f32(b, address, x):
    _store(b, address, x, 4)


@_op(void, i64, f32)
def put_f16(b, address, x):
    _store(b, address, emit_narrow(b, x), 2)


@_op(void, i64, i64)
def put_i32(b, address, x):
    _store(b, address, b.trunc(x, I32), 4)


# --- vectors ---


@_op(f32x16, i64)
def load_f32(b, address):
    return _load(b, address, VF, 4)


@_op(f32x16, i64)
def load_f16(b, address):
    return emit_widen(b, _load(b, address, VH, 2))


@_op(f32x16, i64)
def load_bf16(b, address):
    wide = b.zext(_load(b, address, ir.VectorType(I16, LANES), 2), VI)
    return b.bitcast(b.shl(wide, ir.Constant(VI, [16] * LANES)), VF)


@_op(f32x16, i64)
def load_i8(b, address):
    return b.sitofp(b.sext(_load(b, address, ir.VectorType(I8, LANES), 1), VI), VF)


@_op(i32x16, i64)
def load_i32(b, address):
    return _load(b, address, VI, 4)


@_op(i32x16, i64)
def load_u8(b, address):
    return b.zext(_load(b, address, ir.VectorType(I8, LANES), 1), VI)


@_op(void, i64, f32x16)
def store_f32(b, address, x):
    _store(b, address, x, 4)


@_op(void, i64, f32x16)
def store_i8(b, address, x):
    """Whole numbers of -128 .. 127 as bytes."""
    _store(b, address, b.trunc(b.fptosi(x, VI), ir.VectorType(I8, LANES)), 1)


@_op(void, i64, f32x16)
def store_bf16(b, address, x):
    """Round to nearest even, as the weights of a bf16 file were."""
    bits = b.bitcast(x, VI)
    odd = b.and_(b.lshr(bits, ir.Constant(VI, [16] * LANES)), ir.Constant(VI, [1] * LANES))
    rounded = b.add(b.add(bits, ir.Constant(VI, [0x7FFF] * LANES)), odd)
    _store(b, address, b.trunc(b.lshr(rounded, ir.Constant(VI, [16] * LANES)), ir.VectorType(I16, LANES)), 2)


def fetch_ahead(b, address):
    """Emit a request for the cache line at an address, which may lie anywhere."""
    pointer = b.inttoptr(address, I8.as_pointer())
    flags = [ir.Constant(I32, x) for x in (0, 3, 1)]  # to read, keep close, data
    b.call(_fn(b, "llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32), [pointer, *flags])


@_op(void, i64)
def prefetch(b, address):
    """Ask for the cache line at an address, which may lie anywhere."""
    fetch_ahead(b, address)

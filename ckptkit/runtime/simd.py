# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Sixteen-lane SIMD values inside Numba, on raw addresses: the vocabulary that all CPU kernels are written in.

A value of type `f32x16` or `i32x16` is an LLVM vector. LLVM splits it where registers are narrower, so the same
source runs with AVX-512, AVX2, SSE and NEON. Addresses are int64 bytes; loads and stores assume the alignment of one
element only. The one x86 special, the bf16 dot product, is used where `has_bf16_dot()` says so.

A kernel gets everything by address because a Numba call with arrays costs microseconds and a layer has five calls.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, overload, register_model

from ..quant.lanes import Lanes, from_half

LANES = 16
F32, I32, I16, I8, I64, HALF = (
    ir.FloatType(),
    ir.IntType(32),
    ir.IntType(16),
    ir.IntType(8),
    ir.IntType(64),
    ir.HalfType(),
)
VF, VI, VH = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(HALF, LANES)


class _Bfloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def __str__(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _Bfloat)

    def __hash__(self):
        return hash(_Bfloat)


VB = ir.VectorType(_Bfloat(), 2 * LANES)


class _Vector(types.Type):
    def __init__(self, name, llvm):
        self.llvm = llvm
        super().__init__(name=name)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, type):
        super().__init__(manager, type, type.llvm)


f32x16, i32x16 = _Vector("f32x16", VF), _Vector("i32x16", VI)
i64, i32, f32, void = types.int64, types.int32, types.float32, types.none


@cache
def features() -> frozenset[str]:
    """x86 features that code is generated for ("avx512f", ...): NUMBA_CPU_FEATURES, none for NUMBA_CPU_NAME=generic, or
    the host's."""
    listed = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return frozenset(name[1:] for name in listed if name.startswith("+"))


def has(x86: str) -> bool:
    """Whether the CPU has what an x86 feature does in one instruction; other kinds of CPU here all have."""
    return x86 in features() or "x86" not in cpu_target.target_context.codegen().magic_tuple()[0]


def has_avx512() -> bool:
    """Whether a sixteen-lane value is one register and there are 32 of them."""
    return "avx512f" in features()


def has_bf16_dot() -> bool:
    """Whether `tile` can take pairs of bf16 on this CPU."""
    return "avx512bf16" in features()


def _op(result, *params):
    """Turn a function (builder, *llvm values) -> llvm value into an intrinsic of that signature."""

    def decorate(emit):
        def codegen(context, builder, sig, args):
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        sig = result(*params)
        typers = {
            0: lambda ctx: (sig, codegen),
            1: lambda ctx, a: (sig, codegen),
            2: lambda ctx, a, b: (sig, codegen),
            3: lambda ctx, a, b, c: (sig, codegen),
            4: lambda ctx, a, b, c, d: (sig, codegen),
        }
        return intrinsic(typers[len(params)])

    return decorate


def inlined(function):
    """Make a function callable from kernels, specialised on every literal argument: a type or a choice selects its
    code."""

    @overload(function, strict=False, prefer_literal=True)
    def implementation(*args, **kwargs):
        return function

    return function


def _fn(builder, name, result, *params):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, params), name)


def _load(builder, address, type, align):
    value = builder.load(builder.inttoptr(address, type.as_pointer()))
    value.align = align
    return value


def _store(builder, address, value, align):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def _splat(builder, x, type):
    one = builder.insert_element(ir.Constant(type, ir.Undefined), x, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(VI, [0] * LANES))


def emit_fma(b, x, y, z):
    """x * y + z, rounded once where the CPU can: where it cannot LLVM would call a function for every lane."""
    if not has("fma"):
        return b.fadd(b.fmul(x, y), z)
    suffix = f"v{LANES}f32" if x.type == VF else "f32"
    return b.call(_fn(b, f"llvm.fma.{suffix}", x.type, x.type, x.type, x.type), [x, y, z])


def emit_widen(b, half):
    """Halves to floats: without the instruction by integer arithmetic, since LLVM would call functions that are not
    there."""
    if has("f16c"):
        return b.fpext(half, VF if half.type == VH else F32)
    bits = b.bitcast(half, ir.VectorType(I16, LANES) if half.type == VH else I16)
    return from_half(Lanes(b, b.zext(bits, VI if half.type == VH else I32))).v


def emit_narrow(b, x):
    """Floats to the nearest halves, ties to even."""
    vector = x.type == VF
    if has("f16c"):
        return b.fptrunc(x, VH if vector else HALF)
    bits = b.trunc(Lanes(b, x).half().v, ir.VectorType(I16, LANES) if vector else I16)
    return b.bitcast(bits, VH if vector else HALF)


@_op(f32x16, f32)
def splat(b, x):
    return _splat(b, x, VF)


@_op(i32x16, i64)
def isplat(b, x):
    return _splat(b, b.trunc(x, I32), VI)


@_op(i32x16)
def lanes(b):
    """0, 1, ... 15."""
    return ir.Constant(VI, list(range(LANES)))


@_op(i32x16, i64)
def lanes_from(b, first):
    """first, first + 1, ... first + 15."""
    return b.add(_splat(b, b.trunc(first, I32), VI), ir.Constant(VI, list(range(LANES))))


@_op(f32x16, f32x16, f32x16)
def add(b, x, y):
    return b.fadd(x, y)


@_op(f32x16, f32x16, f32x16)
def sub(b, x, y):
    return b.fsub(x, y)


@_op(f32x16, f32x16, f32x16)
def mul(b, x, y):
    return b.fmul(x, y)


@_op(f32x16, f32x16, f32x16)
def div(b, x, y):
    return b.fdiv(x, y)


@_op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    return emit_fma(b, x, y, z)


@_op(f32x16, f32x16)
def nearest(b, x):
    """The nearest whole number, ties to even."""
    return b.call(_fn(b, "llvm.rint.v16f32", VF, VF), [x])


@_op(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@_op(f32x16, i32x16, i32x16, f32x16, f32x16)
def where_le(b, i, j, x, y):
    """x where i <= j, else y, lane by lane."""
    return b.select(b.icmp_signed("<=", i, j), x, y)


def _fold(b, x, join):
    """Lanes to one value, pairwise: the same order on every machine."""
    for width in (8, 4, 2, 1):
        low = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, width), list(range(width))))
        high = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width))))
        x = join(low, high)
    return b.extract_element(x, ir.Constant(I32, 0))


@_op(f32, f32x16)
def sum16(b, x):
    return _fold(b, x, b.fadd)


@_op(f32, f32x16)
def max16(b, x):
    return _fold(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@_op(i32x16, i32x16, i32x16)
def iand(b, x, y):
    return b.and_(x, y)


@_op(i32x16, i32x16, i32x16)
def ior(b, x, y):
    return b.or_(x, y)


@_op(i32x16, i32x16, i32x16)
def shr(b, x, y):
    return b.lshr(x, y)


@_op(i32x16, i32x16, i32x16)
def shl(b, x, y):
    return b.shl(x, y)


@_op(f32x16, i32x16, f32)
def small_to_f32(b, x, bias):
    """float(x) - bias for 0 <= x < 2**23, by setting the mantissa of 2**23: `and` before it and `or` here become one
    instruction."""
    magic = b.bitcast(b.or_(x, ir.Constant(VI, [0x4B000000] * LANES)), VF)
    return b.fsub(magic, _splat(b, b.fadd(bias, ir.Constant(F32, 8388608.0)), VF))

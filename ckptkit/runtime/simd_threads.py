# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""What threads need inside Numba: atomic cells by address, and calls of kernels by address."""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from .simd import I64, _fn, _op, i64, void


@_op(i64, i64, i64)
def atomic_add(b, address, x):
    """Add and return the value before."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), x, "seq_cst")


@_op(i64, i64, i64)
def atomic_swap(b, address, x):
    """Store and return the value before."""
    return b.atomic_rmw("xchg", b.inttoptr(address, I64.as_pointer()), x, "seq_cst")


@_op(i64, i64)
def atomic_get(b, address):
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "acquire", 8)


@_op(void, i64, i64)
def atomic_put(b, address, x):
    b.store_atomic(x, b.inttoptr(address, I64.as_pointer()), "release", 8)


@_op(void)
def spin_hint(b):
    """Tell an x86 core that it spins; nothing elsewhere."""
    if "x86" in b.module.triple:
        b.call(_fn(b, "llvm.x86.sse2.pause", ir.VoidType()), [])


@intrinsic
def call_kernel(typingctx, function, args, team, tid):
    """Call a compiled kernel(ta, tb, tc, args, team, tid) by its address; the literal arguments are already in its
    code."""
    signature = (i64,) * 6

    def codegen(context, b, sig, values):
        pointer = b.inttoptr(values[0], context.call_conv.get_function_type(void, signature).as_pointer())
        nothing = ir.Constant(I64, 0)
        context.call_conv.call_function(b, pointer, void, signature, [nothing, nothing, nothing, *values[1:]])
        return context.get_dummy_value()

    return void(i64, i64, i64, i64), codegen

"""Instructions that Numba has no name for, as intrinsics of one PTX statement each (PTX ISA 8.x, section "Instruction
Set").

Global memory is addressed by raw 64-bit integers: a captured launch then costs 8 bytes a buffer and no array header.
Weights are read past L1 (each byte is used once); activations are read from L2, since another kernel has just written
them. Imported only where kernels are compiled: nothing here runs in the process that launches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

i32, u16, u32, u64, f32 = types.int32, types.uint16, types.uint32, types.uint64, types.float32
f64 = types.float64
LLVM = {
    i32: ir.IntType(32), u16: ir.IntType(16), u32: ir.IntType(32), u64: ir.IntType(64), f32: ir.FloatType(),
    f64: ir.DoubleType(),
}  # fmt: skip
LETTER = {i32: "r", u16: "h", u32: "r", u64: "l", f32: "f", f64: "d"}  # constraint letters of PTX inline assembly


def ptx(text: str, result: Any, *args: Any, ordered: bool = False) -> Callable[..., Any]:
    """An intrinsic that is one PTX statement. `result`: a type, None, or (type, n) for n registers.

    Operands are $0, $1... with the results first. `ordered` keeps the statement in program order and makes it a
    barrier for memory accesses of the compiler.
    """
    kind, count = result if isinstance(result, tuple) else (result, 1)
    outs = [f"={LETTER[kind]}"] * count if kind is not None else []
    constraints = ",".join(outs + [LETTER[a] for a in args] + (["~{memory}"] if ordered else []))
    if kind is None:
        llvm: Any = ir.VoidType()
    else:
        llvm = LLVM[kind] if count == 1 else ir.LiteralStructType([LLVM[kind]] * count)
    returns = types.void if kind is None else kind if count == 1 else types.UniTuple(kind, count)

    def typing(_context: Any, _given: tuple[Any, ...]) -> Any:
        def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            asm = ir.InlineAsm(ir.FunctionType(llvm, [LLVM[a] for a in args]), text, constraints, side_effect=ordered)
            out = builder.call(asm, values)
            if kind is None:
                return context.get_dummy_value()
            if count == 1:
                return out
            return context.make_tuple(
                builder, signature.return_type, [builder.extract_value(out, i) for i in range(count)]
            )

        return returns(*args), lower

    names = ", ".join(f"a{i}" for i in range(len(args)))
    scope: dict[str, Any] = {"typing": typing}
    exec(
        f"def op(context{', ' if names else ''}{names}):\n    return typing(context, ({names}{',' if names else ''}))",
        scope,
    )
    made: Callable[..., Any] = intrinsic(scope["op"])
    return made


# weights: read once, so not kept in L1; volatile, so that all loads of a batch are issued before the first use
load_weights = ptx("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), u64, ordered=True)
load_weights_2 = ptx("ld.global.nc.L1::no_allocate.v2.u32 {$0,$1}, [$2];", (u32, 2), u64, ordered=True)
load_scale_u32 = ptx("ld.global.nc.u32 $0, [$1];", u32, u64, ordered=True)
load_scale_u16 = ptx("ld.global.nc.u16 $0, [$1];", u16, u64, ordered=True)

# activations and caches
load_f32x4 = ptx("ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];", (f32, 4), u64, ordered=True)
load_u32x4 = ptx("ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];", (u32, 4), u64, ordered=True)
load_f32 = ptx("ld.global.cg.f32 $0, [$1];", f32, u64, ordered=True)
load_f64 = ptx("ld.global.cg.f64 $0, [$1];", f64, u64, ordered=True)
load_i32 = ptx("ld.global.cg.s32 $0, [$1];", i32, u64, ordered=True)
load_u32 = ptx("ld.global.cg.u32 $0, [$1];", u32, u64, ordered=True)
load_u16 = ptx("ld.global.cg.u16 $0, [$1];", u16, u64, ordered=True)
load_u8 = ptx("{ .reg .u16 t; ld.global.cg.u8 t, [$1]; cvt.u32.u16 $0, t; }", u32, u64, ordered=True)
store_f32 = ptx("st.global.f32 [$0], $1;", None, u64, f32, ordered=True)
store_f64 = ptx("st.global.f64 [$0], $1;", None, u64, f64, ordered=True)
store_f32x4 = ptx("st.global.v4.f32 [$0], {$1,$2,$3,$4};", None, u64, f32, f32, f32, f32, ordered=True)
store_u32x4 = ptx("st.global.v4.u32 [$0], {$1,$2,$3,$4};", None, u64, u32, u32, u32, u32, ordered=True)
store_i32 = ptx("st.global.s32 [$0], $1;", None, u64, i32, ordered=True)
store_u32 = ptx("st.global.u32 [$0], $1;", None, u64, u32, ordered=True)
store_u16 = ptx("st.global.u16 [$0], $1;", None, u64, u16, ordered=True)

# shared memory by its 32-bit address
shared_f32x4 = ptx("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", (f32, 4), u32, ordered=True)
shared_f32x2 = ptx("ld.shared.v2.f32 {$0,$1}, [$2];", (f32, 2), u32, ordered=True)
shared_f32 = ptx("ld.shared.f32 $0, [$1];", f32, u32, ordered=True)
shared_u32 = ptx("ld.shared.u32 $0, [$1];", u32, u32, ordered=True)
put_shared_f32x4 = ptx("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, u32, f32, f32, f32, f32, ordered=True)
put_shared_f32x2 = ptx("st.shared.v2.f32 [$0], {$1,$2};", None, u32, f32, f32, ordered=True)
put_shared_f32 = ptx("st.shared.f32 [$0], $1;", None, u32, f32, ordered=True)

# bits and conversions
bits_f32 = ptx("mov.b32 $0, $1;", f32, u32)
f32_bits = ptx("mov.b32 $0, $1;", u32, f32)
f16_f32 = ptx("cvt.f32.f16 $0, $1;", f32, u16)
f32_f16 = ptx("cvt.rn.f16.f32 $0, $1;", u16, f32)
low_f16 = ptx("{ .reg .f16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", f32, u32)
high_f16 = ptx("{ .reg .f16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", f32, u32)
pick_bytes = ptx("prmt.b32 $0, $1, $2, $3;", u32, u32, u32, u32)
and_or = ptx("lop3.b32 $0, $1, $2, $3, 0xEA;", u32, u32, u32, u32)  # (a & b) | c
rotate_right = ptx("shf.r.wrap.b32 $0, $1, $1, $2;", u32, u32, u32)
exp2 = ptx("ex2.approx.ftz.f32 $0, $1;", f32, f32)

# order between blocks and between kernels
fence = ptx("fence.acq_rel.gpu;", None, ordered=True)
count_up_to = ptx("atom.global.inc.u32 $0, [$1], $2;", u32, u64, u32, ordered=True)  # wraps to 0 after the last
add_u32 = ptx("atom.global.add.u32 $0, [$1], $2;", u32, u64, u32, ordered=True)
wait_for_previous = ptx(
    "griddepcontrol.wait;", None, ordered=True
)  # sm_90: the kernel before is done, its writes visible
start_next = ptx("griddepcontrol.launch_dependents;", None, ordered=True)


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def shared_address(_context: Any, array: Any) -> Any:
    """32-bit address, in the shared window, of element 0 of a shared array."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=values[0]).data
        wide = builder.ptrtoint(data, LLVM[u64])
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        asm = ir.InlineAsm(ir.FunctionType(LLVM[u32], [LLVM[u64]]), text, "=r,l")
        return builder.call(asm, [wide])

    return u32(array), lower


# tensor cores (sm_75 and later): 16 x 8 results, 16 x 16 by 16 x 8 operands in f16
load_matrices = ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", (u32, 4), u32, ordered=True)
load_matrices_transposed = ptx(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", (u32, 4), u32, ordered=True
)
multiply_f16 = ptx(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    (f32, 4), u32, u32, u32, u32, u32, u32, f32, f32, f32, f32,
)  # fmt: skip
pack_f16 = ptx("{ .reg .f16 a, b; cvt.rn.f16.f32 a, $1; cvt.rn.f16.f32 b, $2; mov.b32 $0, {a, b}; }", u32, f32, f32)
put_shared_u32x4 = ptx("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", None, u32, u32, u32, u32, u32, ordered=True)
put_shared_u32 = ptx("st.shared.u32 [$0], $1;", None, u32, u32, ordered=True)

# the same in tf32 (sm_80): 16 x 8 results, 16 x 8 by 8 x 8 operands; a float32's low 13 bits are not looked at
multiply_tf32 = ptx(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    (f32, 4), u32, u32, u32, u32, u32, u32, f32, f32, f32, f32,
)  # fmt: skip
round_tf32 = ptx("cvt.rna.tf32.f32 $0, $1;", u32, f32)

# copies into shared memory that run on their own (sm_80): 16 bytes, of which the first $2 are read, the others zero
copy_async = ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", None, u32, u64, i32, ordered=True)
commit_copies = ptx("cp.async.commit_group;", None, ordered=True)


def wait_copies(n: int) -> Callable[..., Any]:
    """An intrinsic: all but this thread's last `n` groups of copies have arrived."""
    return ptx(f"cp.async.wait_group {n};", None, ordered=True)

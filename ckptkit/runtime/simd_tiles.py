# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Products of whole tiles inside Numba: many sums in registers, on raw addresses. Vocabulary as in simd.py."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import (
    F32,
    I32,
    I64,
    LANES,
    VB,
    VF,
    VH,
    VI,
    _fn,
    _load,
    _op,
    _splat,
    _store,
    emit_fma,
    emit_widen,
    f32x16,
    i64,
    void,
)


@_op(void, i64, i64, i64, i64)
def transpose16(b, source, source_stride, target, target_stride):
    """Write the transpose of 16 x 16 32-bit values; strides in bytes."""
    rows = [_load(b, b.add(source, b.mul(source_stride, ir.Constant(I64, i))), VF, 4) for i in range(LANES)]
    step = LANES // 2
    while step:  # exchange the off-diagonal step x step quarters of every 2*step square
        low = [i if not i & step else LANES + (i ^ step) for i in range(LANES)]
        high = [i | step if not i & step else LANES + i for i in range(LANES)]
        for i in range(LANES):
            if not i & step:
                x, y = rows[i], rows[i | step]
                rows[i] = b.shuffle_vector(x, y, ir.Constant(VI, low))
                rows[i | step] = b.shuffle_vector(x, y, ir.Constant(VI, high))
        step //= 2
    for i in range(LANES):
        _store(b, b.add(target, b.mul(target_stride, ir.Constant(I64, i))), rows[i], 4)


@intrinsic(prefer_literal=True)
def tile(typingctx, pairs, m, v, a, row_step, k_step, panel, panel_step, n_k, c, c_step, fresh):
    """C[m, 16 v] (+)= A[m, K] panel[K, 16 v]: the product that prompts and attention spend their time in.

    `pairs`, `m`, `v` are literals. pairs 0: f32 elements; 1: an element is two bf16 (k, k + 1) and C sums both
    products. A[i, k] lies at a + i * row_step + k * k_step, the panel's row k at panel + k * panel_step, C's row i at
    c + i * c_step (bytes). Each A element is broadcast against v vectors: m * v sums stay in registers over all of K.
    `fresh` 0 adds to what C holds, at the end: a sum of sums has smaller rounding errors than one long sum.
    """
    n_rows, n_vectors, with_pairs = m.literal_value, v.literal_value, bool(pairs.literal_value)
    sig = void(pairs, m, v, *(i64,) * 9)

    def codegen(context, b, sig, args):
        a, row_step, k_step, panel, panel_step, n_k, c, c_step, fresh = args[3:]
        tiles = [(i, j) for i in range(n_rows) for j in range(n_vectors)]
        where = {
            (i, j): b.add(c, b.add(b.mul(c_step, ir.Constant(I64, i)), ir.Constant(I64, 64 * j))) for i, j in tiles
        }
        sums = {t: cgutils.alloca_once_value(b, ir.Constant(VF, [0.0] * LANES)) for t in tiles}
        for t in tiles:  # alloca_once_value stores once, in the entry block: a tile inside a loop must clear again
            b.store(ir.Constant(VF, [0.0] * LANES), sums[t])
        rows = [b.add(a, b.mul(row_step, ir.Constant(I64, i))) for i in range(n_rows)]
        with cgutils.for_range(b, n_k) as loop:
            at = b.add(panel, b.mul(loop.index, panel_step))
            right = [
                _load(b, b.add(at, ir.Constant(I64, 64 * j)), VI if with_pairs else VF, 4) for j in range(n_vectors)
            ]
            shift = b.mul(loop.index, k_step)
            for i in range(n_rows):
                left = _load(b, b.add(rows[i], shift), I32 if with_pairs else F32, 2 if with_pairs else 4)
                left = _splat(b, left, VI if with_pairs else VF)
                for j in range(n_vectors):
                    old = b.load(sums[i, j])
                    if with_pairs:
                        dot = _fn(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF, VF, VB, VB)
                        new = b.call(dot, [old, b.bitcast(left, VB), b.bitcast(right[j], VB)])
                    else:
                        new = emit_fma(b, left, right[j], old)
                    b.store(new, sums[i, j])
        with b.if_then(b.icmp_signed("==", fresh, ir.Constant(I64, 0))):
            for t in tiles:
                b.store(b.fadd(_load(b, where[t], VF, 4), b.load(sums[t])), sums[t])
        for t in tiles:
            _store(b, where[t], b.load(sums[t]), 4)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def dot_keys(typingctx, t, query, keys, step, n_vectors):
    """Sixteen dot products: f32 query (16 n_vectors,) with rows keys, keys + step, .. of type t (literal: 0 f32, 1
    f16)."""
    half = t.literal_value == 1

    def codegen(context, b, sig, args):
        _, query, keys, step, n_vectors = args
        sums = [cgutils.alloca_once(b, VF) for _ in range(LANES)]
        for s in sums:
            b.store(ir.Constant(VF, [0.0] * LANES), s)
        rows = [b.add(keys, b.mul(step, ir.Constant(I64, i))) for i in range(LANES)]
        with cgutils.for_range(b, n_vectors) as loop:
            q = _load(b, b.add(query, b.mul(loop.index, ir.Constant(I64, 64))), VF, 4)
            shift = b.mul(loop.index, ir.Constant(I64, 32 if half else 64))
            for row, s in zip(rows, sums, strict=True):
                k = _load(b, b.add(row, shift), VH if half else VF, 2 if half else 4)
                k = emit_widen(b, k) if half else k
                b.store(emit_fma(b, q, k, b.load(s)), s)
        return _sums_of(b, [b.load(s) for s in sums])

    return f32x16(t, i64, i64, i64, i64), codegen


def _sums_of(b, vectors):
    """Lane i is the sum of vector i's lanes: half as many vectors at each of four steps."""
    step = LANES // 2
    while len(vectors) > 1:
        n = len(vectors) // 2
        # Vector i and i + n share one: where a lane's bit `step` is 0 it goes on with i, else with i + n.
        low = [i if not i & step else LANES + (i ^ step) for i in range(LANES)]
        high = [i | step if not i & step else LANES + i for i in range(LANES)]
        vectors = [
            b.fadd(
                b.shuffle_vector(x, y, ir.Constant(VI, low)),
                b.shuffle_vector(x, y, ir.Constant(VI, high)),
            )
            for x, y in zip(vectors[:n], vectors[n:], strict=True)
        ]
        step //= 2
    return vectors[0]

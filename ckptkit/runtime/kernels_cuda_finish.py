"""What follows a matrix product of many tokens: the rows' scaling undone, the bias, the activation into the next
product's rows, or the sum with what was there."""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Finish
from .cuda_ptx import f32, i32, load_f32, store_f32, u64
from .kernels_cuda_matvec import activate_gelu, activate_silu

ARGUMENTS = (u64,) * 4 + (i32, i32)


def kernel(p: Finish):
    """The kernel function of a Finish plan; grid (tokens, parts of a row). Rows of x are `n_rows` long, those of out
    `units`."""
    THREADS, ACT, GATED, SCALED, ADD = p.threads, p.act, p.act == "silu_gate", p.scaled, p.add

    def finish(out, x, bias, factors, n_rows, units):
        i = i32(cuda.blockIdx.x)
        row = x + u64(i) * u64(n_rows) * u64(4)
        factor = load_f32(factors + u64(i) * u64(4)) if SCALED else f32(1)
        for k in range(
            i32(cuda.blockIdx.y) * i32(THREADS) + i32(cuda.threadIdx.x), units, THREADS * i32(cuda.gridDim.y)
        ):
            a = load_f32(row + u64(k) * u64(4)) * factor
            if bias != u64(0):
                a += load_f32(bias + u64(k) * u64(4))
            if GATED:
                b = load_f32(row + u64(k + units) * u64(4)) * factor
                if bias != u64(0):
                    b += load_f32(bias + u64(k + units) * u64(4))
                a = activate_silu(a) * b
            if ACT == "gelu_tanh":
                a = activate_gelu(a)
            if ACT == "relu":
                a = max(a, f32(0))
            at = out + (u64(i) * u64(units) + u64(k)) * u64(4)
            if ADD:
                a += load_f32(at)
            store_f32(at, a)

    return finish

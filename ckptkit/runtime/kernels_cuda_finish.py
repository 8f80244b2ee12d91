"""What follows a matrix product of many tokens: the bias, and the activation into the next product's rows."""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import Finish
from .cuda_ptx import f32, i32, load_f32, store_f32, u64
from .kernels_cuda_matvec import activate_gelu, activate_silu

ARGUMENTS = (u64,) * 3 + (i32, i32)


def kernel(p: Finish):
    """The kernel function of a Finish plan; grid (tokens, parts of a row). Rows of x are `n_rows` long, those of out
    `units`."""
    THREADS, ACT, GATED = p.threads, p.act, p.act == "silu_gate"

    def finish(out, x, bias, n_rows, units):
        i = i32(cuda.blockIdx.x)
        row = x + u64(i) * u64(n_rows) * u64(4)
        for k in range(
            i32(cuda.blockIdx.y) * i32(THREADS) + i32(cuda.threadIdx.x), units, THREADS * i32(cuda.gridDim.y)
        ):
            a = load_f32(row + u64(k) * u64(4))
            if bias != u64(0):
                a += load_f32(bias + u64(k) * u64(4))
            if GATED:
                b = load_f32(row + u64(k + units) * u64(4))
                if bias != u64(0):
                    b += load_f32(bias + u64(k + units) * u64(4))
                a = activate_silu(a) * b
            if ACT == "gelu_tanh":
                a = activate_gelu(a)
            if ACT == "relu":
                a = max(a, f32(0))
            store_f32(out + (u64(i) * u64(units) + u64(k)) * u64(4), a)

    return finish

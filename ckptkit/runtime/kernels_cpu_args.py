# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""The argument table of `matvec`, `pack`, `matmat`, `embed` and `norm_rows`: int64 slots, unless said; addresses are
bytes.

A weight is a group of parts whose rows are stacked (q|k|v, gate|up), each part where it lies: nothing is copied.
"""

from __future__ import annotations

from .simd import inlined
from .simd_memory import get_i64

# Argument table: one line a slot.
OUT, OUT_STRIDE = 0, 8  # f32 (n, n_rows); bytes between tokens
X, X_STRIDE = 16, 24  # f32 (n, K)
N_TOKENS, K, PADDED_K = 32, 40, 48  # K up to a multiple of 32
ROW_INDEX = 56  # int32 (n,): which rows of x; 0: all in order
NORM, GAIN, NORM_BIAS, EPS = 64, 72, 80, 88  # 0 none, 1 rms, 2 layer; f32 (K,) or 0; f32
PARTS, N_PARTS, N_ROWS = 96, 104, 112  # int64 (n_parts, 4): address, rows, bytes of a row, 0 type ta or 1 type tb
BIAS = 120  # f32 (all stacked rows,) or 0
PANELS = 128  # packed activations
SCRATCH, SCRATCH_STRIDE = 136, 144  # per thread
TOKENS, POSITIONS, POSITION_ROWS = 152, 160, 168  # embed only
THEN = 176  # what happens to a sum: one of the next line
N_SLOTS = 23

SET, ADD, GELU, RELU, SILU_GATE = range(5)
NONE, RMS, LAYER = range(3)


@inlined
def locate(then, parts, n_parts, step, chunk, threads):
    """Where chunk number `chunk` of `step` rows lies: the part's address (0: there is none), its first stacked row,
    the row in it."""
    first = 0
    for p in range(1 if then == SILU_GATE else n_parts):  # up is taken along with gate
        part = parts + 32 * p
        n_rows = get_i64(part + 8)
        n_chunks = (n_rows + step - 1) // step
        if chunk < n_chunks:
            if n_chunks == 2 * threads:  # first every thread's first, then every thread's second
                chunk = chunk % threads * 2 + chunk // threads
            return part, first, chunk * step
        first += n_rows
        chunk -= n_chunks
    return 0, 0, 0

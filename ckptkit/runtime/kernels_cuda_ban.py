"""Logits of tokens that must not come to minus infinity, before a token is picked."""

# mypy: ignore-errors
from __future__ import annotations

import math

from numba import cuda

from .cuda_plan import Ban
from .cuda_ptx import f32, i32, load_i32, start_next, store_f32, u64, wait_for_previous

NEVER = -math.inf
ARGUMENTS = (u64,) * 2 + (i32, i32)


def kernel(p: Ban):
    """The kernel function of a Ban plan; grid (rows,). `ids` (n_ids,), the same of every row of logits (rows, n)."""
    THREADS, DEPENDENT = p.threads, p.dependent

    def ban(logits, ids, n_ids, n):
        row = i32(cuda.blockIdx.x)
        if DEPENDENT:
            wait_for_previous()
            start_next()
        for k in range(i32(cuda.threadIdx.x), n_ids, THREADS):
            token = load_i32(ids + u64(k) * u64(4))
            store_f32(logits + (u64(row) * u64(n) + u64(token)) * u64(4), f32(NEVER))

    return ban

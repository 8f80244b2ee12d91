# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""Norms and activations of rows, sixteen values at a time."""

from __future__ import annotations

from .kernels_cpu_args import (
    EPS,
    GAIN,
    GELU,
    LAYER,
    N_TOKENS,
    NONE,
    NORM,
    NORM_BIAS,
    OUT,
    OUT_STRIDE,
    RELU,
    X_STRIDE,
    K,
    X,
)
from .kernels_cpu_cache import kernel
from .kernels_cpu_team import take
from .simd import add, div, fma, inlined, maximum, mul, splat, sub, sum16
from .simd_exp import exp
from .simd_memory import get_f32, get_i64, load_f32, put_f32, store_f32


@kernel
def normalise(out, x, n, args):
    """The norm of one row of n values (or a copy), f32, as slots NORM to EPS say."""
    kind, gain, bias = get_i64(args + NORM), get_i64(args + GAIN), get_i64(args + NORM_BIAS)
    whole = n // 16 * 16
    mean, scale = 0.0, 1.0
    if kind == LAYER:
        total = splat(0.0)
        for i in range(0, whole, 16):
            total = add(total, load_f32(x + 4 * i))
        mean = sum16(total)
        for i in range(whole, n):
            mean += get_f32(x + 4 * i)
        mean /= n
    if kind != NONE:
        total = splat(0.0)
        for i in range(0, whole, 16):
            d = sub(load_f32(x + 4 * i), splat(mean))
            total = fma(d, d, total)
        square = sum16(total)
        for i in range(whole, n):
            square += (get_f32(x + 4 * i) - mean) ** 2
        scale = 1.0 / (square / n + get_f32(args + EPS)) ** 0.5
    for i in range(0, whole, 16):
        y = mul(sub(load_f32(x + 4 * i), splat(mean)), splat(scale))
        if gain != 0:
            y = mul(y, load_f32(gain + 4 * i))
        if bias != 0:
            y = add(y, load_f32(bias + 4 * i))
        store_f32(out + 4 * i, y)
    for i in range(whole, n):
        y1 = (get_f32(x + 4 * i) - mean) * scale
        if gain != 0:
            y1 *= get_f32(gain + 4 * i)
        if bias != 0:
            y1 += get_f32(bias + 4 * i)
        put_f32(out + 4 * i, y1)


@inlined
def silu16(x):
    return div(x, add(splat(1.0), exp(sub(splat(0.0), x))))


@inlined
def gelu16(x):
    """x / 2 (1 + tanh(u)) = x / (1 + e**(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x**3)."""
    u = mul(mul(splat(-1.5957691216057308), x), fma(mul(splat(0.044715), x), x, splat(1.0)))
    return div(x, add(splat(1.0), exp(u)))


@inlined
def activate16(act, x):
    if act == GELU:
        return gelu16(x)
    if act == RELU:
        return maximum(x, splat(0.0))
    return x


@kernel
def norm_rows(ta, tb, tc, args, team, tid):
    """out (n, K) = norm(x); out may be x."""
    i = take(team)
    while i < get_i64(args + N_TOKENS):
        x = get_i64(args + X) + i * get_i64(args + X_STRIDE)
        normalise(get_i64(args + OUT) + i * get_i64(args + OUT_STRIDE), x, get_i64(args + K), args)
        i = take(team)

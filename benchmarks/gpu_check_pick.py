"""Picking and scoring kernels against numpy: -log p, banned tokens, draws against sampler.pick with the same number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime import kernels_cuda as k
from ckptkit.runtime import sampler
from ckptkit.runtime.sampler import Sampling

from .gpu_check import Array, Finding, batch, compare, work

SETTINGS = (
    Sampling(), Sampling(top_k=1), Sampling(top_k=128, top_p=1.0, min_p=0.0, temp=1.7), Sampling(top_p=0.5, temp=0.3),
    Sampling(top_k=100, top_p=0.0), Sampling(min_p=0.4), Sampling(logit_bias={0: float("-inf"), 7: float("-inf")}),
)  # fmt: skip


def picks(rng: np.random.Generator) -> Iterator[Callable[[], Finding]]:
    """Every kernel, every sampling, logits of every kind."""
    for n in (1, 31, 1000, 50257, 151936):
        yield lambda n=n: scores(rng, n)
        yield lambda n=n: hopeless(rng, n)
        for settings in SETTINGS:
            if settings.logit_bias and n < 8:
                continue
            for kind in ("spread", "ties", "rising", "flat", "one") + (("holes",) if n > 1 else ()):
                yield lambda n=n, s=settings, kind=kind: draws(rng, n, s, kind)


def some_logits(rng: np.random.Generator, n: int, kind: str) -> Array:
    """Logits (3, n): scattered, a few values many times over, sorted, all equal, NaN among them, one far above."""
    z = (4 * rng.standard_normal((3, n))).astype(np.float32)
    if kind == "ties":
        z = np.round(z * 4) / 4
    elif kind == "rising":
        z = np.sort(z, axis=1)
    elif kind == "flat":
        z[:] = 1.5
    elif kind == "holes":
        z[rng.random(z.shape) < 0.3] = np.nan
    elif kind == "one":
        z[:, n // 3] = 90
    return z


def draws(rng: np.random.Generator, n: int, s: Sampling, kind: str) -> Finding:
    """Three rows at other positions, the last at its cache's end, twice: tokens drawn, tokens fed back, positions."""
    context, starts = 8, np.array([0, 3, 7])
    z, wrong = some_logits(rng, n, kind), 0
    b = batch(work(), tokens=[5, 6, 7], pos=starts)
    numbers = rng.random((3, k.SAMPLE_SETTINGS + context + 1))
    numbers[:, : k.SAMPLE_SETTINGS] = s.temp, s.top_p, s.min_p
    held, log = gpu.upload(numbers), gpu.upload(np.full((3, context + 1), -2, np.int32))
    banned = gpu.upload(np.array(list(s.logit_bias), np.int32)) if s.logit_bias else None
    for _turn in range(2):
        b.logits = gpu.upload(z)
        k.write(b.pos, starts)
        if banned is not None:
            k.ban(b, banned)
        k.sample(b, log, held, s.top_k)
    got, fed, pos = gpu.download(log), gpu.download(b.tokens), gpu.download(b.pos)
    for row, start in enumerate(starts):
        draw: Any = SimpleNamespace(random=lambda r=row, p=start: numbers[r, k.SAMPLE_SETTINGS + p + 1])
        want, found = sampler.pick(z[row], [], s, draw), int(got[row, start + 1])
        if found == -1:  # left to the host, which only these may be
            wrong += (
                kind not in ("flat", "ties", "holes") or (n <= k.SAMPLE_ROOM and kind != "holes") or fed[row] != 5 + row
            )
        else:
            wrong += found != want or fed[row] != want or pos[row] != min(start + 1, context - 1)
    wrong += int((got != -2).sum()) != 3
    return Finding(f"sample {n} {kind} {s}", float(wrong), 0.0)


def scores(rng: np.random.Generator, n: int) -> Finding:
    """-log p of rows near and far from zero, nearly certain, and with tokens that cannot be."""
    z = (3 * rng.standard_normal((6, n))).astype(np.float32)
    z[1] += 30_000
    z[2, 0] = 60
    z[3, rng.random(n) < 0.5] = -np.inf
    targets = rng.integers(0, n, 6)
    targets[2], z[3, targets[3]] = 0, 1.0
    out = gpu.zeros((6,), np.float64)
    k.nll(out, gpu.upload(z), gpu.upload(targets.astype(np.int32)), batch(work()))
    wide = z.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    want = np.log(np.exp(wide - top).sum(axis=1)) + top[:, 0] - wide[np.arange(6), targets]
    return compare(f"nll {n}", gpu.download(out), want, 1e-6, 1.0)


def hopeless(rng: np.random.Generator, n: int) -> Finding:
    """Logits of no use give a score that is not finite: NaN, infinity, a target that cannot be."""
    z = rng.standard_normal((4, n)).astype(np.float32)
    z[0, n // 2], z[1, n // 2], z[2], z[3, 0] = np.nan, np.inf, -np.inf, -np.inf
    out = gpu.zeros((4,), np.float64)
    k.nll(out, gpu.upload(z), gpu.zeros((4,), np.int32), batch(work()))
    return Finding(f"nll {n} of no use", float(np.isfinite(gpu.download(out)).sum()), 0.0)

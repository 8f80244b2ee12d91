"""CUDA kernels of attention on the simulated card against float64: splits and their joining, tiles, caches, pairings,
sequences side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cudasim.driver import simulated

from benchmarks import gpu_check
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime import cuda_plan
from ckptkit.runtime import kernels_cuda as k

F32, F16 = np.float32, np.float16
KINDS = [("", (F32, F32)), ("adjacent", (F16, F32)), ("half", (F16, F16)), ("half", (F32, F16))]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 positions, blocks of two warps."""
    monkeypatch.setattr(k, "SPAN", 32)
    monkeypatch.setattr(k, "Attention", lambda *a, **how: cuda_plan.Attention(*a, **{**how, "threads": 64}))
    monkeypatch.setattr(k, "StoreKV", partial(cuda_plan.StoreKV, threads=32))


def check(finding: gpu_check.Finding) -> None:
    assert finding.ok, finding


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize(("n_head", "n_kv", "head_dim"), [(1, 1, 8), (3, 1, 24), (4, 2, 33), (2, 2, 80)])
def test_one_token_after_others(n_head: int, n_kv: int, head_dim: int, kind: int) -> None:
    """Caches around the ends of a split, of a vector and of a warp's share."""
    pairing, types = KINDS[kind]
    pairing = pairing if head_dim % 2 == 0 else ""
    past = (0, 31, 32, 75)[(kind + n_head) % 4]
    with simulated(((9, 0), (7, 5))[kind % 2], processors=4 * n_head):
        check(gpu_check.attention(np.random.default_rng(past), n_head, n_kv, head_dim, past, 1, pairing, types))


def test_splits_are_joined() -> None:
    with simulated(processors=20):
        for past in (20, 140):
            check(gpu_check.attention(np.random.default_rng(past), 4, 2, 16, past, 1, "half", (F32, F32)))
            check(gpu_check.attention(np.random.default_rng(past), 4, 2, 16, past, 2, "adjacent", (F16, F16)))


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize(("n_head", "n_kv", "head_dim"), [(1, 1, 8), (3, 1, 24), (2, 1, 40)])
def test_long_caches(n_head: int, n_kv: int, head_dim: int, kind: int) -> None:
    """The kernel for them, at short ones: tiles of 16, splits of several."""
    pairing, types = KINDS[kind]
    past, n = ((0, 1), (15, 1), (16, 2), (90, 1))[(kind + n_head) % 4]
    with simulated(processors=3):
        rng = np.random.default_rng(past)
        check(gpu_check.attention(rng, n_head, n_kv, head_dim, past, n, pairing, types, deep_from=0))


@pytest.mark.parametrize(("n_head", "head_dim", "kind"), [(1, 8, 0), (1, 8, 1), (1, 8, 2), (1, 8, 3), (2, 24, 3)])
def test_many_tokens(n_head: int, head_dim: int, kind: int) -> None:
    pairing, types = KINDS[kind]
    past, n = ((0, 17), (50, 20), (3, 66), (63, 17))[(kind + n_head) % 4]
    with simulated():
        check(gpu_check.attention(np.random.default_rng(past), n_head, 1, head_dim, past, n, pairing, types))


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize(("n_head", "n_kv", "head_dim"), [(1, 1, 8), (2, 1, 40)])
def test_many_tokens_on_the_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, n_head: int, n_kv: int, head_dim: int, kind: int
) -> None:
    work = gpu_check.work
    monkeypatch.setattr(gpu_check, "work", lambda **more: work(**more, fast=True))
    pairing, types = KINDS[kind]
    past, n = ((0, 17), (50, 20), (3, 66), (63, 17))[(kind + n_head) % 4]
    with simulated((8, 0)):
        found = gpu_check.attention(np.random.default_rng(past), n_head, n_kv, head_dim, past, n, pairing, types)
    assert 1e-6 < found.error < 2e-3, found  # queries, keys and weights are rounded to 11 bits


def two_sequences(n: int, types: Any, limit: float, **how: Any) -> None:
    """`n` tokens of two sequences in one batch, each after what its own cache holds."""
    rng, n_head, n_kv, d, width, context = np.random.default_rng(n), 2, 1, 12, 16, 60
    caches = [np.zeros((2, n_kv, context, width), t) for t in types]
    for cache in caches:
        cache[..., :d] = rng.standard_normal((2, n_kv, context, d))
    first = n // 3
    seq = np.array([1] * first + [0] * (n - first))
    pos = np.concatenate([30 + np.arange(first), 3 + np.arange(n - first)])
    qkv = rng.standard_normal((n, (n_head + 2 * n_kv) * d)).astype(np.float32)
    slack = np.zeros(16 * width)
    keys, values = (
        gpu.upload(np.concatenate([c.reshape(-1), slack]).astype(c.dtype))[: c.size].reshape(c.shape) for c in caches
    )
    out = gpu.upload(np.full((n, n_head * d), np.nan, np.float32))
    batch = gpu_check.batch(gpu_check.work(reach=context, n_head=n_head, **how), pos=pos, seq=seq)
    k.attention(out, gpu.upload(qkv), None, "", keys, values, batch)
    parts = qkv.reshape(n, n_head + 2 * n_kv, d).astype(np.float64)
    for i in range(n):
        for cache, at in zip(caches, (n_head, n_head + n_kv), strict=True):
            cache[seq[i], :, pos[i], :d] = parts[i, at : at + n_kv]
    got, stored = gpu.download(out).reshape(n, n_head, d), [gpu.download(b) for b in (keys, values)]
    for i in range(n):
        for h in range(n_head):
            seen = [c[seq[i], h * n_kv // n_head, : pos[i] + 1, :d].astype(np.float64) for c in caches]
            s = seen[0] @ parts[i, h] / np.sqrt(d)
            p = np.exp(s - s.max())
            np.testing.assert_allclose(got[i, h], p / p.sum() @ seen[1], rtol=0, atol=limit)
    for ours, theirs in zip(stored, caches, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("types", [(F32, F32), (F16, F16)])
def test_sequences_side_by_side(types: Any) -> None:
    with simulated(processors=4):
        two_sequences(5, types, 2e-6)
        two_sequences(5, types, 4e-6, deep_from=0)
        two_sequences(20, types, 2e-6)
        two_sequences(20, types, 2e-3, fast=True)

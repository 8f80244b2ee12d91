"""CPU kernels against float64 numpy: every type that runs as stored, odd shapes, one token and many, both
precisions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from runtime_models import random_blocks

from ckptkit.quant.types import BLOCKS, QType
from ckptkit.runtime import kernels_cpu as k
from ckptkit.runtime.kv_cache import KVCache
from ckptkit.runtime.weights import Norm
from ckptkit.tensor import from_array

TYPES = sorted(k.NATIVE)
PLAIN = (QType.F32, QType.F16, QType.BF16)


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "fast"])
def work(request):
    w = k.workspace(
        threads=2, fast=request.param, max_tokens=128, widest=1024, head_dim=64, n_head=8, n_kv_head=2, context=640
    )
    yield w
    w.close()


def batch(work, **arrays):
    return SimpleNamespace(work=work, **{n: np.asarray(a, np.int32) for n, a in arrays.items()})


def limit(work, type, scale, n=2):
    """float32 sums; where fast rounds activations (and block weights) to bf16, one part in 2**8 of each product; where
    it rounds those of one token to 65,025 levels of their largest (below 6 here), half a level of each."""
    if n == 1:
        return scale * (6 / 65025 if work.bytes and type not in PLAIN else 2e-5)
    return scale * (2e-2 if work.bf16 and type not in (QType.F32, QType.F16) else 2e-5)


@pytest.mark.parametrize("type", TYPES, ids=[t.name for t in TYPES])
@pytest.mark.parametrize("n", [1, 2, 7, 33, 65])
def test_norm_linear(work, type, n):
    step = 1 if type in PLAIN else BLOCKS[type].elements
    rng = np.random.default_rng(n)
    for rows, columns in [(1, 2 * step), (31, 3 * step), (110, 1 * step)] + ([(33, 37), (49, 79)] if step == 1 else []):
        t, w = random_blocks(type, (rows, columns), 1 / np.sqrt(columns), seed=rows)
        bias = rng.standard_normal(rows).astype(np.float32)
        weight = k.place([t], None)
        weight.bias = bias
        x = rng.standard_normal((n, columns)).astype(np.float32)
        gain = rng.uniform(0.5, 1.5, columns).astype(np.float32)
        out = np.full((n, rows), np.nan, np.float32)
        k.norm_linear(out, x, Norm("rms", gain, None, 1e-5), weight, batch(work))
        h = x.astype(np.float64)
        h = h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-5) * gain
        np.testing.assert_allclose(out, h @ w.T + bias, rtol=0, atol=limit(work, type, 3, n))


@pytest.mark.parametrize("n", [1, 5, 40])
def test_groups_of_two_types_and_a_missing_bias(work, n):
    rng = np.random.default_rng(3)
    parts = [
        random_blocks(t, (rows, 256), 0.1, rows) for t, rows in [(QType.Q4_K, 50), (QType.Q6_K, 70), (QType.Q4_K, 9)]
    ]
    weight = k.place([t for t, _ in parts], None)
    assert [how for _, how, _ in weight.copied] == ["interleaved"] * 3
    x = rng.standard_normal((n, 256)).astype(np.float32)
    out = np.empty((n, 129), np.float32)
    k.norm_linear(out, x, None, weight, batch(work))
    expected = x.astype(np.float64) @ np.concatenate([w for _, w in parts]).T
    np.testing.assert_allclose(out, expected, rtol=0, atol=limit(work, QType.Q4_K, 5, n))


def test_types_without_kernels_are_decoded(work):
    w = np.random.default_rng(0).standard_normal((20, 256))
    weight = k.place([from_array(w, QType.F64)], None)
    assert weight.copied == [("F64", "decoded to F32", 20 * 256 * 4)]
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    out = np.empty((4, 20), np.float32)
    k.norm_linear(out, x, None, weight, batch(work))
    np.testing.assert_allclose(out, x.astype(np.float64) @ w.T, rtol=0, atol=2e-4)


@pytest.mark.parametrize("n", [1, 3, 70])
@pytest.mark.parametrize("act", ["silu_gate", "gelu_tanh", "relu"])
def test_norm_ffn(work, act, n):
    rng = np.random.default_rng(1)
    parts = [random_blocks(QType.F32, (83, 45), 0.3, seed) for seed in range(2 if act == "silu_gate" else 1)]
    x = rng.standard_normal((n, 45)).astype(np.float32)
    gain, bias = rng.uniform(0.5, 1.5, (2, 45)).astype(np.float32)
    out = np.empty((n, 83), np.float32)
    k.norm_ffn(out, x, Norm("layer", gain, bias, 1e-5), k.place([t for t, _ in parts], None), act, batch(work))
    h = x.astype(np.float64)
    h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5) * gain + bias
    y = h @ parts[0][1].T
    if act == "silu_gate":
        y = y / (1 + np.exp(-y)) * (h @ parts[1][1].T)
    elif act == "gelu_tanh":
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    else:
        y = np.maximum(y, 0)
    np.testing.assert_allclose(out, y, rtol=0, atol=3e-5)


@pytest.mark.parametrize("n", [1, 3, 70])
def test_linear_add_and_rows(work, n):
    rng = np.random.default_rng(2)
    t, w = random_blocks(QType.F16, (31, 64), 0.2)
    x, h = rng.standard_normal((n, 31)).astype(np.float32), rng.standard_normal((n, 64)).astype(np.float32)
    expected = x + h.astype(np.float64) @ w.T
    k.linear_add(x, h, k.place([t], None), batch(work))
    np.testing.assert_allclose(x, expected, rtol=0, atol=2e-5)
    rows = np.array([n - 1, 0], np.int32)[: min(n, 2)]
    out = np.empty((len(rows), 31), np.float32)
    k.norm_linear(out, h, None, k.place([t], None), batch(work), rows)
    np.testing.assert_allclose(out, h[rows].astype(np.float64) @ w.T, rtol=0, atol=2e-5)


def attention_truth(q, keys, values, pos):
    """q (n_head, hd), keys and values (n_kv, context, hd): one token that sees 0 .. pos."""
    group = len(q) // len(keys)
    out = np.empty_like(q)
    for h in range(len(q)):
        s = keys[h // group, : pos + 1] @ q[h] / np.sqrt(q.shape[1])
        p = np.exp(s - s.max())
        out[h] = p / p.sum() @ values[h // group, : pos + 1]
    return out


@pytest.mark.parametrize("kinds", ["f32 f32", "f16 f32", "f16 f16"])
@pytest.mark.parametrize(("n_head", "n_kv", "head_dim"), [(8, 2, 64), (3, 3, 20), (6, 1, 5)])
@pytest.mark.parametrize("n", [1, 13, 100])
def test_attention_of_sequences_that_grow(work, kinds, n_head, n_kv, head_dim, n):
    """Tokens of two sequences in one batch, against a cache that already holds others; several chunks and blocks
    long."""
    if work.bf16 or work.bytes:
        pytest.skip("attention is the same in both precisions")
    rng = np.random.default_rng(n)
    type_k, type_v = kinds.split()
    context = 640
    cache = KVCache(k, 1, 2, n_kv, context, head_dim, type_k, type_v)
    width = cache.k[0].shape[-1]
    held = rng.standard_normal((2, 2, n_kv, context, head_dim))
    cache.k[0][..., :head_dim], cache.v[0][..., :head_dim] = held
    assert width % 16 == 0
    first = n // 3  # tokens of sequence 0; the rest belong to 1
    seq = np.array([0] * first + [1] * (n - first))
    pos = np.concatenate([np.arange(first), 520 + np.arange(n - first)])
    qkv = rng.standard_normal((n, (n_head + 2 * n_kv) * head_dim)).astype(np.float32)
    out = np.empty((n, n_head * head_dim), np.float32)
    b = batch(work, pos=pos, seq=seq)
    k.attention(out, qkv, None, "", cache.k[0], cache.v[0], b)
    keys, values = (np.asarray(c[0][..., :head_dim], np.float64) for c in (cache.k, cache.v))
    parts = qkv.reshape(n, n_head + 2 * n_kv, head_dim).astype(np.float64)
    for i in range(n):
        where = seq[i], slice(None), pos[i]
        np.testing.assert_allclose(keys[where], parts[i, n_head : n_head + n_kv], rtol=1e-3 if type_k == "f16" else 0)
        np.testing.assert_allclose(values[where], parts[i, n_head + n_kv :], rtol=1e-3 if type_v == "f16" else 0)
        expected = attention_truth(parts[i, :n_head], keys[seq[i]], values[seq[i]], pos[i])
        np.testing.assert_allclose(out[i].reshape(n_head, head_dim), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("type", [QType.F32, QType.Q4_0, QType.Q6_K], ids=lambda t: t.name)
def test_the_same_bits_for_any_number_of_threads(type, fast):
    t, _ = random_blocks(type, (500, 512), 0.05)
    weight = k.place([t], None)
    x = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    results = []
    for threads in (1, 2, 5):
        w = k.workspace(
            threads=threads, fast=fast, max_tokens=64, widest=512, head_dim=64, n_head=8, n_kv_head=2, context=64
        )
        outs = [np.empty((n, 500), np.float32) for n in (1, 40)]
        for out in outs:
            k.norm_linear(out, x[: len(out)], None, weight, batch(w))
        results.append(outs)
        w.close()
    for outs in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(outs, results[0], strict=True))

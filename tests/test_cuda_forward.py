"""Whole small models on the simulated card against the float64 judges: launches, graphs, caches, weights and products
as `load(device="cuda")` puts them together."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cudasim.driver import simulated
from runtime_models import CONFIGS, checkpoint, random_blocks, truth

from ckptkit.errors import UnsupportedError
from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_plan, cuda_products, load
from ckptkit.runtime import kernels_cuda as k

IDS = np.random.default_rng(5).integers(0, 53, 22)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer threads, blocks and positions of a split than a card would want."""
    monkeypatch.setattr(k, "SPAN", 32)
    monkeypatch.setattr(k, "PICK_BLOCKS", 2)
    monkeypatch.setattr(k, "cut", lambda *_: cuda_plan.Cut(32, 2, 4, 1, 3))
    monkeypatch.setattr(k, "Attention", lambda *a, **how: cuda_plan.Attention(*a, **{**how, "threads": 64}))
    monkeypatch.setattr(k, "StoreKV", partial(cuda_plan.StoreKV, threads=32))
    for name in ("Norm", "Finish", "Decode"):
        monkeypatch.setattr(cuda_products, name, partial(getattr(cuda_plan, name), threads=32))


def small(arch: str, width: int = 36):
    """The judges' model with two heads of half of `width`."""
    n_kv = 1 if CONFIGS[arch].n_kv_head < CONFIGS[arch].n_head else 2
    sizes = {"n_embd": width, "n_head": 2, "n_kv_head": n_kv, "head_dim": width // 2, "n_ff": width + 32}
    return replace(CONFIGS[arch], vocab_size=53, **sizes)


@pytest.mark.parametrize("arch", CONFIGS)
def test_logits_are_the_judges(arch: str) -> None:
    """A prompt of many tokens, tokens one by one after it, a few at once; then the next tokens, picked on the card."""
    ck, values = checkpoint(small(arch))
    expected = truth(ck.config, values, IDS)
    with simulated() as card, load(ck, device="cuda", threads=1) as m:
        cache = m.new_cache()
        pieces = [m.forward(IDS[:18], cache)]
        pieces += [m.forward([i], cache, logits="last")[None] for i in IDS[18:20]]
        pieces.append(m.forward(IDS[20:], cache))
        np.testing.assert_allclose(np.concatenate(pieces), expected, rtol=0, atol=1e-4)
        assert card.machine.launch > 20


def test_blocks_and_a_cache_of_halves() -> None:
    def encode(_name: str, x: np.ndarray):
        return random_blocks(QType.Q8_0, x.shape, 1.5 / np.sqrt(x.shape[1])) if x.ndim == 2 else None

    ck, values = checkpoint(small("qwen2", 32), encode=encode)
    expected = truth(ck.config, values, IDS)
    with simulated((8, 0)), load(ck, device="cuda", threads=1, type_k="f16", type_v="f32") as m:
        cache = m.new_cache()
        got = [m.forward(IDS[:17], cache), m.forward([IDS[17]], cache, logits="last")[None]]
        np.testing.assert_allclose(np.concatenate(got), expected[:18], rtol=0, atol=2e-3 * np.abs(expected).max())


def test_greedy_tokens_are_picked_on_the_card() -> None:
    ck, values = checkpoint(small("llama"))
    with simulated() as card, load(ck, device="cuda", threads=1) as m:
        ids = m.generate(IDS[:3].tolist(), temp=0.0, n_predict=5).ids
        history = [*IDS[:3].tolist(), *ids]
        logits = truth(ck.config, values, np.array(history))
        assert len(ids) == 5
        for i, token in enumerate(ids):
            row = logits[2 + i]
            assert row[token] >= row.max() - 1e-3
        assert not card.machine.memory.pinned
    gc.collect()
    assert not card.sizes, "memory of the card is left"


def test_sequences_in_one_batch_give_what_each_gives_alone() -> None:
    ck, values = checkpoint(small("qwen2"))
    lengths = [4, 1, 14]
    with simulated(), load(ck, device="cuda", threads=1) as m:
        cache = m.new_cache(n_seq=3, context=16)
        tokens = np.concatenate([IDS[:n] for n in lengths])
        pos, seq = np.concatenate([np.arange(n) for n in lengths]), np.repeat(np.arange(3), lengths)
        rows = np.cumsum(lengths) - 1
        got = m.forward_batch(tokens, pos, seq, cache, rows)
        got_next = m.forward_batch([IDS[n] for n in lengths], lengths, range(3), cache, range(3))
    for i, n in enumerate(lengths):
        expected = truth(ck.config, values, IDS[: n + 1])
        np.testing.assert_allclose(got[i], expected[-2], rtol=0, atol=1e-4)
        np.testing.assert_allclose(got_next[i], expected[-1], rtol=0, atol=1e-4)


def test_a_card_too_small_is_refused_before_anything_is_sent() -> None:
    ck, _ = checkpoint(small("gpt2"))
    with simulated(memory_bytes=100_000) as card:
        with pytest.raises(UnsupportedError, match="does not fit") as e:
            load(ck, device="cuda", threads=1)
        assert "100,000" in str(e.value)
        assert card.free == 100_000

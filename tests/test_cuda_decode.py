"""Decoding loops on the simulated card: what it picks itself is what the host picks from its logits."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cudasim.driver import simulated

from benchmarks.gpu_shapes import random_model
from ckptkit import runtime
from ckptkit.checkpoint import Config
from ckptkit.errors import UnsupportedError
from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime import cuda_plan, generate
from ckptkit.runtime import kernels_cuda as k
from ckptkit.runtime.batch import generate_batch
from ckptkit.runtime.generate import GenerateOptions
from ckptkit.runtime.model import Model
from ckptkit.runtime.sampler import Sampler, Sampling

CONFIG = Config("gpt2", 12, 40, 1, 2, 2, 16, 16, 8)
GREEDY, DRAWN = Sampling(temp=0), Sampling(seed=3, top_k=20, temp=2.0)
BANNED = Sampling(seed=4, top_k=20, logit_bias={n: float("-inf") for n in range(0, 40, 2)})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    """One layer, a vocabulary of 40, few and small blocks."""
    monkeypatch.setattr(k, "PICK_BLOCKS", 4)
    for name in ("Bound", "Sample", "Nll", "Norm", "Pick", "Embed"):
        monkeypatch.setattr(k, name, partial(getattr(cuda_plan, name), threads=64 if name != "Embed" else 32))
    with simulated():
        ck = random_model(CONFIG, QType.F32, pool_values=1 << 12)
        with Model(ck, k, "cuda", "exact", 1, 12, "f32", "f32", None) as made:
            yield made


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "own_steps", lambda *_args: None)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, BANNED], ids=["greedy", "drawn", "banned"])
def test_tokens_are_the_hosts(model: Model, monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    """Until the context is full: five tokens, the last of which is not fed back."""
    options, prompt = GenerateOptions(sampling=sampling), [5, 6, 7, 8, 9, 10, 11, 12]
    own = generate.generate(model, prompt, options)
    on_the_host(monkeypatch)
    assert own.ids == generate.generate(model, prompt, options).ids
    assert (len(own.ids), own.stop_reason) == (5, "context")
    if sampling is BANNED:
        assert all(token % 2 for token in own.ids)


def test_tokens_that_the_card_leaves_to_the_host(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for fewer candidates than are drawn from: every token, and the draws still follow."""
    monkeypatch.setattr(k, "SAMPLE_ROOM", 8)
    options = GenerateOptions(4, sampling=DRAWN)
    own = generate.generate(model, [5, 6, 7, 8], options)
    on_the_host(monkeypatch)
    assert own.ids == generate.generate(model, [5, 6, 7, 8], options).ids


@pytest.mark.slow
def test_rows_side_by_side_are_those_alone(model: Model) -> None:
    """Three prompts of other lengths; one is full after two tokens, and the others go on."""
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [9, 8, 7]]
    options = GenerateOptions(4, sampling=DRAWN)
    together = generate_batch(model, prompts, options)
    for prompt, row in zip(prompts, together, strict=True):
        assert row.ids == generate.generate(model, prompt, options).ids


def test_scores_are_those_of_the_logits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of two rows of logits, after a batch of two sequences."""
    monkeypatch.setattr("ckptkit.runtime.model.SCORE_BYTES", 2 * 40 * 4)
    tokens, pos, seq = np.array([1, 2, 3, 4, 5, 6]), [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]
    rows, targets = [0, 2, 3, 4, 5], [7, 8, 9, 10, 11]
    scored = model.score_batch(tokens, pos, seq, model.new_cache(2), rows, targets)
    z = model.forward_batch(tokens, pos, seq, model.new_cache(2), rows).astype(np.float64)
    want = np.log(np.exp(z).sum(axis=1)) - z[np.arange(5), targets]
    np.testing.assert_allclose(scored, want, atol=1e-6)


def test_a_generation_that_is_broken_off_leaves_the_model_as_it_was(model: Model) -> None:
    """Ctrl-C while the host waits, in the caller or in the loop; then the same tokens as ever, and no memory held."""
    options = GenerateOptions(3, sampling=DRAWN)
    whole = generate.generate(model, [5, 6, 7, 8], options).ids
    cache = model.new_cache()
    sampler = Sampler(DRAWN)
    first = sampler.pick(model.forward([5, 6, 7, 8], cache, logits="last"), [])
    steps = model.decode(cache, first, sampler, [])
    assert [first, next(steps)] == whole[:2]
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)
    assert cache.length[0] == 5
    assert sampler.rng.random() == np.random.default_rng(3).random(3)[2]
    assert generate.generate(model, [5, 6, 7, 8], options).ids == whole


@pytest.mark.parametrize("n", [10, 4096, 4097, 20_001])
def test_downloads_come_in_pieces(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(gpu, "PIECE", 4096)
    with simulated():
        data = np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
        assert (gpu.download(gpu.upload(data)) == data).all()
        gpu.release_landing()


def test_a_model_beyond_the_memory_is_refused_before_any_is_taken() -> None:
    """Its matrices alone have 40 x 16 + 12 x 16 + 6 x 16 x 16 float32."""
    with simulated(memory_bytes=1 << 20):
        before = gpu.free_bytes()
        with pytest.raises(UnsupportedError, match="does not fit") as e:
            runtime.load(random_model(CONFIG, QType.F32, pool_values=1 << 12), "cuda")
        assert gpu.free_bytes() == before
    assert f"{before[0]:,} of {before[1]:,} bytes" in str(e.value)
    assert int(str(e.value.got).split()[0].replace(",", "")) > 4 * (40 * 16 + 12 * 16 + 6 * 16 * 16)

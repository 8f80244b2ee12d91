"""Picking and scoring on the simulated card, against numpy and against sampler.pick with the same random numbers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cudasim.driver import simulated

from benchmarks import gpu_check_pick
from ckptkit.runtime import cuda_plan
from ckptkit.runtime import kernels_cuda as k
from ckptkit.runtime.sampler import Sampling

NEVER = float("-inf")
SETTINGS = (
    Sampling(), Sampling(top_k=1, temp=0.1), Sampling(top_k=25, top_p=1.0, min_p=0.0, temp=1.7),
    Sampling(top_p=0.5), Sampling(min_p=0.4, top_p=0.0), Sampling(logit_bias={0: NEVER, 7: NEVER}),
)  # fmt: skip


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch):
    """Small blocks and few of them: 64 maxima, room for 100 tokens, at most 64 drawn from."""
    monkeypatch.setattr(k, "PICK_BLOCKS", 8)
    monkeypatch.setattr(k, "SAMPLE_ROOM", 100)
    monkeypatch.setattr(k, "SAMPLE_MOST", 64)
    for name in ("Bound", "Sample", "Nll"):
        monkeypatch.setattr(k, name, partial(getattr(cuda_plan, name), threads=64))
    with simulated():
        yield


@pytest.mark.parametrize("n", [1, 31, 600])
def test_scores(n: int) -> None:
    rng = np.random.default_rng(n)
    for finding in (gpu_check_pick.scores(rng, n), gpu_check_pick.hopeless(rng, n)):
        assert finding.ok, finding


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize(("n", "kind"), [(31, "spread"), (90, "flat"), (600, "spread"), (600, "ties"), (600, "one")])
def test_draws_are_the_hosts(n: int, kind: str, settings: Sampling) -> None:
    """Of tokens that all are candidates, of few among many, and of many equal ones."""
    finding = gpu_check_pick.draws(np.random.default_rng(n), n, settings, kind)
    assert finding.ok, finding


@pytest.mark.parametrize("kind", ["flat", "holes"])
def test_what_the_card_cannot_pick_is_left_to_the_host(kind: str) -> None:
    finding = gpu_check_pick.draws(np.random.default_rng(3), 1200, Sampling(), kind)
    assert finding.ok, finding

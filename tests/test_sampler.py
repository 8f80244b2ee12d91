"""The sampling steps against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ckptkit.errors import UnsupportedError
from ckptkit.runtime.sampler import Sampler, Sampling, penalise, pick, typical

P = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
LOGITS = np.log(P).astype(np.float32)


def drawn(n: int = 4000, **how: float) -> np.ndarray:
    """Shares of each token in n draws."""
    off = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampling, rng = Sampling(**{**off, **how}), np.random.default_rng(7)
    ids = [pick(LOGITS, [], sampling, rng) for _ in range(n)]
    return np.bincount(ids, minlength=5) / n


def test_all_steps_off_draws_the_distribution() -> None:
    np.testing.assert_allclose(drawn(20000), P, atol=0.015)


def test_top_k_keeps_the_k_likeliest_and_renormalises() -> None:
    np.testing.assert_allclose(drawn(20000, top_k=2), [2 / 3, 1 / 3, 0, 0, 0], atol=0.015)


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    assert (drawn(top_p=0.6) > 0).tolist() == [True, True, False, False, False]
    assert (drawn(top_p=0.4) > 0).tolist() == [True, False, False, False, False]


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert (drawn(min_p=0.2) > 0).tolist() == [True, True, True, False, False]


def test_temperature_comes_after_truncation_as_in_llama_cpp() -> None:
    """With temperature first, 10 would flatten the distribution and min-p 0.2 would keep all five."""
    shares = drawn(20000, temp=10.0, min_p=0.2)
    flat = P[:3] ** 0.1
    np.testing.assert_allclose(shares[:3], flat / flat.sum(), atol=0.015)
    assert not shares[3:].any()


def test_typical_keeps_the_tokens_nearest_to_the_entropy() -> None:
    """|surprise - entropy| is 0.56, 0.14, 0.65, 1.41, 2.26: the second token comes first, then the first."""
    surprise = -np.log(P)
    entropy = (P * surprise).sum()
    assert np.abs(surprise - entropy).argsort().tolist() == [1, 0, 2, 3, 4]
    assert typical(P, 0.2).tolist() == [1]
    assert typical(P, 0.7).tolist() == [1, 0]


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    z = np.array([2.0, -2.0, 3.0])
    penalise(z, [0, 1, 1], 2.0, 64)
    assert z.tolist() == [1.0, -4.0, 3.0]


@pytest.mark.parametrize(
    ("last_n", "expected"), [(1, [2, 2, 1.5]), (2, [2, 1, 1.5]), (-1, [1, 1, 1.5]), (0, [2, 2, 3])]
)
def test_repeat_penalty_looks_back_so_many_tokens(last_n: int, expected: list[float]) -> None:
    z = np.array([2.0, 2.0, 3.0])
    penalise(z, [0, 1, 2], 2.0, last_n)
    assert z.tolist() == expected


def test_temperature_zero_is_the_largest_logit_after_bias_and_penalty() -> None:
    rng = np.random.default_rng(0)
    assert pick(LOGITS, [], Sampling(temp=0), rng) == 0
    assert pick(LOGITS, [], Sampling(temp=0, logit_bias={0: float("-inf")}), rng) == 1
    assert pick(LOGITS, [0], Sampling(temp=0, repeat_penalty=9), rng) == 1


def test_same_seed_same_draws_other_seed_others() -> None:
    runs = []
    for seed in (5, 5, 6):
        sampler = Sampler(Sampling(seed=seed))
        runs.append([sampler.pick(LOGITS, []) for _ in range(50)])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "bad", [{"temp": -1}, {"top_p": 1.5}, {"min_p": -0.1}, {"typical": 0}, {"repeat_penalty": 0}, {"top_k": -1}]
)
def test_values_out_of_range_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(bad))):
        Sampling(**bad)

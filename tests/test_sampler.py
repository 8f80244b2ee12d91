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


def straightforward(logits: np.ndarray, history: list[int], s: Sampling, rng: np.random.Generator) -> int:
    """The order of the steps as the module states it, with everything sorted and float64."""
    z = logits.astype(np.float64)
    for token, bias in s.logit_bias.items():
        z[token] += bias
    penalise(z, history, s.repeat_penalty, s.repeat_last_n)
    ids = np.argsort(-z, kind="stable")
    ids = ids[: s.top_k] if s.top_k else ids
    ids = ids[~np.isnan(z[ids])]

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max())
        return e / e.sum()

    if s.typical < 1:
        ids = ids[typical(softmax(z[ids]), s.typical)]
        ids = ids[np.argsort(-z[ids], kind="stable")]
    p = softmax(z[ids])
    if s.top_p < 1:
        ids = ids[: int(np.searchsorted(np.cumsum(p), s.top_p) + 1)]
        p = softmax(z[ids])
    if s.min_p > 0:
        ids = ids[p >= s.min_p * p[0]]
    p = softmax(z[ids] / s.temp)
    return int(ids[min(int(np.searchsorted(np.cumsum(p), rng.random())), len(ids) - 1)])


@pytest.mark.parametrize("n", [1, 5, 1000, 5000, 70_000])
@pytest.mark.parametrize(
    "how",
    [
        {}, {"top_k": 1}, {"top_k": 300, "temp": 1.5, "min_p": 0.0}, {"top_k": 0, "top_p": 0.7}, {"typical": 0.8},
        {"logit_bias": {0: float("-inf")}, "repeat_penalty": 1.3}, {"top_k": 10**6, "top_p": 1.0, "min_p": 0.0},
    ],
)  # fmt: skip
def test_picks_are_those_of_sorting_everything(n: int, how: dict[str, float]) -> None:
    """Spread logits, many ties, NaN among them, all equal, rising and clustered: the same token, the same draws."""
    if n == 1 and "logit_bias" in how:
        return  # nothing is left to pick
    rng = np.random.default_rng(n)
    spread = (4 * rng.standard_normal(n)).astype(np.float32)
    holed = spread.copy()
    holed[rng.integers(0, n, n // 7)] = np.nan
    ties = rng.integers(-3, 3, n).astype(np.float32) * 0.25
    clustered = spread.copy()
    clustered[::1024] += 40
    ours, plain = np.random.default_rng(3), np.random.default_rng(3)
    for logits in (spread, ties, holed, np.zeros(n, np.float32), np.arange(n, dtype=np.float32) / n, clustered):
        for _ in range(3):
            got, want = (f(logits, [1 % n], Sampling(**how), r) for f, r in ((pick, ours), (straightforward, plain)))
            assert got == want
    assert ours.random() == plain.random()


def test_numbers_looked_at_ahead_are_those_that_picks_draw() -> None:
    one, other = Sampler(Sampling(seed=3)), Sampler(Sampling(seed=3))
    numbers = one.ahead(4)
    assert numbers.tolist() == other.rng.random(4).tolist()
    for _ in range(4):
        one.skip()
    assert one.pick(LOGITS, []) == other.pick(LOGITS, [])
    assert one.rng.random() == other.rng.random()


@pytest.mark.parametrize(
    "settings", [Sampling(), Sampling(top_k=0), Sampling(min_p=0.4), Sampling(typical=0.5), Sampling(temp=0)]
)
def test_nan_is_never_picked(settings: Sampling) -> None:
    z = np.full(20, np.nan, np.float32)
    z[[3, 11]] = 1.0, 0.5
    assert {pick(z, [], settings, np.random.default_rng(seed)) for seed in range(20)} <= {3, 11}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("settings", [Sampling(), Sampling(temp=0), Sampling(temp=0, repeat_penalty=1.1)])
def test_logits_of_which_the_largest_is_no_number_are_named(settings: Sampling, value: float) -> None:
    with pytest.raises(UnsupportedError, match="not numbers"):
        pick(np.full(50, value, np.float32), [], settings, np.random.default_rng(0))

"""Choosing the next token, in llama.cpp's order with its defaults (common.h, llama-sampler.cpp):

logit bias -> repeat penalty -> top-k -> typical -> top-p -> min-p -> temperature -> draw. A temperature of 0 is greedy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError

Floats = npt.NDArray[np.float64]
GROUPS = 1024  # maxima that give a lower bound of the k-th largest logit


@dataclass(frozen=True)
class Sampling:
    """What to do with the logits. A step is off at top_k 0, top_p 1, min_p 0, typical 1, repeat_penalty 1.

    A `seed` of -1 is as random as None, like llama.cpp's.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = {
            "temp": 0 <= self.temp < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 <= self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "typical": 0 < self.typical <= 1,
            "repeat_penalty": 0 < self.repeat_penalty < float("inf"),
            "repeat_last_n": self.repeat_last_n >= -1,
            "seed": self.seed is None or self.seed >= -1,
            "logit_bias": all(bias < float("inf") for bias in self.logit_bias.values()),
        }
        for name, good in checks.items():
            if not good:
                raise UnsupportedError(f"{name} is out of range", got=getattr(self, name))


class Sampler:
    """Sampling with a random state of its own: the same seed gives the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.rng = np.random.default_rng(None if sampling.seed == -1 else sampling.seed)

    def pick(self, logits: npt.NDArray[np.float32], history: Sequence[int]) -> int:
        """The next token; logits (vocab,), `history` the tokens so far, prompt included."""
        return pick(logits, history, self.sampling, self.rng)

    def ahead(self, n: int) -> Floats:
        """What the next `n` picks will draw from the random state, which stays as it is."""
        return copy.deepcopy(self.rng).random(n)

    def skip(self) -> None:
        """A token was picked elsewhere, with the number that `ahead` gave for it."""
        if self.sampling.temp > 0:
            self.rng.random()


def pick(logits: npt.NDArray[np.float32], history: Sequence[int], s: Sampling, rng: np.random.Generator) -> int:
    """Choose a token; a pure function of its arguments and the random state."""
    if s.temp == 0 and s.repeat_penalty == 1 and not s.logit_bias:
        return largest(logits)
    adjusted: npt.NDArray[np.floating[Any]] = logits
    if s.logit_bias or s.repeat_penalty != 1:
        adjusted = z = logits.astype(np.float64)
        for token, bias in s.logit_bias.items():
            z[token] += bias
        penalise(z, history, s.repeat_penalty, s.repeat_last_n)
        if s.temp == 0:
            return largest(z)
    ids = likeliest(adjusted, s.top_k)
    z = adjusted[ids].astype(np.float64)
    _check(z[0])
    if np.isnan(z[-1]):  # they come last
        ids, z = ids[~np.isnan(z)], z[~np.isnan(z)]
    if s.typical < 1:
        kept = typical(softmax(z), s.typical)
        kept = kept[np.argsort(-z[kept], kind="stable")]
        ids, z = ids[kept], z[kept]
    p = softmax(z)
    if s.top_p < 1:
        n = int(np.searchsorted(np.cumsum(p), s.top_p) + 1)
        ids, z = ids[:n], z[:n]
        p = softmax(z)
    if s.min_p > 0:
        likely = p >= s.min_p * p[0]
        ids, z = ids[likely], z[likely]
    p = softmax(z / s.temp)
    return int(ids[min(int(np.searchsorted(np.cumsum(p), rng.random())), len(ids) - 1)])


def largest(z: npt.NDArray[np.floating[Any]]) -> int:
    """Index of the largest logit, whatever is NaN left out."""
    i = int(z.argmax())  # NaN, where there is one
    if np.isnan(z[i]) and not np.isnan(z).all():
        i = int(np.nanargmax(z))
    _check(z[i])
    return i


def _check(best: np.floating[Any]) -> None:
    """Refuse logits of which the largest is no number: nothing can be chosen by them."""
    if not np.isfinite(best):
        raise UnsupportedError(
            "the model's logits are not numbers", got="NaN for every token" if np.isnan(best) else f"{best}",
            hint="`ckptkit inspect --stats` shows which tensor holds NaN or infinite values",
        )  # fmt: skip


def likeliest(z: npt.NDArray[np.floating[Any]], k: int) -> npt.NDArray[np.int64]:
    """Indices of the k largest logits, largest first, the lower index of equals; k 0: of all. NaN comes last.

    Of all logits only those are sorted that reach the k-th largest of GROUPS maxima, each of every GROUPS-th logit:
    no more than the k-th largest of all, and close to it.
    """
    n = len(z)
    if 0 < k < n:
        maxima = z[: n // GROUPS * GROUPS].reshape(-1, GROUPS).max(axis=0) if k <= GROUPS // 4 <= n // 16 else z
        least = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
        found = np.flatnonzero(z >= least)
        if len(found) >= k:  # fewer where NaN, which a partition takes for the largest, is among them
            return found[np.argsort(-z[found], kind="stable")[:k]]
    if z.dtype != np.float32 or np.isnan(z).any():
        return np.argsort(-z, kind="stable")[: k or n]
    # whole numbers sort in a tenth of the time: the logit's bits, made to rise as it falls, then its index
    bits = (np.float32(0) - z).view(np.int32)  # from 0, so that both zeros are one
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64) << 32 | np.arange(n)
    keys.sort()
    return (keys & 0xFFFFFFFF)[: k or n]


def penalise(z: Floats, history: Sequence[int], penalty: float, last_n: int) -> None:
    """Divide positive and multiply negative logits of recent tokens by the penalty, in place; last_n -1 means all."""
    if penalty == 1 or last_n == 0:
        return
    recent = np.unique(np.asarray(history if last_n < 0 else history[-last_n:], np.int64))
    z[recent] = np.where(z[recent] > 0, z[recent] / penalty, z[recent] * penalty)


def typical(p: Floats, mass: float) -> npt.NDArray[np.int64]:
    """Indices of the tokens whose surprise is nearest to the entropy, until they hold `mass` (Meister et al. 2022)."""
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = float((p[p > 0] * surprise[p > 0]).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    return order[: int(np.searchsorted(np.cumsum(p[order]), mass) + 1)]


def softmax(z: Floats) -> Floats:
    """Probabilities of logits."""
    e = np.exp(z - z.max())
    return np.asarray(e / e.sum())

"""The same ids through two models: how far their predictions are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint import Checkpoint
from ..quant.types import QType
from .limits import COARSE_KL, EXACT_LOGP, KL_LIMITS

Logits = npt.NDArray[np.float32]
Runner = Callable[[Checkpoint], Logits]
N_IDS = 64
SEED = 1


@dataclass(frozen=True)
class Predictions:
    """Differences over `tokens` positions, in nats. `limit` is on max_dlogp where `exact`, else on mean_kl."""

    tokens: int
    max_dlogp: float
    mean_kl: float
    max_kl: float
    top1_agree: int
    exact: bool
    limit: float
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return asdict(self)


def choose_ids(a: Checkpoint, b: Checkpoint) -> list[int]:
    """Ids that both vocabularies have, the same every time; as many as both contexts hold, N_IDS at most."""
    vocab = min(a.config.vocab_size, b.config.vocab_size)
    n = min(N_IDS, a.config.context_length, b.config.context_length)
    return [int(i) for i in np.random.PCG64(SEED).random_raw(n) % np.uint64(vocab)]


def runner(ids: Sequence[int], device: str = "cpu", threads: int | None = None) -> Runner:
    """A function that gives a checkpoint's logits (n, vocab) after each of `ids`, and leaves its files open."""

    def run(ck: Checkpoint) -> Logits:
        from ..runtime import load

        with load(replace(ck, files=()), device=device, threads=threads, context=len(ids)) as model:
            out: Logits = model.forward(list(ids), logits="all")
            return out

    return run


def log_p(row: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Log-probabilities of one row of logits, in float64."""
    z = row.astype(np.float64)
    z -= z.max()
    out: npt.NDArray[np.float64] = z - np.log(np.exp(z).sum())
    return out


def compare_logits(a: Logits, b: Logits, coarsest: QType | None) -> Predictions:
    """Compare (n, vocab) each; ids beyond the smaller vocabulary only count in the sums. `coarsest` None: exact."""
    n, vocab = len(a), min(a.shape[1], b.shape[1])
    worst, kls, agree = 0.0, np.empty(n), 0
    with np.errstate(all="ignore"):
        for i in range(n):
            p, q = log_p(a[i])[:vocab], log_p(b[i])[:vocab]
            worst = float(np.maximum(worst, np.abs(p - q).max()))  # NaN stays NaN
            if a.shape[1] != b.shape[1]:  # KL needs distributions over the same ids
                p, q = log_p(p), log_p(q)
            kls[i] = (np.exp(p) * (p - q)).sum()
            agree += int(a[i].argmax() == b[i].argmax())
    mean_kl = float(kls.mean())
    exact = coarsest is None
    limit = EXACT_LOGP if coarsest is None else KL_LIMITS.get(coarsest, COARSE_KL)
    ok = worst <= limit if exact else mean_kl <= limit
    return Predictions(n, worst, mean_kl, float(kls.max()), agree, exact, limit, bool(ok))


def coarsest_type(a: Checkpoint, b: Checkpoint, changed: Sequence[str]) -> QType | None:
    """The type with the widest KL limit among tensors whose values were changed; None if only float64 was rounded."""
    kinds = {ck.tensors[n].type for ck in (a, b) for n in changed if n in ck.tensors} - {QType.F32, QType.F64}
    if not kinds:
        return None  # float64 beside float32: the runtime rounds both to float32
    return max(kinds, key=lambda k: KL_LIMITS.get(k, COARSE_KL))

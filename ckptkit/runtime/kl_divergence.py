"""How far a model's predictions are from saved ones: what llama-perplexity --kl-divergence prints, from the same file.

For each token: KL(base || model) = sum of p_base * (log p_base - log p) over the entries with log p_base > -16;
Δp = p(token) - p_base(token); whether the likeliest tokens agree. Uncertainties are standard errors of means; that of a
ratio takes into account that both models saw the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .log_softmax import F32, F64, log_sums, over_blocks
from .logits_file import LogitsFile, decode
from .perplexity import N_BATCH, Progress, Scored, exp, score
from .perplexity_windows import Window, plan

CUT = np.float32(-16)
KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; None where there are too few tokens for one."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class KlReport:
    """The model (Q) against the saved log-probabilities (base). Probabilities as fractions, `kld` in nats."""

    tokens: int
    chunks: int
    n_ctx: int
    ppl: Estimate
    ppl_base: Estimate
    correlation: float | None
    log_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    kld_spread: dict[str, float]
    delta_p: Estimate
    delta_p_rms: Estimate
    delta_p_spread: dict[str, float]
    same_top: Estimate
    precision: str
    rule: str
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return asdict(self) | {"notes": list(self.notes)}


class Compare:
    """A sink that sets a model's logits against saved rows."""

    def __init__(self, base: LogitsFile, threads: int | None = None) -> None:
        self.base, self.threads = base, threads
        self.nll: list[F64] = []
        self.nll_base: list[F64] = []
        self.kld: list[F64] = []
        self.same_top = 0

    def take(self, number: int, window: Window, lo: int, logits: F32, nll: F64) -> None:
        """Compare one block of rows."""
        n = len(nll)
        stored = self.base.rows(number, lo, lo + n)
        targets = window.targets[lo : lo + n]
        kld, nll_base, same = np.empty(n), np.empty(n), np.empty(n, bool)

        def work(part: slice) -> None:
            z, log_base = logits[part], decode(stored[part], self.base.n_vocab)
            top, log_sum = log_sums(z)
            log_q = z - (top + log_sum)[:, None]  # float64
            p = np.where(log_base > CUT, np.exp(log_base), 0)
            kld[part] = (p * (log_base - log_q)).sum(axis=1)
            nll_base[part] = -log_base[np.arange(len(z)), targets[part]].astype(np.float64)
            same[part] = z.argmax(axis=1) == log_base.argmax(axis=1)

        over_blocks(work, n, logits.shape[1], self.threads)
        self.nll.append(nll.copy())
        self.nll_base.append(nll_base)
        self.kld.append(kld)
        self.same_top += int(same.sum())


def compare(
    model: Scored,
    base: LogitsFile,
    *,
    bos: int | None = None,
    n_batch: int = N_BATCH,
    progress: Progress | None = None,
) -> KlReport:
    """Run the file's own tokens through the model and compare; `bos` as for mode llama. Raises as `score` does."""
    base.check(model.config.vocab_size)
    sink = Compare(base, model.threads)
    # The windows are the file's, however few: the need for two of them is a rule for texts.
    whole = plan("llama", _AtLeastTwo(base), base.n_ctx, chunks=base.n_chunk, bos=bos)
    report = score(model, whole, n_batch=n_batch, sinks=(sink,), progress=progress)
    nll, nll_base, kld = (np.concatenate(part) for part in (sink.nll, sink.nll_base, sink.kld))
    return statistics(nll, nll_base, kld, sink.same_top, base, model.precision, report.rule, report.notes)


class _AtLeastTwo:
    """The ids of a file, said to be two windows long where there is but one."""

    def __init__(self, base: LogitsFile) -> None:
        self.ids, self.length = base.ids, max(len(base.ids), 2 * base.n_ctx)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Any:
        return self.ids[part]


def statistics(
    nll: F64,
    nll_base: F64,
    kld: F64,
    same_top: int,
    base: LogitsFile,
    precision: str,
    rule: str,
    notes: tuple[str, ...] = (),
) -> KlReport:
    """Means, errors and percentiles of what every token gave."""
    n = len(nll)
    delta = np.exp(-nll) - np.exp(-nll_base)
    q, b = mean(nll), mean(nll_base)
    both = ((nll * nll_base).mean() - nll.mean() * nll_base.mean()) / (n - 1) if n >= 10 else 0.0
    q_error, b_error = q.stderr or 0.0, b.stderr or 0.0
    ratio_error = math.sqrt(max(q_error**2 + b_error**2 - 2 * both, 0.0))
    log_ratio = q.value - b.value
    ppl, ppl_base = exp(q.value), exp(b.value)
    difference = math.sqrt(max((ppl * q_error) ** 2 + (ppl_base * b_error) ** 2 - 2 * ppl * ppl_base * both, 0.0))
    square = mean(delta**2)
    rms = math.sqrt(square.value)
    known = n > 10
    share = same_top / n
    return KlReport(
        tokens=n,
        chunks=base.n_chunk,
        n_ctx=base.n_ctx,
        ppl=Estimate(ppl, ppl * q_error if known else None),
        ppl_base=Estimate(ppl_base, ppl_base * b_error if known else None),
        correlation=float(both) / (q_error * b_error) if q_error and b_error else None,
        log_ratio=Estimate(log_ratio, ratio_error if known else None),
        ratio=Estimate(exp(log_ratio), exp(log_ratio) * ratio_error if known else None),
        difference=Estimate(ppl - ppl_base, difference if known else None),
        kld=mean(kld),
        kld_spread=spread(kld, KLD_PERCENTILES),
        delta_p=mean(delta),
        delta_p_rms=Estimate(rms, 0.5 / rms * square.stderr if rms and square.stderr is not None else None),
        delta_p_spread=spread(delta, DELTA_PERCENTILES),
        same_top=Estimate(share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None),
        precision=precision,
        rule=rule,
        notes=notes,
    )


def mean(values: F64) -> Estimate:
    """Mean and its standard error, given for more than ten values as the original gives it."""
    n = len(values)
    if n <= 10:
        return Estimate(float(values.mean()), None)
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(n - 1))


def spread(values: F64, percentiles: Sequence[float]) -> dict[str, float]:
    """Maximum, percentiles, median and minimum, from high to low; percentiles interpolate between neighbours."""
    at = sorted({*percentiles, 50.0}, reverse=True)
    inner = {f"p{p:g}" if p != 50 else "median": float(v) for p, v in zip(at, np.percentile(values, at), strict=True)}
    return {"max": float(values.max()), **inner, "min": float(values.min())}

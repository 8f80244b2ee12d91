"""How well a model predicts a text: one scorer for every convention, and the report that all of them fill.

nll is the mean of -log p in nats over the scored tokens, ppl = e^nll. The standard error is llama-perplexity's:
ppl * sqrt((mean(x^2) - mean(x)^2) / (n - 1)) over the tokens' x = -log p. Bits per byte divide by the bytes of the
scored tokens; control tokens (end of text) have none, though predicting them counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..arch import ARCHS
from ..checkpoint import Config
from ..errors import UnsupportedError
from .log_softmax import F32, F64, nll_rows
from .perplexity_tokens import TokenText
from .perplexity_windows import Ids, Plan, Window

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

N_BATCH = 2048  # ids in one forward call
LOGITS_BYTES = 256 << 20  # of logits held at a time where somebody wants to see them
Progress = Callable[[int, int, float], object]  # windows done, windows in all, perplexity so far


class Scored(Protocol):
    """The part of a Model that scoring needs."""

    config: Config
    tokenizer: Tokenizer | None
    precision: str
    threads: int
    context: int

    def new_cache(self, n_seq: int = 1, context: int | None = None) -> Any:
        """Room for the keys and values of `n_seq` windows."""

    def forward_batch(self, tokens: Ids, pos: Ids, seq: Ids, cache: Any, rows: Ids, head: int = 0) -> F32:
        """Logits (len(rows), vocab) of a prediction head after the ids at `rows`."""

    def score_batch(self, tokens: Ids, pos: Ids, seq: Ids, cache: Any, rows: Ids, targets: Ids, head: int = 0) -> F64:
        """-log p (len(rows),) of `targets` after the ids at `rows`, with few logits there at a time."""


class Sink(Protocol):
    """Something that wants the logits while they are there."""

    def take(self, number: int, window: Window, lo: int, logits: F32, nll: F64) -> None:
        """Logits (n, vocab) for targets lo .. lo + n of window `number`; windows come in order."""


@dataclass
class Tally:
    """Running sums over scored tokens, and after each window the perplexity so far."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    bytes: int = 0
    words: int = 0
    running: list[float] = field(default_factory=list)

    def add(self, nll: F64) -> None:
        """Count the -log p of some tokens."""
        self.tokens += len(nll)
        self.total += float(nll.sum())
        self.squares += float((nll * nll).sum())

    @property
    def mean(self) -> float:
        """Mean nll in nats; nan before the first token."""
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def error(self) -> float | None:
        """Standard error of the mean nll; None for fewer than two tokens."""
        if self.tokens < 2:
            return None
        return math.sqrt(max(self.squares / self.tokens - self.mean**2, 0.0) / (self.tokens - 1))


@dataclass(frozen=True)
class PplReport:
    """What was scored by which rule, and how it came out. None: not known (no tokenizer, too few tokens)."""

    mode: str
    tokens: int
    nll: float
    ppl: float
    stderr: float | None
    bits_per_byte: float | None
    tokens_per_word: float | None
    bytes: int | None
    n_ctx: int
    stride: int | None
    chunks: int
    precision: str
    rule: str
    notes: tuple[str, ...] = ()
    running: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        body = asdict(self)
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in body.items()}
        return finite | {"notes": list(self.notes), "running": [v if math.isfinite(v) else None for v in self.running]}


def exp(nll: float) -> float:
    """e^nll, infinite where a float cannot hold it."""
    return math.exp(nll) if nll < 709 else math.inf


def score(
    model: Scored,
    plan: Plan,
    *,
    n_batch: int = N_BATCH,
    logits_bytes: int = LOGITS_BYTES,
    sinks: Sequence[Sink] = (),
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> PplReport:
    """Score a plan's windows, as many at a time as fit `n_batch` ids, and with sinks `logits_bytes` of logits.

    Raises UnsupportedError for a window longer than a learned position table, for an id that is not in the vocabulary,
    and for a logit that is not finite.
    """
    said = [*notes, *check_context(model, plan.n_ctx)]
    tally, text = Tally(), TokenText(model.tokenizer) if model.tokenizer is not None else None
    for number, window, nll in nll_windows(
        model,
        plan.windows(),
        plan.longest,
        plan.count,
        n_batch=n_batch,
        logits_bytes=logits_bytes,
        sinks=sinks,
        head=plan.ahead,
    ):
        tally.add(nll)
        if text is not None:
            n_bytes, n_words = text.count(int(window.ids[window.first]), window.targets)
            tally.bytes += n_bytes
            tally.words += n_words
        tally.running.append(exp(tally.mean))
        if progress is not None:
            progress(number + 1, plan.count, tally.running[-1])
    return _report(model, plan, tally, text is not None, tuple(said))


def _report(model: Scored, plan: Plan, tally: Tally, has_text: bool, notes: tuple[str, ...]) -> PplReport:
    ppl, error = exp(tally.mean), tally.error
    return PplReport(
        mode=plan.mode,
        tokens=tally.tokens,
        nll=tally.mean,
        ppl=ppl,
        stderr=None if error is None else ppl * error,
        bits_per_byte=tally.total / math.log(2) / tally.bytes if has_text and tally.bytes else None,
        tokens_per_word=tally.tokens / tally.words if has_text and tally.words else None,
        bytes=tally.bytes if has_text else None,
        n_ctx=plan.n_ctx,
        stride=plan.stride if plan.mode == "stride" else None,
        chunks=plan.count,
        precision=model.precision,
        rule=plan.rule,
        notes=notes,
        running=tuple(tally.running),
    )


def check_context(model: Scored, n_ctx: int) -> list[str]:
    """Refuse windows longer than a position table or than the model was loaded for; note those longer than trained."""
    config = model.config
    arch, trained = ARCHS.get(config.arch), config.context_length
    learned = arch is not None and arch.position == "learned"
    if n_ctx > model.context or (learned and n_ctx > trained):
        most = min(model.context, trained) if learned else model.context
        raise UnsupportedError(
            "the window is longer than " + ("the model's position table" if learned else "the context"), at="-c",
            expected=f"at most {most:,}", got=f"{n_ctx:,}",
            hint=f"pass -c {most}" if learned else "load the model with a longer context",
        )  # fmt: skip
    if n_ctx <= trained:
        return []
    return [f"windows of {n_ctx:,} tokens are longer than the trained context of {trained:,}"]


def nll_windows(
    model: Scored,
    windows: Iterator[Window],
    longest: int,
    count: int,
    *,
    n_batch: int = N_BATCH,
    logits_bytes: int = LOGITS_BYTES,
    sinks: Sequence[Sink] = (),
    head: int = 0,
) -> Iterator[tuple[int, Window, F64]]:
    """(number, window, -log p of its targets) in order. Windows share a forward call while ids and logits fit."""
    n_vocab = model.config.vocab_size
    max_rows = max(1, logits_bytes // (4 * max(n_vocab, 1))) if sinks else n_batch
    n_seq = max(1, min(n_batch // max(longest, 1), count))
    cache = model.new_cache(n_seq=n_seq, context=longest)
    group: list[Window] = []
    done = 0
    for window in windows:
        _check_ids(window, n_vocab)
        rows = sum(len(w.targets) for w in group) + len(window.targets)
        if group and (len(group) == n_seq or rows > max_rows):
            yield from _group(model, group, done, cache, n_batch, max_rows, sinks, head)
            done, group = done + len(group), []
        group.append(window)
    if group:
        yield from _group(model, group, done, cache, n_batch, max_rows, sinks, head)


def _check_ids(window: Window, n_vocab: int) -> None:
    for ids in (window.ids, window.targets):
        if len(ids) and (ids.min() < 0 or ids.max() >= n_vocab):
            bad = int(ids[(ids < 0) | (ids >= n_vocab)][0])
            raise UnsupportedError(
                "a token is not in the model's vocabulary", expected=f"an id below {n_vocab:,}", got=bad,
                hint="the ids were made with another tokenizer than the model's",
            )  # fmt: skip


def _group(
    model: Scored,
    group: list[Window],
    done: int,
    cache: Any,
    n_batch: int,
    max_rows: int,
    sinks: Sequence[Sink],
    head: int,
) -> Iterator[tuple[int, Window, F64]]:
    """Feed some windows, each in a sequence of its own; a window alone may need several calls for its ids and rows."""
    nll = [np.empty(len(w.targets)) for w in group]
    for spans in _calls(group, n_batch, max_rows):
        tokens = np.concatenate([group[s].ids[lo:hi] for s, lo, hi in spans])
        pos = np.concatenate([np.arange(lo, hi, dtype=np.int32) for _, lo, hi in spans])
        seq = np.concatenate([np.full(hi - lo, s, np.int32) for s, lo, hi in spans])
        rows = np.flatnonzero(pos >= np.array([w.first for w in group])[seq]).astype(np.int32)
        wanted = [(s, max(lo, group[s].first), hi) for s, lo, hi in spans if hi > group[s].first]
        targets = [group[s].targets[lo - group[s].first : hi - group[s].first] for s, lo, hi in wanted]
        joined = np.concatenate(targets) if wanted else np.empty(0, np.int32)
        if sinks:
            logits = model.forward_batch(tokens, pos, seq, cache, rows, head)
            scored = nll_rows(logits, joined, model.threads)
        else:
            scored = model.score_batch(tokens, pos, seq, cache, rows, joined, head)
        at = 0
        for s, lo, hi in wanted:
            w, part = group[s], slice(at, at + hi - lo)
            at += hi - lo
            lo -= w.first
            nll[s][lo : hi - w.first] = scored[part]
            _check_finite(scored[part], w.start + lo)
            for sink in sinks:
                sink.take(done + s, w, lo, logits[part], scored[part])
    yield from ((done + s, w, nll[s]) for s, w in enumerate(group))


def _calls(group: list[Window], n_batch: int, max_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """What each forward call holds: (sequence, from, to) of every window in it."""
    if len(group) > 1:
        yield [(s, 0, len(w.ids)) for s, w in enumerate(group)]
        return
    w, lo = group[0], 0
    while lo < len(w.ids):
        hi = min(lo + n_batch, max(lo, w.first) + max_rows, len(w.ids))
        yield [(0, lo, hi)]
        lo = hi


def _check_finite(nll: F64, start: int) -> None:
    bad = np.flatnonzero(~np.isfinite(nll))
    if len(bad):
        raise UnsupportedError(
            "the model's logits are not finite", at=f"the prediction of token {start + int(bad[0]):,}",
            got=f"-log p = {float(nll[bad[0]])}",
            hint="`ckptkit inspect --stats` shows which tensor holds NaN or infinite values",
        )  # fmt: skip

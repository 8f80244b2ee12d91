"""Multiple choice: which of the completions does a model find likeliest after the context (HellaSwag, MMLU)?

As llm.c judges: the choice is the completion with the smallest mean -log p of its tokens (acc_norm), the first
of equals. `acc` is by the sum instead, which favours short completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedError
from .perplexity import N_BATCH, Progress, Scored, nll_windows
from .perplexity_windows import Ids, Window, ints


class Question(Protocol):
    """Ids of a context and of its possible completions, of which `label` is the right one."""

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def label(self) -> int: ...  # noqa: D102
    @property
    def context(self) -> Ids: ...  # noqa: D102
    @property
    def completions(self) -> Sequence[Ids]: ...  # noqa: D102


@dataclass(frozen=True)
class ChoiceReport:
    """Right answers among `examples`; `acc_norm` by mean, `acc` by sum; `chance` is what guessing would give."""

    examples: int
    tokens: int
    correct: int
    acc_norm: float
    stderr: float | None
    acc: float
    chance: float
    precision: str
    rule: str
    answers: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return asdict(self) | {"answers": list(self.answers)}


def choose(
    model: Scored,
    questions: Sequence[Question],
    *,
    limit: int | None = None,
    n_batch: int = N_BATCH,
    progress: Progress | None = None,
) -> ChoiceReport:
    """Answer the first `limit` questions; `progress` gets acc_norm so far.

    Raises UnsupportedError for a question that does not fit the model's context, and when there is none to answer.
    """
    asked = list(questions[:limit] if limit is not None and limit > 0 else questions)
    if not asked:
        raise UnsupportedError("there is no question to answer", expected="at least one example")
    longest = max(len(q.context) + len(c) for q in asked for c in q.completions)
    room = model.config.context_length
    if room and longest > room:
        worst = next(q for q in asked if any(len(q.context) + len(c) == longest for c in q.completions))
        raise UnsupportedError(
            "an example is longer than the model's context", at=f"example {worst.index}",
            expected=f"at most {room:,} tokens", got=f"{longest:,}",
        )  # fmt: skip
    n_windows = sum(len(q.completions) for q in asked)
    scored = nll_windows(model, _windows(asked), longest, n_windows, n_batch=n_batch)
    answers, by_mean, by_sum, tokens = [], 0, 0, 0
    for k, q in enumerate(asked):
        losses = [next(scored)[2] for _ in q.completions]
        answers.append(int(np.argmin([x.mean() for x in losses])))
        by_mean += answers[-1] == q.label
        by_sum += int(np.argmin([x.sum() for x in losses])) == q.label
        tokens += sum(map(len, losses))
        if progress is not None:
            progress(k + 1, len(asked), by_mean / (k + 1))
    n, acc = len(asked), by_mean / len(asked)
    return ChoiceReport(
        examples=n,
        tokens=tokens,
        correct=by_mean,
        acc_norm=acc,
        stderr=math.sqrt(acc * (1 - acc) / (n - 1)) if n > 1 else None,
        acc=by_sum / n,
        chance=sum(1 / len(q.completions) for q in asked) / n,
        precision=model.precision,
        rule="the completion with the smallest mean -log p of its tokens is the answer (llm.c)",
        answers=tuple(answers),
    )


def _windows(asked: Sequence[Question]) -> Iterator[Window]:
    for q in asked:
        for completion in q.completions:
            ids = np.concatenate([ints(q.context), ints(completion)])
            first = len(q.context) - 1  # the last context token predicts the first of the completion
            yield Window(ids[:-1], first, ints(completion), first + 1)

"""Multiple choice as llm.c judges it, on questions whose answers are worked out beside them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_perplexity import CONTEXT, Table

from ckptkit import score as scoring
from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.runtime.hellaswag import choose


def questions(n: int, seed: int = 3) -> list[Any]:
    r = np.random.default_rng(seed)
    return [
        SimpleNamespace(
            index=i,
            label=int(r.integers(4)),
            context=r.integers(0, 256, r.integers(1, 12)),
            completions=tuple(r.integers(0, 256, r.integers(1, 9)) for _ in range(4)),
        )
        for i in range(n)
    ]


def judge(m: Table, q: Any) -> list[np.ndarray]:
    """-log p of each completion's tokens after the context, each pair alone."""
    out = []
    for c in q.completions:
        ids = [*q.context.tolist(), *c.tolist()]
        out.append(m.nll(ids[:-1], ids[1:])[len(q.context) - 1 :])
    return out


@pytest.mark.parametrize("n_batch", [1, 40, 2048])
def test_answer_is_the_smallest_mean(n_batch: int) -> None:
    m, asked = Table(), questions(40)
    told: list[Any] = []
    r = choose(m, asked, n_batch=n_batch, progress=lambda *a: told.append(a))
    losses = [judge(m, q) for q in asked]
    by_mean = [int(np.argmin([x.mean() for x in each])) for each in losses]
    by_sum = [int(np.argmin([x.sum() for x in each])) for each in losses]
    right = sum(a == q.label for a, q in zip(by_mean, asked, strict=True))
    assert by_mean != by_sum  # the questions can tell the two apart
    assert list(r.answers) == by_mean
    assert (r.examples, r.correct, r.acc_norm) == (40, right, right / 40)
    assert r.acc == sum(a == q.label for a, q in zip(by_sum, asked, strict=True)) / 40
    assert r.tokens == sum(len(c) for q in asked for c in q.completions)
    assert r.chance == 0.25
    assert told[-1] == (40, 40, r.acc_norm)
    json.dumps(r.as_dict(), allow_nan=False)


def test_first_of_equals_is_chosen() -> None:
    m, [q] = Table(), questions(1)
    q.completions = (q.completions[0],) * 4
    q.label = 0
    assert choose(m, [q]).answers == (0,)


def test_limit_and_no_questions() -> None:
    assert choose(Table(), questions(5), limit=2).examples == 2
    with pytest.raises(UnsupportedError, match="no question"):
        choose(Table(), [])


def test_question_longer_than_the_context_is_named() -> None:
    asked = questions(3)
    asked[1].context = np.zeros(CONTEXT, np.int32)
    asked[1].index = 77
    with pytest.raises(UnsupportedError) as e:
        choose(Table(), asked)
    assert "example 77" in str(e.value)


def eval_file(asked: list[Any]) -> bytes:
    """llm.c's file, as its writer lays it out."""
    bodies = []
    for q in asked:
        words = [q.index, q.label, len(q.completions), len(q.context), *q.context.tolist()]
        for c in q.completions:
            words += [len(c), *c.tolist()]
        bodies.append([65535, 2 * (len(words) + 2), *words])
    header = np.zeros(256, "<i4")
    header[:4] = 20240522, 1, len(asked), max(2 * len(b) for b in bodies)
    return header.tobytes() + np.array([w for b in bodies for w in b], "<u2").tobytes()


def test_file_of_llmc_is_answered(tmp_path: Path) -> None:
    m, asked = Table(), questions(9)
    path = tmp_path / "hellaswag_val.bin"
    path.write_bytes(eval_file(asked))
    r = scoring.hellaswag(m, path)
    assert r == choose(m, asked)
    assert scoring.hellaswag(m, path, limit=4).examples == 4
    path.write_bytes(eval_file(asked)[:-2])
    with pytest.raises(FormatError):
        scoring.hellaswag(m, path)

"""What cannot be scored is refused in words, before anything runs, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_perplexity import CONTEXT, VOCAB, Bytes, Table, shard, text

from ckptkit import score as scoring
from ckptkit.errors import FormatError, OutputError, UnsupportedError
from ckptkit.score import PplOptions


@pytest.fixture
def source(tmp_path: Path) -> Any:
    def write(data: bytes, name: str = "text.txt") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (b"", {}, "the text is empty"),
        (b"\n", {}, "the text is empty"),
        (b"", {"mode": "full"}, "the text is empty"),
        (b"", {"mode": "stride"}, "the text is empty"),
        (b"\n \n", {"mode": "docs"}, "the text is empty"),
        (b"a", {}, "at least 32 tokens"),
        (b"a", {"mode": "full"}, "at least 17 tokens"),
        (b"a", {"mode": "stride"}, "at least 2 tokens"),
        (b"a" * 31, {}, "-c 15"),
        (b"a" * 16, {"mode": "full"}, "-c 15"),
        (b"a" * 31, {"mode": "all"}, "at least 32 tokens"),
        (b"a" * 99, {"n_ctx": 49}, "at most 48"),
        (b"a" * 99, {"n_ctx": 0}, "at least 1"),
        (b"a" * 99, {"n_ctx": -5}, "at least 1"),
        (b"a" * 99, {"n_ctx": 2}, "at least 3"),
        (b"a" * 99, {"mode": "stride", "stride": 0}, "1 to 16"),
        (b"a" * 99, {"mode": "stride", "stride": -1}, "1 to 16"),
        (b"a" * 99, {"mode": "stride", "stride": 17}, "would skip tokens"),
        (b"a" * 99, {"mode": "all", "stride": 17}, "would skip tokens"),
        (b"a" * 99, {"chunks": 0}, "1 or more"),
        (b"a" * 99, {"chunks": -2}, "1 or more"),
        (b"a" * 99, {"mode": "rolling"}, "llama, full, stride, docs, all"),
        (b"a" * 99, {"mode": "docs", "mtp_head": 1}, "not scored on documents"),
        (b"a" * 99, {"mode": "full", "save_logits": Path("x")}, "--mode llama"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_words(
    source: Any, data: bytes, options: dict[str, Any], says: str
) -> None:
    m = Table(Bytes())
    with pytest.raises(UnsupportedError) as e:
        scoring.run(m, source(data), PplOptions(**({"n_ctx": 16} | options)))
    assert says in str(e.value)
    assert not m.calls


def test_stride_of_all_must_be_positive(source: Any) -> None:
    with pytest.raises(UnsupportedError, match="stride"):
        scoring.run(Table(Bytes()), source(b"a" * 99), PplOptions(mode="all", n_ctx=16, stride=-3, chunks=2))


def test_rotary_model_beyond_its_training_is_noted(source: Any) -> None:
    m = Table(Bytes(), arch="llama")
    m.config.context_length = 16
    [r] = scoring.run(m, source(text(99)), PplOptions(n_ctx=32))
    assert "longer than the trained context of 16" in r.notes[0]
    with pytest.raises(UnsupportedError, match="longer than the context"):
        scoring.run(m, source(text(99)), PplOptions(n_ctx=CONTEXT + 1))


def test_window_is_512_or_the_models_context(source: Any) -> None:
    [r] = scoring.run(Table(Bytes()), source(text(99)))
    assert r.n_ctx == CONTEXT


def test_text_without_a_tokenizer_is_refused(source: Any) -> None:
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        scoring.run(Table(None), source(text(99)), PplOptions(n_ctx=16))


def test_shard_of_another_vocabulary_is_refused_with_its_place(source: Any) -> None:
    ids = [1] * 50 + [VOCAB] + [1] * 50
    with pytest.raises(FormatError) as e:
        scoring.run(Table(None), source(shard(ids), "v.bin"), PplOptions(mode="full", n_ctx=16))
    assert e.value.offset == 1024 + 2 * 50


def test_shard_has_no_documents(source: Any) -> None:
    with pytest.raises(UnsupportedError, match="lines of a text"):
        scoring.run(Table(Bytes()), source(shard([1] * 50), "v.bin"), PplOptions(mode="docs"))


def test_evaluation_set_is_not_text(source: Any) -> None:
    header = np.zeros(256, "<i4")
    header[:2] = 20240522, 1
    with pytest.raises(UnsupportedError, match="hellaswag"):
        scoring.run(Table(Bytes()), source(header.tobytes(), "h.bin"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(source: Any, bad: float) -> None:
    m = Table(Bytes())
    m.by_pos[20, 3] = bad
    with pytest.raises(UnsupportedError) as e:
        scoring.run(m, source(text(99)), PplOptions(mode="full", n_ctx=32))
    assert "token 21" in str(e.value)


def test_outputs_are_checked_before_anything_runs(source: Any, tmp_path: Path) -> None:
    m, path = Table(Bytes()), source(text(99))
    there = source(b"keep", "there.jsonl")
    for options in ({"per_token": there}, {"html": path, "force": True}, {"save_logits": tmp_path / "no" / "x"}):
        with pytest.raises(OutputError):
            scoring.run(m, path, PplOptions(n_ctx=16, **options))
    assert there.read_bytes() == b"keep"
    assert not m.calls


def test_nothing_is_left_of_outputs_when_scoring_fails(source: Any, tmp_path: Path) -> None:
    m, path = Table(Bytes()), source(text(99))
    m.by_pos[14] = np.nan
    out = {name: tmp_path / "out" / name for name in ("per_token", "html", "save_logits")}
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedError):
        scoring.run(m, path, PplOptions(n_ctx=16, **out))
    assert not list((tmp_path / "out").iterdir())

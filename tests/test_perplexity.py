"""Windows, scores and reports, against float64 re-implementations that share no code with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptkit import score as scoring
from ckptkit.runtime import perplexity
from ckptkit.runtime.perplexity_tokens import PerToken, TokenText
from ckptkit.runtime.perplexity_windows import plan
from ckptkit.score import PplOptions
from ckptkit.score_text import side_by_side
from ckptkit.tokenizer.special import TokenType

VOCAB, CONTEXT, BOS, EOS = 258, 48, 256, 257


class Bytes:
    """A tokenizer of bytes, and two control tokens."""

    def __init__(self, add_bos: bool = False, add_eos: bool = False) -> None:
        self.vocab_size, self.bos, self.eos, self.add_bos, self.add_eos = VOCAB, BOS, EOS, add_bos, add_eos

    def encode(self, text: bytes, special: bool = False) -> list[int]:
        assert not special  # control tokens written in a text are text
        return list(text)

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else {BOS: b"<s>", EOS: b"</s>"}[id]

    def type_of(self, id: int) -> TokenType:
        return TokenType.NORMAL if id < 256 else TokenType.CONTROL


class Table:
    """A model whose logits depend on everything before: the id, its position and the sum of all ids so far."""

    def __init__(self, tokenizer: Bytes | None = None, arch: str = "gpt2", seed: int = 5, spread: float = 3.0) -> None:
        r = np.random.default_rng(seed)
        self.by_id = (spread * r.standard_normal((VOCAB, VOCAB))).astype(np.float32)
        self.by_pos = r.standard_normal((CONTEXT, VOCAB)).astype(np.float32)
        self.by_sum = r.standard_normal((97, VOCAB)).astype(np.float32)
        self.config = SimpleNamespace(arch=arch, context_length=CONTEXT, vocab_size=VOCAB)
        self.context, self.precision, self.threads, self.tokenizer = CONTEXT, "exact", 2, tokenizer
        self.calls: list[tuple[int, int]] = []
        self.heads: set[int] = set()

    def new_cache(self, n_seq: int = 1, context: int | None = None) -> Any:
        return np.full((n_seq, context or CONTEXT), -1, np.int64)

    def forward_batch(self, tokens: Any, pos: Any, seq: Any, cache: Any, rows: Any, head: int = 0) -> Any:
        cache[seq, pos] = tokens
        self.calls.append((len(tokens), len(rows)))
        self.heads.add(head)
        out = np.empty((len(rows), VOCAB), np.float32)
        for k, r in enumerate(rows):
            before = cache[seq[r], : pos[r] + 1]
            assert (before >= 0).all()  # nothing was left out of the window
            out[k] = self.by_id[tokens[r]] + self.by_pos[pos[r]] + self.by_sum[before.sum() % 97] + np.float32(head)
        return out

    def score_batch(
        self, tokens: Any, pos: Any, seq: Any, cache: Any, rows: Any, targets: Any, head: int = 0
    ) -> np.ndarray:
        from ckptkit.runtime.log_softmax import nll_rows

        return nll_rows(self.forward_batch(tokens, pos, seq, cache, rows, head), targets)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The same logits for a window of its own, the plain way."""
        ids = np.asarray(ids, int)
        return self.by_id[ids] + self.by_pos[: len(ids)] + self.by_sum[np.cumsum(ids) % 97]

    def nll(self, ids: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        z = self.logits(ids).astype(np.float64)
        z -= z.max(axis=1, keepdims=True, initial=-np.inf)
        return np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(targets)), np.asarray(targets, int)]


def text(n: int, seed: int = 1) -> bytes:
    words = [b"to ", b"be", b" or\n", b"not ", b"that", b"'s ", b"", b"  a", b"\t"]
    r = np.random.default_rng(seed)
    return b"".join(words[i] for i in r.integers(0, len(words), n))[:n].ljust(n, b"x")


# -- what each convention scores, written down a second time


def judge_llama(m: Table, data: bytes, n_ctx: int, chunks: int, bos: int | None) -> np.ndarray:
    ids = ([bos] if bos is not None else []) + list(data[:-1] if data[-1:] == b"\n" else data)
    out = []
    for c in range(min(len(ids) // n_ctx, chunks)):
        x = ids[c * n_ctx : (c + 1) * n_ctx]
        fed = [bos, *x[1:]] if bos is not None else x
        out += [m.nll(fed[:-1], x[1:])[p] for p in range(n_ctx // 2, n_ctx - 1)]
    return np.array(out)


def judge_full(m: Table, ids: list[int], T: int) -> np.ndarray:
    return np.concatenate([m.nll(ids[at : at + T], ids[at + 1 : at + T + 1]) for at in range(0, len(ids) - T, T)])


def judge_stride(m: Table, ids: list[int], n_ctx: int, stride: int) -> np.ndarray:
    """The recipe of the Hugging Face docs: labels that an earlier window has had are masked."""
    out, scored_to = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + n_ctx, len(ids))
        fresh = end - scored_to
        x = ids[begin:end]
        labels = [None] * (len(x) - fresh) + x[len(x) - fresh :]
        nll = m.nll(x[:-1], x[1:])
        out += [nll[k - 1] for k in range(1, len(x)) if labels[k] is not None]
        scored_to = end
        if end == len(ids):
            break
    return np.array(out)


def check(report: perplexity.PplReport, nll: np.ndarray) -> None:
    """Mean, perplexity and llama-perplexity's standard error of these -log p."""
    assert report.tokens == len(nll)
    assert report.nll == pytest.approx(nll.mean(), abs=1e-6)
    assert report.ppl == pytest.approx(np.exp(nll.mean()), rel=1e-6)
    variance = (nll**2).mean() - nll.mean() ** 2
    assert report.stderr == pytest.approx(np.exp(nll.mean()) * np.sqrt(variance / (len(nll) - 1)), rel=1e-5)


@pytest.fixture
def source(tmp_path: Path) -> Any:
    def write(data: bytes, name: str = "text.txt") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("n_ctx", [3, 16, 33])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
def test_llama_scores_the_second_half_of_each_window(source: Any, add_bos: bool, n_ctx: int, end: bytes) -> None:
    m, data = Table(Bytes(add_bos)), text(160) + end
    [r] = scoring.run(m, source(data), PplOptions(n_ctx=n_ctx, chunks=5))
    want = judge_llama(m, data, n_ctx, 5, BOS if add_bos else None)
    check(r, want)
    assert (r.mode, r.n_ctx, r.stride) == ("llama", n_ctx, None)
    per_window = len(want) // r.chunks
    so_far = [np.exp(want[: (c + 1) * per_window].mean()) for c in range(r.chunks)]
    np.testing.assert_allclose(r.running, so_far, rtol=1e-6)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("T", [1, 7, 48])
def test_full_scores_every_target(source: Any, add_bos: bool, T: int) -> None:
    m, data = Table(Bytes(add_bos)), text(145)
    [r] = scoring.run(m, source(data), PplOptions(mode="full", n_ctx=T))
    check(r, judge_full(m, [BOS] * add_bos + list(data), T))


def test_full_needs_one_token_more_than_its_last_window() -> None:
    ids = np.arange(1, 130)
    assert plan("full", ids[:128], 64).count == 1
    assert plan("full", ids[:129], 64).count == 2
    last = list(plan("full", ids[:129], 64).windows())[1]
    assert (last.ids[0], last.ids[-1], last.targets[0], last.targets[-1]) == (65, 128, 66, 129)


@pytest.mark.parametrize(("n_ctx", "stride"), [(16, 1), (16, 5), (16, 16), (48, 24), (2, 1), (48, 47)])
@pytest.mark.parametrize("n", [2, 15, 16, 17, 100])
def test_stride_scores_as_the_recipe_does(source: Any, n_ctx: int, stride: int, n: int) -> None:
    m, data = Table(Bytes()), text(n)
    [r] = scoring.run(m, source(data), PplOptions(mode="stride", n_ctx=n_ctx, stride=stride))
    want = judge_stride(m, list(data), n_ctx, stride)
    assert r.tokens == len(want)
    assert r.nll == pytest.approx(want.mean(), abs=1e-6)


def test_stride_is_half_a_window_by_default(source: Any) -> None:
    [r] = scoring.run(Table(Bytes()), source(text(90)), PplOptions(mode="stride", n_ctx=20))
    assert r.stride == 10


def test_stride_in_another_mode_and_an_unused_end_token_are_noted(source: Any) -> None:
    [r] = scoring.run(Table(Bytes(add_eos=True)), source(text(90)), PplOptions(n_ctx=20, stride=3))
    assert [n.split()[0:4] for n in r.notes] == [
        ["the", "vocabulary", "asks", "for"],
        ["a", "stride", "means", "nothing"],
    ]
    check(r, judge_llama(Table(Bytes()), text(90), 20, 9, None))


def test_docs_score_each_line_between_its_own_ends(source: Any) -> None:
    m, n_ctx = Table(Bytes()), 8
    lines = [b"anna", b"bo", b"a name that is cut"]
    [r] = scoring.run(m, source(b"anna\r\n\nbo  \n a name that is cut"), PplOptions(mode="docs", n_ctx=n_ctx))
    docs = [[BOS, *line, EOS] for line in lines]
    check(r, np.concatenate([m.nll(d[:-1][:n_ctx], d[1:][:n_ctx]) for d in docs]))
    assert r.tokens == 5 + 3 + 8
    assert r.bytes == 4 + 2 + 8  # control tokens are no text


def test_all_modes_score_the_same_piece_of_text(source: Any) -> None:
    reports = scoring.run(Table(Bytes()), source(text(400)), PplOptions(mode="all", n_ctx=20, chunks=4))
    assert [(r.mode, r.chunks) for r in reports] == [("llama", 4), ("full", 4), ("stride", 7)]
    assert [r.tokens for r in reports] == [4 * 9, 80, 79]
    assert len({r.rule for r in reports}) == 3


def test_modes_stand_side_by_side_with_their_rules(source: Any) -> None:
    reports = scoring.run(Table(Bytes()), source(text(400)), PplOptions(mode="all", n_ctx=20, chunks=4))
    lines = side_by_side([r.as_dict() for r in reports])
    assert lines[0].split()[:4] == ["mode", "tokens", "mean", "nll"]
    for line, r in zip(lines[1:4], reports, strict=True):
        assert line.split()[:4] == [r.mode, f"{r.tokens:,}", f"{r.nll:.6f}", f"{r.ppl:,.4f}"]
    assert [line.split(maxsplit=1)[1] for line in lines[4:]] == [r.rule for r in reports]
    assert len({len(line) for line in lines[:4]}) == 1


def test_head_is_scored_on_tokens_further_ahead(source: Any) -> None:
    m, data = Table(Bytes()), list(text(100))
    [r] = scoring.run(m, source(bytes(data)), PplOptions(mode="full", n_ctx=10, mtp_head=2))
    want = [m.nll(data[at : at + 10], data[at + 3 : at + 13]) for at in range(0, 90 - 2, 10) if at + 13 <= 100]
    check(r, np.concatenate(want))
    assert m.heads == {2}
    assert "3 ahead" in r.rule


# -- batches


@pytest.mark.parametrize("mode", ["llama", "full", "stride"])
@pytest.mark.parametrize(("n_batch", "rows"), [(1, 1), (7, 3), (64, 5), (64, 1000), (4096, 70)])
def test_batches_change_no_score_and_bound_the_logits(source: Any, mode: str, n_batch: int, rows: int) -> None:
    data = text(300)
    path = source(data)
    m = Table(Bytes())
    [whole] = scoring.run(m, path, PplOptions(mode=mode, n_ctx=24))
    made = plan(mode, np.frombuffer(data, np.uint8), 24)
    m.calls.clear()
    r = perplexity.score(m, made, n_batch=n_batch, logits_bytes=rows * 4 * VOCAB, sinks=[PerToken()])
    assert (r.tokens, r.nll, r.running) == (whole.tokens, whole.nll, whole.running)  # to the last bit
    assert max(n for _, n in m.calls) <= rows
    assert max(n for n, _ in m.calls) <= max(n_batch, 1)


def test_windows_share_a_call() -> None:
    m = Table()
    perplexity.score(m, plan("full", np.zeros(241, np.int32), 24), n_batch=100)
    assert m.calls == [(96, 96), (96, 96), (48, 48)]


def test_log_softmax_is_right_where_float32_is_not() -> None:
    """One row of 50,000 equal logits, one with a huge offset, one that is nearly certain."""
    from ckptkit.runtime.log_softmax import nll_rows

    z = np.zeros((3, 50_000), np.float32)
    z[1] += np.float32(30_000)
    z[2, 7] = 40
    nll = nll_rows(z, np.array([5, 5, 7]))
    sure = math.log1p(49_999 * math.exp(-40))
    np.testing.assert_allclose(nll, [math.log(50_000), math.log(50_000), sure], rtol=1e-7, atol=1e-15)


# -- shards, text facts, outputs


def shard(ids: Sequence[int]) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    return header.tobytes() + np.asarray(ids, "<u2").tobytes()


def test_shard_is_scored_without_a_tokenizer(source: Any) -> None:
    m, ids = Table(None), list(text(130))
    [r] = scoring.run(m, source(shard(ids), "val.bin"), PplOptions(mode="full", n_ctx=10))
    check(r, judge_full(m, ids, 10))
    assert (r.bits_per_byte, r.tokens_per_word, r.bytes) == (None, None, None)


def test_shard_gets_no_bos_before_it_but_llama_mode_puts_it_over(source: Any) -> None:
    m, data = Table(Bytes(add_bos=True)), text(130)
    path = source(shard(list(data)), "val.bin")
    [r] = scoring.run(m, path, PplOptions(mode="full", n_ctx=10))
    check(r, judge_full(m, list(data), 10))
    [r] = scoring.run(m, path, PplOptions(n_ctx=10))
    x = np.frombuffer(data, np.uint8).astype(int).reshape(-1, 10)
    check(r, np.concatenate([m.nll([BOS, *w[1:-1]], w[1:])[5:] for w in x]))
    assert f"BOS ({BOS})" in r.rule


def test_bits_per_byte_and_tokens_per_word_by_hand(source: Any) -> None:
    m = Table(Bytes())
    [r] = scoring.run(m, source(b"ab cd  efg\nhi j"), PplOptions(mode="full", n_ctx=14))
    assert (r.tokens, r.bytes) == (14, 14)  # all but the first letter
    assert r.bits_per_byte == pytest.approx(r.nll / math.log(2))
    assert r.tokens_per_word == pytest.approx(14 / 4)  # cd efg hi j begin among the scored; ab began before


def test_text_of_tokens_with_several_words() -> None:
    words = [b" the", b"cat sat", b"  ", b"s", b"", b" a b ", b"</s>"]
    kinds = [TokenType.NORMAL] * 6 + [TokenType.CONTROL]
    fake: Any = SimpleNamespace(vocab_size=7, token_bytes=words.__getitem__, type_of=kinds.__getitem__)
    count = TokenText(fake).count
    assert count(3, np.array([0, 3, 3])) == (6, 1)  # " thess" after "s"
    assert count(2, np.array([1])) == (7, 2)
    assert count(0, np.array([1])) == (7, 1)  # " thecat sat": one word goes on
    assert count(6, np.array([3, 5, 3])) == (7, 4)  # after the end token a word begins: "s a b s"
    assert count(99, np.array([3, 98])) == (1, 1)  # ids that the tokenizer does not know have no text


def test_text_that_is_no_utf8_is_scored(source: Any) -> None:
    m, data = Table(Bytes()), bytes(range(128, 256))
    [r] = scoring.run(m, source(data), PplOptions(mode="full", n_ctx=16))
    check(r, judge_full(m, list(data), 16))


def test_per_token_lines_say_what_was_expected(source: Any, tmp_path: Path) -> None:
    m, data, out = Table(Bytes()), text(80) + b"\xff" * 4, tmp_path / "t.jsonl"
    [r] = scoring.run(m, source(data), PplOptions(n_ctx=12, per_token=out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    want = judge_llama(m, data, 12, 99, None)
    np.testing.assert_allclose([line["nll"] for line in lines], want, rtol=1e-5)
    assert len(lines) == r.tokens == 7 * 5
    for line in lines:
        window, position, index = line["window"], line["position"], line["index"]
        assert index == window * 12 + position
        assert line["id"] == data[index]
        z = m.logits(list(data[window * 12 : index]))[-1].astype(np.float64)
        assert line["rank"] == 1 + int((z > z[line["id"]]).sum())
        assert line["best"] == int(z.argmax())
        assert line["best_nll"] == pytest.approx(np.log(np.exp(z - z.max()).sum()), abs=1e-6)
    assert (lines[-1]["text"], lines[-1]["bytes"]) == ("\ufffd", "ff")


def test_report_is_plain_json(source: Any) -> None:
    [r] = scoring.run(Table(Bytes(), spread=2000.0), source(text(40)), PplOptions(mode="full", n_ctx=4))
    assert r.ppl == math.inf  # e^nll does not fit a float
    body = json.loads(json.dumps(r.as_dict(), allow_nan=False))
    assert body["ppl"] is None
    keys = {"mode", "tokens", "nll", "ppl", "stderr", "bits_per_byte", "tokens_per_word", "rule", "precision"}
    assert keys <= body.keys()


def test_progress_tells_the_running_estimate(source: Any) -> None:
    told: list[Any] = []
    [r] = scoring.run(Table(Bytes()), source(text(100)), PplOptions(n_ctx=20), lambda *a: told.append(a))
    assert [(mode, done, count) for mode, done, count, _ in told] == [("llama", k, 5) for k in range(1, 6)]
    assert [ppl for *_, ppl in told] == list(r.running)


def test_one_scored_token_has_no_error(source: Any) -> None:
    [r] = scoring.run(Table(Bytes()), source(b"ab"), PplOptions(mode="full", n_ctx=1))
    assert (r.tokens, r.stderr) == (1, None)

"""The file of log-probabilities and the comparison with it, against a reader and sums written again in float64."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_perplexity import BOS, VOCAB, Bytes, Table, text

from ckptkit import score as scoring
from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.runtime.logits_file import decode, encode
from ckptkit.score import PplOptions
from ckptkit.score_text import compared

N_CTX, CHUNKS = 21, 4


class Judge:
    """llama-perplexity's file, read byte by byte as its source says."""

    def __init__(self, data: bytes) -> None:
        assert data[:8] == b"_logits_"
        self.n_ctx, self.n_vocab, self.n_chunk = struct.unpack_from("<iii", data, 8)
        at = 20 + 4 * self.n_ctx * self.n_chunk
        self.tokens = list(struct.unpack_from(f"<{self.n_ctx * self.n_chunk}i", data, 20))
        self.rows, self.heads, nv = [], [], 2 * ((self.n_vocab + 1) // 2) + 4
        while at < len(data):
            scale, low = struct.unpack_from("<ff", data, at)
            q = np.frombuffer(data, "<u2", self.n_vocab, at + 8)
            self.rows.append(scale * q.astype(np.float64) + low)
            self.heads.append((scale, low))
            at += 2 * nv


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64) - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def windows(m: Table, data: bytes, bos: int | None) -> tuple[np.ndarray, list[int]]:
    """log p (rows, VOCAB) of the rows that the file has, and the ids that follow."""
    ids = ([bos] if bos is not None else []) + list(data)
    rows, targets = [], []
    for c in range(CHUNKS):
        x = ids[c * N_CTX : (c + 1) * N_CTX]
        fed = [bos, *x[1:]] if bos is not None else x
        rows.append(log_softmax(m.logits(fed))[N_CTX // 2 : N_CTX - 1])
        targets += x[N_CTX // 2 + 1 :]
    return np.concatenate(rows), targets


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(text(N_CTX * CHUNKS + 9))
    return path


def save(m: Table, source: Path, chunks: int = CHUNKS) -> Path:
    out = source.with_name("base.logits")
    scoring.run(m, source, PplOptions(n_ctx=N_CTX, chunks=chunks, save_logits=out, force=True))
    return out


@pytest.mark.parametrize("add_bos", [False, True])
def test_saved_file_is_llama_perplexitys(source: Path, add_bos: bool) -> None:
    m = Table(Bytes(add_bos), spread=2.0)
    data = save(m, source).read_bytes()
    judge = Judge(data)
    assert (judge.n_ctx, judge.n_vocab, judge.n_chunk) == (N_CTX, VOCAB, CHUNKS)
    ids = [BOS] * add_bos + list(source.read_bytes())
    assert judge.tokens == ids[: N_CTX * CHUNKS]  # as in the text: BOS overwrites only what is fed
    want, _ = windows(m, source.read_bytes(), BOS if add_bos else None)
    assert len(judge.rows) == len(want) == CHUNKS * (N_CTX - 1 - N_CTX // 2)
    got = np.array(judge.rows)
    kept = want > want.max(axis=1, keepdims=True) - 16
    step = np.array([scale for scale, _ in judge.heads])[:, None] * np.ones_like(want)
    assert np.abs(got - want)[kept].max() < 1e-5 + step.max() / 2
    assert (step <= 16 / 65535 * 1.0001).all()


def test_row_by_hand() -> None:
    """Four logits: 0 (the largest), -8, -16 (the lowest kept) and -40 (cut)."""
    row = encode(np.array([[0, -8, -16, -40]], np.float32))[0]
    scale, low = row[:4].view("<f4")
    total = 1 + math.exp(-8) + math.exp(-16)
    assert scale == pytest.approx(16 / 65535, rel=1e-6)
    assert low == pytest.approx(-16 - math.log(total), rel=1e-6)
    assert row[4:].tolist() == [65535, 32768, 0, 0]  # 32767.5 goes to even
    assert decode(row[None], 4)[0].tolist() == pytest.approx([-math.log(total), -8, low, low], abs=4e-4)


def test_row_of_an_odd_vocabulary_is_padded_and_equal_logits_have_no_scale() -> None:
    row = encode(np.full((1, 3), 5, np.float32))[0]
    assert len(row) == 2 * 2 + 4
    assert row[:2].tolist() == [0, 0]
    np.testing.assert_allclose(decode(row[None], 3), math.log(1 / 3), rtol=1e-6)


@pytest.mark.parametrize("add_bos", [False, True])
def test_comparison_is_the_sum_over_the_file(source: Path, add_bos: bool) -> None:
    base, other = Table(Bytes(add_bos), spread=2.0), Table(Bytes(add_bos), spread=2.0)
    other.by_id = base.by_id + 0.6 * np.random.default_rng(8).standard_normal(base.by_id.shape).astype(np.float32)
    path = save(base, source)
    k = scoring.kl(other, path, source)

    log_q, targets = windows(other, source.read_bytes(), BOS if add_bos else None)
    log_base = np.array(Judge(path.read_bytes()).rows)
    kld = np.array(
        [
            sum(math.exp(b) * (b - q) for b, q in zip(rb, rq, strict=True) if b > -16)
            for rb, rq in zip(log_base, log_q, strict=True)
        ]
    )
    each = np.arange(len(targets))
    nll, nll_base = -log_q[each, targets], -log_base[each, targets]
    delta = np.exp(-nll) - np.exp(-nll_base)
    n = len(targets)

    def error(x: np.ndarray) -> float:
        return math.sqrt((np.mean(x**2) - np.mean(x) ** 2) / (n - 1))

    assert (k.tokens, k.chunks, k.n_ctx) == (n, CHUNKS, N_CTX)
    assert k.kld.value == pytest.approx(kld.mean(), abs=2e-6)
    assert k.kld.stderr == pytest.approx(error(kld), rel=1e-3)
    assert k.kld_spread["max"] == pytest.approx(kld.max(), abs=1e-5)
    assert k.kld_spread["min"] == pytest.approx(kld.min(), abs=1e-5)
    assert k.kld_spread["median"] == pytest.approx(np.median(kld), abs=1e-5)
    ordered = np.sort(kld)
    place = 0.99 * (n - 1)  # as llama-perplexity interpolates
    low = int(place)
    p99 = (1 - (place - low)) * ordered[low] + (place - low) * ordered[low + 1]
    assert k.kld_spread["p99"] == pytest.approx(p99, abs=1e-5)
    assert k.ppl.value == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert k.ppl_base.value == pytest.approx(math.exp(nll_base.mean()), rel=1e-5)
    assert k.log_ratio.value == pytest.approx(nll.mean() - nll_base.mean(), abs=1e-5)
    both = ((nll * nll_base).mean() - nll.mean() * nll_base.mean()) / (n - 1)
    ratio_error = math.sqrt(error(nll) ** 2 + error(nll_base) ** 2 - 2 * both)
    assert k.log_ratio.stderr == pytest.approx(ratio_error, rel=1e-3)
    assert k.correlation == pytest.approx(both / (error(nll) * error(nll_base)), rel=1e-4)
    assert k.delta_p.value == pytest.approx(delta.mean(), abs=1e-6)
    assert k.delta_p_rms.value == pytest.approx(math.sqrt((delta**2).mean()), rel=1e-4)
    assert k.delta_p_rms.stderr == pytest.approx(0.5 / math.sqrt((delta**2).mean()) * error(delta**2), rel=1e-3)
    assert k.delta_p_spread["max"] == pytest.approx(delta.max(), abs=1e-5)
    agree = (log_q.argmax(1) == log_base.argmax(1)).mean()
    assert 0 < agree < 1
    assert k.same_top.value == pytest.approx(agree)
    assert k.same_top.stderr == pytest.approx(math.sqrt(agree * (1 - agree) / (n - 1)))
    json.dumps(k.as_dict(), allow_nan=False)


def test_model_agrees_with_itself(source: Path) -> None:
    m = Table(Bytes(), spread=1.0)
    k = scoring.kl(m, save(m, source))
    assert abs(k.kld.value) < 1e-5
    assert k.same_top.value == 1
    assert k.ratio.value == pytest.approx(1, abs=1e-4)


def test_file_of_one_window_is_enough_to_compare(source: Path) -> None:
    m = Table(Bytes())
    told: list[Any] = []
    k = scoring.kl(m, save(m, source, chunks=1), None, None, lambda *a: told.append(a[:3]))
    assert (k.chunks, k.tokens) == (1, 10)
    assert k.kld.stderr is None  # too few for an error
    assert told == [("llama", 1, 1)]


def put(offset: int, value: int) -> Any:
    return lambda d: d[:offset] + struct.pack("<i", value) + d[offset + 4 :]


@pytest.mark.parametrize(
    ("damage", "offset"),
    [
        (lambda _: b"", 0),
        (lambda d: d[:7], 0),
        (lambda d: b"_logitz_" + d[8:], 0),
        (lambda d: d[:15], 8),
        (lambda d: d[:-1], None),
        (lambda d: d + b"\0", None),
        (lambda d: d[:200], None),
        *((put(at, v), None) for at in (8, 12, 16) for v in (-1, 0, 1, 2, 2**31 - 1)),
        (put(20, VOCAB), 20),
        (put(24, -1), 24),
    ],
)
def test_broken_file_is_one_clear_error(source: Path, damage: Any, offset: int | None) -> None:
    m = Table(Bytes())
    path = save(m, source)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError) as e:
        scoring.kl(m, path)
    assert e.value.path == path
    assert e.value.offset is not None
    if offset is not None:
        assert e.value.offset == offset


def test_file_of_another_vocabulary_text_or_window_is_refused(source: Path) -> None:
    m = Table(Bytes())
    path = save(m, source)
    smaller = Table(Bytes())
    smaller.config.vocab_size = VOCAB - 1
    with pytest.raises(UnsupportedError, match="another vocabulary"):
        scoring.kl(smaller, path)
    with pytest.raises(UnsupportedError, match="another length"):
        scoring.kl(m, path, None, PplOptions(n_ctx=N_CTX + 1))
    data = bytearray(source.read_bytes())
    data[5] ^= 1
    source.write_bytes(bytes(data))
    with pytest.raises(UnsupportedError) as e:
        scoring.kl(m, path, source)
    assert "token 5" in str(e.value)
    source.write_bytes(bytes(data[:5]))
    with pytest.raises(UnsupportedError, match="another text"):
        scoring.kl(m, path, source)


def test_comparison_reads_as_llama_perplexity_prints_it(source: Path) -> None:
    base, other = Table(Bytes(), spread=2.0), Table(Bytes(), spread=2.2)
    k = scoring.kl(other, save(base, source))
    lines = "\n".join(compared(k.as_dict()))
    assert f"{k.kld.value:.6f} ± {k.kld.stderr:.6f}" in lines
    assert f"{100 * k.same_top.value:.3f} ± {100 * (k.same_top.stderr or 0):.3f}" in lines
    row = next(line for line in lines.splitlines() if line.startswith("99.9 %")).split()
    assert row[2:] == [f"{k.kld_spread['p99.9']:.6f}", f"{100 * k.delta_p_spread['p99.9']:.3f}"]
    assert next(line for line in lines.splitlines() if line.startswith("75.0 %")).split()[2] == "-"  # Δp alone has it

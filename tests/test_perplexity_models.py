"""Scores of trained models against numbers that their own programs, a float64 forward or llama-perplexity gave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import score as scoring
from ckptkit.errors import UnsupportedError
from ckptkit.score import PplOptions


def ppl(model: Path, text: Path, **options: Any) -> Any:
    with ckptkit.load(model) as m:
        [report] = scoring.run(m, text, PplOptions(**options))
    return report


@pytest.fixture
def trained(fixtures_dir: Path) -> Path:
    return fixtures_dir / "trained"


@pytest.mark.parametrize(("name", "nll"), [("gpt2_tiny.bin", 2.693910), ("gpt2_tiny_bf16.bin", 2.693724)])
def test_llmc_validation_loss(trained: Path, name: str, nll: float) -> None:
    """40 windows of 64, as a float64 forward scored them."""
    r = ppl(trained / name, trained / "gpt2_tiny_val.bin", mode="full", n_ctx=64, chunks=40)
    assert r.tokens == 40 * 64
    assert r.nll == pytest.approx(nll, abs=1e-5)
    shard = np.fromfile(trained / "gpt2_tiny_val.bin", "<u2", 1 + 40 * 64, offset=1024)
    with ckptkit.open(trained / name) as ck:
        tokenizer = ck.tokenizer
    assert tokenizer is not None
    n_bytes = len(tokenizer.decode_bytes(shard[1:].tolist()))
    assert r.bytes == n_bytes
    assert r.bits_per_byte == pytest.approx(nll * 2560 / math.log(2) / n_bytes, rel=1e-5)


@pytest.mark.parametrize("name", ["microgpt_names.f64.safetensors", "microgpt_names.json"])
def test_microgpt_documents(shared: Path, tmp_path: Path, name: str) -> None:
    """The 200 documents that the program itself scored after training."""
    ref = np.load(shared / "microgpt_names.ref.npz")
    docs = tmp_path / "docs.txt"
    docs.write_text("\n".join(ref["eval_docs"].tolist()) + "\n")
    r = ppl(shared / name, docs, mode="docs", per_token=tmp_path / "t.jsonl")
    assert (r.tokens, r.chunks) == (1417, 200)
    assert r.nll == pytest.approx(2.3358153, abs=1e-6)
    assert int(ref["eval_ntok"].sum()) == r.tokens
    assert ref["eval_nll_sum"].sum() / r.tokens == pytest.approx(r.nll, abs=1e-6)


def test_nanoeuler_windows(shared: Path, tmp_path: Path) -> None:
    """20 windows of 64 in the last 20,000 bytes of its training text, as a float64 forward scored them."""
    tail = tmp_path / "tail.txt"
    tail.write_bytes((shared / "tinyshakespeare.txt").read_bytes()[-20_000:])
    r = ppl(shared / "nanoeuler_main.bin", tail, mode="full", n_ctx=64, chunks=20)
    assert r.tokens == 1280
    assert r.nll == pytest.approx(3.296480, abs=1e-5)


def test_extra_prediction_head_is_worse_at_looking_further(shared: Path, tmp_path: Path) -> None:
    tail = tmp_path / "tail.txt"
    tail.write_bytes((shared / "tinyshakespeare.txt").read_bytes()[-20_000:])
    model = shared / "nanoeuler_main.bin"
    near, far = (ppl(model, tail, mode="full", n_ctx=64, chunks=8, mtp_head=j) for j in (0, 1))
    assert near.nll < far.nll < math.log(640)
    with pytest.raises(UnsupportedError, match="no such prediction head"):
        ppl(model, tail, mode="full", n_ctx=64, chunks=1, mtp_head=3)


def test_window_beyond_the_position_table_is_refused(trained: Path) -> None:
    with pytest.raises(UnsupportedError, match="position table"):
        ppl(trained / "gpt2_tiny.bin", trained / "gpt2_tiny_val.bin", n_ctx=65)


def test_page_names_model_and_text(trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ppl(trained / "gpt2_tiny.bin", trained / "gpt2_tiny_val.bin", n_ctx=32, chunks=2, html=page)
    assert "<h1>Perplexity of gpt2_tiny.bin on gpt2_tiny_val.bin</h1>" in page.read_text()


def test_saved_log_probabilities_tell_the_rounded_model_apart(trained: Path, tmp_path: Path) -> None:
    """Against itself nothing but the file's rounding is left; the bf16 file is the same model, a little off."""
    val, saved = trained / "gpt2_tiny_val.bin", tmp_path / "base.logits"
    base = ppl(trained / "gpt2_tiny.bin", val, n_ctx=64, chunks=8, save_logits=saved)
    found = {}
    for name in ("gpt2_tiny.bin", "gpt2_tiny_bf16.bin"):
        with ckptkit.load(trained / name) as m:
            found[name] = scoring.kl(m, saved, val)
    same, rounded = found["gpt2_tiny.bin"], found["gpt2_tiny_bf16.bin"]
    assert same.ppl.value == pytest.approx(base.ppl, rel=1e-12)
    assert same.same_top.value == 1
    assert abs(same.kld.value) < 1e-5 < rounded.kld.value < 1e-3
    assert abs(same.log_ratio.value) < 1e-4


@pytest.mark.slow
def test_smollm2_as_llama_perplexity(shared: Path, models: Path) -> None:
    """llama-perplexity prints 39.1809 +/- 1.78613 for these windows (float32 weights, cache and attention)."""
    from smollm import SMOLLM

    r = ppl(models / SMOLLM, shared / "tinyshakespeare.txt", n_ctx=512, chunks=20)
    assert r.tokens == 20 * 255
    assert r.nll == pytest.approx(math.log(39.1809), abs=2e-4)
    assert r.stderr == pytest.approx(1.78613, abs=1e-4)

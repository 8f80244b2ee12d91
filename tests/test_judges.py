"""The judges agree with the reference numbers that came with the original programs' files, and with one another."""

from __future__ import annotations

import json
from pathlib import Path

import judge_readers as readers
import judges
import numpy as np
import pytest

from fixtures import models
from fixtures.writers import llmc, nanoeuler

CLOSE = 1e-9  # float64 against float64


def check_gpt2(model: Path, reference: Path) -> None:
    d, p = readers.llmc_gpt2(model.read_bytes())
    ref = np.load(reference)
    row0 = judges.gpt2_logits(p, ref["x"][0], d["n_head"], d["vocab"])
    assert np.abs(row0 - ref["logits_row0"]).max() < CLOSE
    prompt = judges.gpt2_logits(p, ref["prompt"], d["n_head"], d["vocab"])
    assert np.abs(prompt - ref["prompt_logits"]).max() < CLOSE
    losses = [
        judges.nll(judges.gpt2_logits(p, x, d["n_head"], d["vocab"]), y)
        for x, y in zip(ref["x"], ref["y"], strict=True)
    ]
    assert abs(np.mean(losses) - ref["loss"]) < CLOSE


def test_gpt2_judge_agrees_with_the_torch_reference(trained: Path) -> None:
    check_gpt2(trained / "gpt2_tiny.bin", trained / "gpt2_tiny_fp32.ref.npz")


def test_gpt2_judge_agrees_with_the_torch_reference_of_the_bf16_file(shared: Path) -> None:
    check_gpt2(shared / "gpt2_tiny_bf16.bin", shared / "gpt2_tiny_bf16.ref.npz")


def test_gpt2_judge_gives_the_known_validation_loss(trained: Path) -> None:
    d, p = readers.llmc_gpt2((trained / "gpt2_tiny.bin").read_bytes())
    ids = np.frombuffer((trained / "gpt2_tiny_val.bin").read_bytes(), "<u2", offset=1024).astype(int)
    t = d["max_t"]
    windows = [ids[i * t : i * t + t + 1] for i in range(40)]
    total = [judges.nll(judges.gpt2_logits(p, w[:-1], d["n_head"], d["vocab"]), w[1:]).mean() for w in windows]
    assert np.mean(total) == pytest.approx(2.6939102900302068, abs=CLOSE)


def test_gpt2_judge_agrees_with_the_debug_state(shared: Path, trained: Path) -> None:
    d, p = readers.llmc_gpt2((trained / "gpt2_tiny.bin").read_bytes())
    state = readers.llmc_state((shared / "gpt2_tiny_debug_state.bin").read_bytes(), d["vocab"])
    logits = judges.gpt2_logits(p, state["x"][3], d["n_head"], d["vocab"])
    assert np.abs(logits - state["logits"][3]).max() < 1e-4  # the state is float32 arithmetic
    assert state["loss"] == pytest.approx(2.995784, abs=1e-6)


def test_nanoeuler_judge_agrees_with_the_reference(trained: Path) -> None:
    d, _, p = readers.nanoeuler((trained / "nanoeuler_main.bin").read_bytes())
    ref = np.load(trained / "nanoeuler_main.ref.npz")
    heads = judges.nanoeuler_logits(p, ref["prompt"], n_head=d["NH"], n_kv_head=d["NKV"])
    assert np.abs(heads[0] - ref["logits_head0"]).max() < CLOSE
    assert np.abs(heads[:, -1] - ref["logits_all_last"]).max() < CLOSE
    window = np.concatenate([np.zeros(d["T"] - len(ref["prompt"]), int), ref["prompt"]])
    last = judges.nanoeuler_logits(p, window, n_head=d["NH"], n_kv_head=d["NKV"])[0, -1]
    assert np.abs(last - ref["leftpad_logits_head0"]).max() < CLOSE


def test_nanoeuler_judge_agrees_on_the_chat_model(shared: Path) -> None:
    d, _, p = readers.nanoeuler((shared / "nanoeuler_chat.bin").read_bytes())
    ref = np.load(shared / "nanoeuler_chat.ref.npz")
    for i in range(4):
        last = judges.nanoeuler_logits(p, ref[f"prompt{i}"], n_head=d["NH"], n_kv_head=d["NKV"])[0, -1]
        assert np.abs(last - ref[f"last_logits{i}"]).max() < CLOSE


def test_microgpt_judge_agrees_with_the_program(trained: Path) -> None:
    data = json.loads((trained / "microgpt_names.json").read_text())
    p = {name: np.array(rows) for name, rows in data["state_dict"].items()}
    ref = np.load(trained / "microgpt_names.ref.npz")
    logits = judges.microgpt_logits(p, ref["tokens"], data["n_head"])
    assert np.abs(logits - ref["logits"]).max() < CLOSE
    docs = zip(ref["eval_docs"][:20], ref["eval_nll_sum"], strict=False)
    for doc, total in docs:
        ids = np.array([26, *(data["uchars"].index(c) for c in doc), 26])[: data["block_size"] + 1]
        assert judges.nll(judges.microgpt_logits(p, ids[:-1], 4), ids[1:]).sum() == pytest.approx(total, abs=1e-8)


def test_nx_judge_agrees_with_the_torch_reference(trained: Path) -> None:
    _, tensors = readers.gguf((trained / "nx_ours_qwen.gguf").read_bytes())
    ref = np.load(trained / "nx_ours_qwen.ref.npz")
    logits = judges.nx_logits(readers.nx_arrays(tensors), ref["tokens"])
    assert np.abs(logits - ref["logits"]).max() < CLOSE


def qwen2_of_nx(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The nx trainer's arrays as llama2.c slabs with biases."""
    names = {"wq": "Wq", "wk": "Wk", "wv": "Wv", "wo": "Wo", "w1": "Wg", "w3": "Wu", "w2": "Wd"}
    n = sum(k.endswith(".Wq") for k in p)
    w = {ours: np.stack([p[f"L{i}.{theirs}"].T for i in range(n)]) for ours, theirs in names.items()}
    w |= {f"b{c}": np.stack([p[f"L{i}.b{c}"] for i in range(n)]) for c in "qkv"}
    w |= {
        ours: np.stack([p[f"L{i}.{c}_gamma"] for i in range(n)])
        for ours, c in (("rms_att", "attn"), ("rms_ffn", "ffn"))
    }
    return w | {"tok_emb": p["E"], "wcls": p["Wlm"].T, "rms_final": p["final_gamma"]}


def test_llama_judge_with_half_pairs_and_biases_is_the_nx_judge(trained: Path) -> None:
    _, tensors = readers.gguf((trained / "nx_ours_qwen.gguf").read_bytes())
    p = readers.nx_arrays(tensors)
    ids = np.load(trained / "nx_ours_qwen.ref.npz")["tokens"]
    how = {"n_head": 1, "n_kv_head": 1, "pairing": "half", "eps": 1e-6, "theta": 1e6}
    assert np.abs(judges.llama_logits(qwen2_of_nx(p), ids, **how) - judges.nx_logits(p, ids)).max() < CLOSE


def test_half_pairs_after_reordering_q_and_k_are_adjacent_pairs() -> None:
    m = models.llama(bias=True)
    ids = models.Bits(9).ids(12, m.dims["vocab"])
    how = {"n_head": 3, "n_kv_head": 1}
    adjacent = judges.llama_logits(m.p, ids, **how)
    half = judges.llama_logits(models.half_paired(m).p, ids, pairing="half", **how)
    wrong = judges.llama_logits(m.p, ids, pairing="half", **how)
    assert np.abs(adjacent - half).max() < CLOSE
    assert np.abs(adjacent - wrong).max() > 0.01


def test_llama_family_judges_agree_on_one_model() -> None:
    m = models.nanoeuler()
    ids, how = models.Bits(8).ids(16, 260), {"n_head": 3, "n_kv_head": 1}
    heads = judges.nanoeuler_logits(nanoeuler.arrays(m), ids, **how)
    first = m.p | {"wcls": m.p["wcls"][:260]}
    plain = judges.llama_logits(first, ids, **how)
    assert np.abs(heads[0] - plain).max() < CLOSE
    llama3 = judges.llama3_logits(llmc.llama3_arrays(models.Model(m.dims, first)), ids, theta=10000.0, **how)
    assert np.abs(llama3 - plain).max() < CLOSE


def test_scaled_rope_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    plain = judges.rope_freqs(6, 1e8)
    scaled = judges.rope_freqs(6, 1e8, judges.LLAMA31)
    assert scaled[0] == plain[0]
    assert plain[1] / 8 < scaled[1] < plain[1]
    assert scaled[2] == plain[2] / 8
    # 1e8 ** (-1/3): 8192 / (2 pi) * f = 2.80900 turns, so (2.80900 - 1) / 3 of the plain frequency
    turns = 8192 * 1e8 ** (-1 / 3) / (2 * np.pi)
    s = (turns - 1) / 3
    assert scaled[1] == pytest.approx(plain[1] * (s + (1 - s) / 8), rel=1e-12)


def test_choices_are_ranked_by_their_mean_loss() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]]))
    # two tokens of context, completion (1, 2): p = 0.5 after position 1 and 0.5 after position 2
    assert judges.choice_nll(logits, 2, (1, 2)) == pytest.approx(np.log(2))
    assert judges.choice_nll(logits, 2, (0, 0)) == pytest.approx((np.log(8) + np.log(4)) / 2)


def test_nll_of_even_logits_is_the_log_of_the_vocabulary() -> None:
    assert judges.nll(np.zeros((3, 29)), [0, 5, 28]) == pytest.approx(np.log(29))
    assert judges.nll(np.array([[1e5, 0.0]]), [1]) == pytest.approx(1e5)

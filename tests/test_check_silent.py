"""What check warns of loads in llama.cpp and gives something else than was meant: each effect is seen there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llamacpp
import numpy as np
import pytest
from check_files import T, array, build, put, tensor, tokens, without
from smollm import SMOLLM

import ckptkit
from ckptkit import formats
from ckptkit.arch import with_pairing
from ckptkit.check import RULES, check
from ckptkit.formats import gguf as ours
from ckptkit.formats.options import WriteOptions
from ckptkit.layout import write_rows
from fixtures.make import SPM
from fixtures.models import llama
from fixtures.writers import gguf

pytest.importorskip("xllamacpp", reason="needs xllamacpp, llama.cpp in process")


def poisoned(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[1, 2] = np.nan
    return a


WARNED = {
    "no-pre": ("pre-missing", build(without(f"{T}pre"))),
    "empty-pre": ("pre-missing", build(put(f"{T}pre", gguf.STRING, ""))),
    "no-bos": ("bos-default", build(without(f"{T}bos_token_id"))),
    "no-eos": ("eos-default", build(without(f"{T}eos_token_id"))),
    "no-base": ("rope-base", build(without("llama.rope.freq_base"), arch="llama")),
    "no-types": ("token_type-missing", build(without(f"{T}token_type"))),
    "no-scores": ("scores-missing", build(without(f"{T}scores"), arch="llama")),
    "types-long": ("array-longer", build(array(f"{T}token_type", gguf.I32, [1] * 40))),
    "bad-merge": ("vocabulary-merge", build(array(f"{T}merges", gguf.STRING, ["abc"]))),
    "foreign-merge": ("vocabulary-unknown", build(array(f"{T}merges", gguf.STRING, ["zz yy"]))),
    "empty-token": ("vocabulary-empty", build(tokens(lambda t: ["", *t[1:]]))),
    "eos-range": ("id-range", build(put(f"{T}eos_token_id", gguf.U32, 99999))),
    "trailing": ("trailing", build() + bytes(100)),
    "padding": ("padding-rows", build(tokens(lambda t: [*t[:-1], "[PAD7]"]))),
    "zeros": ("zero-rows", build(tensor("token_embd.weight", lambda a: np.vstack([a[:-2], 0 * a[-2:]])))),
    "nan": ("nonfinite", build(tensor("blk.0.ffn_up.weight", poisoned))),
    "code": ("template-code", build(put("tokenizer.chat_template", gguf.STRING, "{{ lipsum.x }}"))),
}


def test_every_warning_has_a_file_that_llama_cpp_loads(tmp_path: Path) -> None:
    warnings = {rule for rule, severity in RULES.items() if severity == "warning"}
    assert {rule for rule, _ in WARNED.values()} == warnings - {"rope-pairing"}  # below
    paths = [tmp_path / f"{name}.gguf" for name in WARNED]
    for path, (rule, data) in zip(paths, WARNED.values(), strict=True):
        path.write_bytes(data)
        report = check(path, deep=True)
        assert rule in {f.rule for f in report.findings if f.severity == "warning"}, path.stem
        assert not report.refused, path.stem
    for path, (loaded, words) in zip(paths, llamacpp.judged(paths), strict=True):
        assert loaded, (path.stem, words)


def saved(folder: Path, data: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_a_role_without_a_key_is_token_11(role: str, tmp_path: Path) -> None:
    path = saved(tmp_path, WARNED[f"no-{role}"][1])
    with formats.open(path) as ck:
        assert ck.tokenizer is not None
        shown = ck.tokenizer.decode([11])
    assert llamacpp.tokenized(path, [])[1][f"{role}_token"] == shown
    (found,) = [f for f in check(path).findings if f.rule == f"{role}-default"]
    assert f"token 11 ({shown!r})" in found.effect


def test_an_id_out_of_range_is_token_11(tmp_path: Path) -> None:
    path = saved(tmp_path, WARNED["eos-range"][1])
    with formats.open(path) as ck:
        assert ck.tokenizer is not None
        assert llamacpp.tokenized(path, [])[1]["eos_token"] == ck.tokenizer.decode([11])


def test_without_pre_numbers_and_punctuation_are_cut_in_other_places(trained: Path, tmp_path: Path) -> None:
    text = 'in 1234567 years..." he said, "ROMEO\'s 12 o\'clock!"'
    right, wrong = tmp_path / "right.gguf", tmp_path / "wrong.gguf"
    ckptkit.convert(trained / "gpt2_tiny.bin", right)
    ckptkit.convert(right, wrong, write=WriteOptions(remove=(f"{T}pre",)))
    (named,), (unnamed,) = llamacpp.tokenized(right, [text])[0], llamacpp.tokenized(wrong, [text])[0]
    assert named != unnamed
    for path, ids in ((right, named), (wrong, unnamed)):
        with formats.open(path) as ck:
            assert ck.tokenizer is not None
            assert ck.tokenizer.encode(text) == ids
    assert "pre-missing" in {f.rule for f in check(wrong).findings}


@pytest.mark.parametrize("name", ["token_type", "scores"])
def test_without_types_or_scores_other_ids(name: str, tmp_path: Path) -> None:
    text = {"token_type": "<s>the rest", "scores": "he"}[name]
    last = tokens(lambda t: [*t[:-1], "\u2581h"])  # the worst score, and the leftmost pair
    right = llamacpp.tokenized(saved(tmp_path, build(last, arch="llama")), [text])[0]
    wrong = llamacpp.tokenized(saved(tmp_path, build(last, without(T + name), arch="llama")), [text])[0]
    assert right != wrong


def test_a_merge_of_what_is_no_token_never_happens(tmp_path: Path) -> None:
    texts = ["the rest is here"]
    none = llamacpp.tokenized(saved(tmp_path, build(array(f"{T}merges", gguf.STRING, []))), texts)[0]
    for name in ("bad-merge", "foreign-merge"):
        assert llamacpp.tokenized(saved(tmp_path, WARNED[name][1]), texts)[0] == none


def test_without_a_rope_base_it_is_ten_thousand(tmp_path: Path) -> None:
    key, prompt = "qwen2.rope.freq_base", [1, 5, 9, 12, 3, 20, 4, 8]

    def top(*edits: object) -> list[list[float]]:
        answer = llamacpp.run(saved(tmp_path, build(*edits, arch="qwen2")), prompt, 1)  # type: ignore[arg-type]
        assert answer is not None
        return answer["top"][0]

    absent = top(without(key))
    assert absent == top(put(key, gguf.F32, 10000.0))
    assert absent != top()


def test_rows_of_zeros_are_sampled_where_real_tokens_are_unlikely(tmp_path: Path) -> None:
    def edit(keys, stored):  # type: ignore[no-untyped-def]
        rows, kind = stored["token_embd.weight"]
        rows = -np.abs(rows)
        rows[-3:] = 0
        gain, bias = stored["output_norm.weight"][0], stored["output_norm.bias"][0]
        return keys, stored | {
            "token_embd.weight": (rows, kind),
            "output_norm.weight": (0 * gain, "f32"),
            "output_norm.bias": (1 + 0 * bias, "f32"),
        }

    path = saved(tmp_path, build(edit))
    answer = llamacpp.run(path, [1, 2], 1)
    assert answer is not None
    assert {i for i, _ in answer["top"][0][:3]} == {26, 27, 28}
    (found,) = [f for f in check(path).findings if f.rule == "zero-rows"]
    assert (found.at, found.what) == ("tensor token_embd.weight, row 26", "the last 3 rows are zero")


def test_a_value_that_is_nan_makes_every_answer_nan(tmp_path: Path) -> None:
    path = saved(tmp_path, WARNED["nan"][1])
    assert not any(f.rule == "nonfinite" for f in check(path).findings)  # only where values are read
    (found,) = [f for f in check(path, deep=True).findings if f.rule == "nonfinite"]
    assert found.at == "tensor blk.0.ffn_up.weight, row 1"
    answer = llamacpp.run(path, [1], 1)
    assert answer is not None
    assert {p for _, p in answer["top"][0]} == {None}


# -- pairing


def repaired(source: Path, target: Path, claimed: str) -> None:
    """The model with q and k in the other pairing, under an arch that means `claimed`."""
    with formats.open(source) as ck:
        bad = with_pairing(ck, {"adjacent": "half", "half": "adjacent"}[claimed])
        bad = replace(bad, config=replace(bad.config, rope_pairing=claimed))
        ours.write(bad, write_rows(ours.LAYOUTS[ck.config.arch], bad.config, bad.tensors), target, WriteOptions())


def trained_like(arch: str, head: int = 32, n: int = 8) -> bytes:
    """Random q and k whose pairs have lengths that fall with the frequency, as in trained models."""
    m = llama(10, dim=head * n, hidden=32, vocab=270, n_head=n, n_kv_head=n, n_layer=4)
    rng = np.random.default_rng(1)
    for name in ("wq", "wk"):
        pairs = np.exp(-np.linspace(0, 3, head // 2) + 0.3 * rng.standard_normal((4, n, head // 2)))
        lengths = np.repeat(pairs, 2, axis=-1) if arch == "llama" else np.concatenate([pairs, pairs], axis=-1)
        rows = rng.standard_normal((4, head * n, head * n)) * lengths.reshape(4, -1, 1)
        m.p[name] = rows.astype(np.float32)
    return gguf.gguf(gguf.llama_keys(m, arch) + SPM, gguf.llama_tensors(m))


@pytest.mark.parametrize(("arch", "meant"), [("llama", "adjacent"), ("qwen2", "half")])
def test_pairing_is_told_from_the_lengths_of_rows(arch: str, meant: str, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.gguf", tmp_path / "wrong.gguf"
    right.write_bytes(trained_like(arch))
    repaired(right, wrong, meant)
    assert "rope-pairing" not in {f.rule for f in check(right).findings}
    (found,) = [f for f in check(wrong).findings if f.rule == "rope-pairing"]
    assert f"{arch} means {meant} pairs" in found.what
    assert llamacpp.judged([wrong])[0][0]


def test_pairing_of_random_weights_is_left_alone(tmp_path: Path) -> None:
    m = llama(10, dim=256, hidden=32, vocab=270, n_head=8, n_kv_head=8, n_layer=4)
    for arch in ("llama", "qwen2"):
        path = saved(tmp_path, gguf.gguf(gguf.llama_keys(m, arch) + SPM, gguf.llama_tensors(m)))
        assert "rope-pairing" not in {f.rule for f in check(path).findings}


@pytest.mark.slow
def test_pairing_of_a_real_model(models: Path, tmp_path: Path) -> None:
    """SmolLM2 with its rows in half order: check says so, and llama.cpp no longer repeats a sentence."""
    right, wrong = models / SMOLLM, tmp_path / "wrong.gguf"
    repaired(right, wrong, "adjacent")
    assert "rope-pairing" not in {f.rule for f in check(right).findings}
    assert "rope-pairing" in {f.rule for f in check(wrong).findings}
    with formats.open(right) as ck:
        assert ck.tokenizer is not None
        ids = ck.tokenizer.encode(2 * "A small green bird sat on the roof of our house and sang a song about rain. ")
    known = {}
    for path in (right, wrong):
        answers = llamacpp.run_all(path, [ids[:k] for k in range(len(ids) // 2 + 2, len(ids), 2)], 1)
        assert answers is not None
        known[path] = np.mean([a["ids"][0] == i for a, i in zip(answers, ids[len(ids) // 2 + 2 :: 2], strict=True)])
    assert known[right] > 0.7  # it has read the sentence before
    assert known[wrong] < known[right] - 0.3

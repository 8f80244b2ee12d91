"""The runtime on every committed model against its float64 judge, the trained ones against their references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import CASES, Case
from smollm import SMOLLM

import ckptkit
from ckptkit.formats.options import ReadOptions
from ckptkit.runtime import load

BAR = 2e-4


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "gguf/llama_big_endian.gguf"], ids=str)
def test_logits_are_the_judges(case: Case, fixtures_dir: Path) -> None:
    from ckptkit import formats

    ids = case.ids()
    with load(formats.open(case.path(fixtures_dir), options=ReadOptions(**case.told))) as model:
        found = model.forward(ids)
        stepwise = model.new_cache(context=len(ids))
        steps = np.stack([model.forward([i], stepwise, logits="last") for i in ids])
    expected = case.logits(ids)
    assert np.abs(found - expected).max() <= BAR
    assert np.abs(steps - expected).max() <= BAR


TRAINED = {
    "gpt2_tiny.bin": ("gpt2_tiny_fp32.ref.npz", "x", "logits_row0"),
    "nanoeuler_main.bin": ("nanoeuler_main.ref.npz", "prompt", "logits_head0"),
}
SHARED = TRAINED | {
    "gpt2_tiny_bf16.bin": ("gpt2_tiny_bf16.ref.npz", "x", "logits_row0"),
    "realvocab/gpt2_rand_c16.bin": ("realvocab/gpt2_rand_c16.ref.npz", "x", "logits"),
}


def agrees(folder: Path, name: str, ref: str, prompt: str, logits: str) -> None:
    z = np.load(folder / ref)
    ids = z[prompt][0] if z[prompt].ndim == 2 else z[prompt]
    expected = z[logits][0] if z[logits].ndim == 3 else z[logits]
    with ckptkit.load(folder / name) as model:
        found = model.forward(ids)
        assert found.shape == (len(ids), model.config.vocab_size)
        assert np.abs(found[-len(expected) :] - expected).max() <= BAR
        if "greedy" in z.files:
            start, greedy = [int(i) for i in z["prompt"]], [int(i) for i in z["greedy"]]
            from ckptkit.runtime.generate import GenerateOptions, generate
            from ckptkit.runtime.sampler import Sampling

            options = GenerateOptions(len(greedy) - len(start), ignore_eos=True, sampling=Sampling(temp=0))
            assert generate(model, start, options).ids == greedy[len(start) :]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_checkpoints(name: str, fixtures_dir: Path) -> None:
    agrees(fixtures_dir / "trained", name, *TRAINED[name])


@pytest.mark.parametrize("name", SHARED)
def test_all_references(name: str, shared: Path) -> None:
    agrees(shared, name, *SHARED[name])


def test_last_position_of_all_prediction_heads(fixtures_dir: Path) -> None:
    z = np.load(fixtures_dir / "trained" / "nanoeuler_main.ref.npz")
    with ckptkit.load(fixtures_dir / "trained" / "nanoeuler_main.bin") as model:
        for head, expected in enumerate(z["logits_all_last"]):
            found = model.forward(z["prompt"], logits="last", head=head)
            assert np.abs(found - expected).max() <= BAR


def test_seed_002_with_what_its_file_does_not_say(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "trained"
    z = np.load(folder / "nx_ours_qwen.ref.npz")
    from ckptkit import formats

    told = ReadOptions(folder / "nx_ours_qwen_vocab.bin", norm_eps=1e-6, rope_theta=1e6, context_length=64)
    with load(formats.open(folder / "nx_ours_qwen.gguf", options=told)) as model:
        assert np.abs(model.forward(z["tokens"]) - z["logits"]).max() <= BAR
        assert model.tokenizer is not None
        assert model.tokenizer.decode(z["tokens"].tolist()).startswith("the quick brown fox")


def test_smollm2_continues_as_float64_does(shared: Path, models: Path) -> None:
    z = np.load(shared / "SmolLM2_ref.npz")
    with ckptkit.load(models / SMOLLM, context=64) as model:
        assert model.tokenizer is not None
        ids = model.tokenizer.encode("The capital of France is")
        assert ids == z["ids"].tolist()
        from ckptkit.runtime.generate import GenerateOptions, generate
        from ckptkit.runtime.sampler import Sampling

        result = generate(model, ids, GenerateOptions(12, sampling=Sampling(temp=0)))
        assert result.ids == z["greedy"].tolist()[len(ids) :][:12]
        assert (
            np.abs(model.forward(ids, logits="last") - z["logits_last"]).max() <= 1e-4 * np.abs(z["logits_last"]).max()
        )


@pytest.mark.parametrize(
    ("start", "name"), [("", "anan"), ("a", "anan"), ("ja", "jaria"), ("em", "emili"), ("ch", "chan")]
)
def test_microgpt_says_the_names_that_its_own_program_says(start: str, name: str, fixtures_dir: Path) -> None:
    """Greedy names printed by microgpt.py itself at the end of its training."""
    with ckptkit.load(fixtures_dir / "trained" / "microgpt_names.json") as model:
        assert model.tokenizer is not None
        prompt = model.tokenizer.encode_prompt(start)
        result = model.generate(prompt, temp=0)
        assert start + (result.text or "") == name
        assert result.stop_reason == "eos"

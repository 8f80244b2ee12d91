"""Chat prompts, the padded window, and batches: each against what the original or a single run does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ckptkit
from ckptkit.errors import UnsupportedError
from ckptkit.runtime.batch import generate_batch
from ckptkit.runtime.chat import chat_prompt, render
from ckptkit.runtime.generate import GenerateOptions, generate
from ckptkit.runtime.sampler import Sampling

GREEDY = Sampling(temp=0)


@pytest.fixture
def trained(fixtures_dir: Path) -> Path:
    return fixtures_dir / "trained"


def test_alpaca_prompts_are_the_originals_ids_and_answers(trained: Path) -> None:
    chats = json.loads((trained / "nanoeuler_chat.info.json").read_text())["chats"]
    z = np.load(trained / "nanoeuler_chat.ref.npz")
    assert len(chats) == 4
    with ckptkit.load(trained / "nanoeuler_chat.bin") as model:
        for k, chat in enumerate(chats):
            ids, stops = chat_prompt(model.tokenizer, chat["instruction"], chat["input"])
            assert ids == chat["prompt_ids"] == z[f"prompt{k}"].tolist()
            assert np.abs(model.forward(ids, logits="last") - z[f"last_logits{k}"]).max() <= 2e-4
            result = generate(model, ids, GenerateOptions(40, stop=stops, sampling=GREEDY))
            assert result.stop_reason == "stop"
            assert result.text == chat["greedy"].removesuffix("</s>")
            assert result.ids == chat["greedy_ids"]


def test_left_padded_generation_is_the_originals(trained: Path) -> None:
    z = np.load(trained / "nanoeuler_main.ref.npz")
    greedy = z["leftpad_greedy"].tolist()
    with ckptkit.load(trained / "nanoeuler_main.bin") as model:
        options = GenerateOptions(len(greedy), left_pad=True, sampling=GREEDY)
        assert generate(model, z["prompt"], options).ids == greedy
        window = [0] * (64 - len(z["prompt"])) + z["prompt"].tolist()
        assert np.abs(model.forward(window, logits="last") - z["leftpad_logits_head0"]).max() <= 2e-4
        assert generate(model, z["prompt"], GenerateOptions(len(greedy), sampling=GREEDY)).ids != greedy


@pytest.mark.parametrize("n_batch", [1, 2, 8])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=11)], ids=["greedy", "seeded"])
def test_every_row_of_a_batch_is_its_single_run(sampling: Sampling, n_batch: int, trained: Path) -> None:
    prompts = [[49, 46, 44], [40], [47, 46, 43, 40, 55, 349], [13, 198], [256] * 50]
    with ckptkit.load(trained / "gpt2_tiny.bin") as model:
        options = GenerateOptions(20, stop=(".",), sampling=sampling)
        batched = generate_batch(model, prompts, options, n_batch)
        for prompt, row in zip(prompts, batched, strict=True):
            alone = generate(model, prompt, options)
            assert (row.ids, row.text, row.stop_reason) == (alone.ids, alone.text, alone.stop_reason)


def with_template(template: str) -> SimpleNamespace:
    return SimpleNamespace(
        kind="byte-bpe", chat_template=template, ids={"bos": 1}, token_bytes=lambda _id: b"<s>", encode=None
    )


def test_a_template_sees_message_and_bos() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} >{% endif %}"
    )
    assert render(with_template(template), "hi") == "<s>[user] hi >"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (  # a system message is looked for, as Llama's and Qwen's templates do
            "{% set ns = namespace(found=false, turns=0) %}{% for m in messages %}{% if m.role == 'system' %}"
            "{% set ns.found = true %}{% endif %}{% set ns.turns = ns.turns + 1 %}{% endfor %}"
            "{{ ns.found }} {{ ns.turns }}",
            "False 1",
        ),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<a> & ü"}]'),
        ("{% if strftime_now is defined %}{{ strftime_now('%%') }}{% endif %}", "%"),
        ("{% generation %}{{ messages[0].content }}{%- endgeneration %}", "<a> & ü"),
        ("{% for m in messages %}\n  {% if tools %}x{% endif %}{{ m.content }}\n{% endfor %}", "<a> & ü\n"),
    ],
)
def test_templates_may_use_what_transformers_gives_them(template: str, text: str) -> None:
    assert render(with_template(template), "<a> & ü") == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ messages }}{% endfor %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.center(10**10) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{{ open('/etc/passwd').read() }}",
    ],
)
def test_hostile_templates_end_in_one_clear_error(template: str) -> None:
    """Among them those that would run forever, or fill the memory, without a character of output."""
    with pytest.raises(UnsupportedError, match="template"):
        render(with_template(template), "hi")


def test_no_template_is_said(trained: Path) -> None:
    with ckptkit.open(trained / "gpt2_tiny.bin") as ck, pytest.raises(UnsupportedError, match="no chat template"):
        chat_prompt(ck.tokenizer, "hi")

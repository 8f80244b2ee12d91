"""Generation: stop rules, streams and refusals, with a model that says what the test tells it, and with real ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ckptkit
from ckptkit.errors import UnsupportedError
from ckptkit.runtime.generate import GenerateOptions, generate
from ckptkit.runtime.sampler import Sampling
from ckptkit.tokenizer import ByteBPE, Strings
from ckptkit.tokenizer.byte_alphabet import to_text

GREEDY = Sampling(temp=0)


class Parrot:
    """A model over bytes (id 256: end of text) whose likeliest tokens are a given sequence."""

    device, precision = "cpu", "exact"

    def __init__(self, says: bytes | list[int], context: int = 1000) -> None:
        self.says = list(says)
        texts = [to_text(bytes([b])).encode() for b in range(256)] + [b"<end>"]
        types = np.ones(257, np.int32)
        types[256] = 3
        self.tokenizer = ByteBPE(Strings.of(texts), Strings.of(()), pre="gpt-2", types=types, ids={"eos": 256})
        self.config = SimpleNamespace(vocab_size=257, context_length=context)
        self.context = context

    def new_cache(self, n_seq: int = 1, context: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(context=context)

    def _logits(self, k: int) -> np.ndarray:
        z = np.zeros(257, np.float32)
        z[self.says[k % len(self.says)]] = 9
        return z

    def forward(self, ids, cache=None, logits="all"):
        return self._logits(0)

    def prepare(self, cache, samplers, n_prompt):
        pass

    def decode(self, cache, token, sampler, history):
        k = 1
        while True:
            token = sampler.pick(self._logits(k), history)
            k += 1
            yield token


def said(model: Parrot, **how: object) -> tuple[str, list[str], str]:
    pieces: list[str] = []
    result = generate(model, [1], GenerateOptions(sampling=GREEDY, **how), pieces.append)  # type: ignore[arg-type]
    assert "".join(pieces) == result.text
    return result.text or "", pieces, result.stop_reason


def test_an_emoji_split_over_tokens_comes_out_whole() -> None:
    text, pieces, _ = said(Parrot("a🙂b".encode()), n_predict=6)
    assert text == "a🙂b"
    assert pieces == ["a", "🙂", "b"]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert said(Parrot(b"a\xffb"), n_predict=3)[0] == "a�b"
    assert said(Parrot(b"a\xf0\x9f"), n_predict=3)[0] == "a�"


def test_a_stop_string_over_three_tokens_never_shows_a_part() -> None:
    text, pieces, reason = said(Parrot(b"xxSTOPyy"), stop=("STOP",), n_predict=20)
    assert (text, reason) == ("xx", "stop")
    assert pieces == ["x", "x"]


def test_what_only_begins_like_a_stop_string_comes_out_in_the_end() -> None:
    assert said(Parrot(b"xxSTOzz"), stop=("STOP",), n_predict=5)[0] == "xxSTO"
    assert said(Parrot(b"xxSTOzz"), stop=("STOP",), n_predict=7)[0] == "xxSTOzz"


def test_end_of_text_stops_unless_ignored() -> None:
    says = [97, 98, 256, 99]
    assert said(Parrot(says), n_predict=9)[::2] == ("ab", "eos")
    text, _, reason = said(Parrot(says), n_predict=4, ignore_eos=True)
    assert reason == "length"
    assert "<end>" not in text


def test_control_tokens_show_only_on_request() -> None:
    assert said(Parrot([97, 256]), n_predict=9, special=True)[0] == "a<end>"


@pytest.mark.parametrize(
    ("n", "prompt", "reason", "length"),
    [(3, 2, "length", 3), (-1, 2, "context", 7), (50, 2, "context", 7), (0, 2, "length", 0), (-1, 8, "context", 1)],
)
def test_length_and_context_end_with_a_reason(n: int, prompt: int, reason: str, length: int) -> None:
    """A context of 8 holds the prompt and all generated tokens but the last, which is not fed back."""
    model = Parrot(b"abc", context=8)
    result = generate(model, [1] * prompt, GenerateOptions(n, sampling=GREEDY))  # type: ignore[arg-type]
    assert (result.stop_reason, len(result.ids)) == (reason, length)


@pytest.mark.parametrize("prompt", [[], [257], [-1], [1] * 9])
def test_prompts_that_cannot_be_are_refused(prompt: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="prompt"):
        generate(Parrot(b"abc", context=8), prompt)  # type: ignore[arg-type]


def test_full_context_of_learned_positions(fixtures_dir: Path) -> None:
    with ckptkit.load(fixtures_dir / "trained" / "gpt2_tiny.bin") as model:
        result = generate(model, [49] * 60, GenerateOptions(50, ignore_eos=True, sampling=GREEDY))
        assert (result.stop_reason, len(result.ids)) == ("context", 5)
        with pytest.raises(UnsupportedError, match="longer than the context"):
            generate(model, [49] * 65)


def test_same_seed_gives_the_same_text(fixtures_dir: Path) -> None:
    with ckptkit.load(fixtures_dir / "trained" / "gpt2_tiny.bin") as model:
        runs = [generate(model, [49, 46], GenerateOptions(20, sampling=Sampling(seed=s))).ids for s in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]

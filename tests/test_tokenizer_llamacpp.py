"""Every splitter of the table, judged by llama.cpp as it is installed: ids of random texts.

The vocabulary is trained on such texts without cutting them, so that its tokens reach over every place where a splitter
may cut, and each cut shows in the ids.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import llamacpp
import pytest

from ckptkit import formats
from ckptkit.tokenizer.pre import PRES
from fixtures.models import gpt2
from fixtures.writers import gguf

pytest.importorskip("xllamacpp", reason="needs xllamacpp, llama.cpp in process")

PARTS = [
    *(
        "the rest",
        "ROMEO",
        "XMLHttp",
        "don't",
        "'LL",
        " I'm",
        "o'clock!",
        "na\u00efve",
        "\u0301x",
        "\u043f\u0440\u0438",
    ),
    *(
        "1",
        "12",
        "123",
        "1234",
        "12345",
        "123456",
        "1234567",
        "12345678",
        "\u00bd",
        "\u0663\u0664",
        "x1y22z333",
        "3.14",
    ),
    *("\n", "\n\n", "\r\n", " ", "  ", "    ", "\t", "\u00a0", "\u2026", "\u2014", "!?", "...", "$x", "a_b", "#if"),
    *("\u4e2d\u6587", "\u65e5\u672c\u30ab\u30ca", "\ud55c\uad6d", "\u0e44\u0e17\u0e22", "\u0928\u092e\u0938\u094d"),
    *("\u3105\u3106", "\U0001f642", "\U0001f469\u200d\U0001f467", "\u200b", "(x)", "1,000,000"),
]


def texts(seed: int, n: int) -> list[str]:
    rng = random.Random(seed)
    return [rng.choice(("", " ")).join(rng.choices(PARTS, k=rng.randint(1, 9))) for _ in range(n)]


@lru_cache(1)
def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges in the byte alphabet."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(
        texts(1, 3000), trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(t.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return [*tokens, "<|endoftext|>"], [" ".join(m) for m in model["merges"]]


ROWS = {pre.patterns: name for name, pre in reversed(PRES.items())}


@pytest.mark.parametrize("name", ROWS.values())
def test_ids_are_llama_cpps(name: str, tmp_path: Path) -> None:
    path, asked = tmp_path / "m.gguf", texts(2, 60)
    tokens, merges = vocabulary()
    assert len(tokens) > 2500
    m = gpt2(vocab=len(tokens))
    keys = gguf.gpt2_keys(m) + gguf.bpe_keys(tokens, merges, eot=len(tokens) - 1, pre=name)
    path.write_bytes(gguf.gguf(keys, gguf.gpt2_tensors(m)))
    theirs, _ = llamacpp.tokenized(path, asked)
    with formats.open(path) as ck:
        assert ck.tokenizer is not None
        for text, ids in zip(asked, theirs, strict=True):
            assert ck.tokenizer.encode_prompt(text, special=True) == ids, repr(text)

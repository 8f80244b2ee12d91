"""SPM: ids judged by llama.cpp's vectors and by a second, plain implementation of the rule."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocab_files import arguments, gguf_keys, vectors

from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.tokenizer import Strings
from ckptkit.tokenizer.spm import SPM


@pytest.fixture(scope="module")
def llama(shared: Path) -> SPM:
    keys = gguf_keys(shared / "vocab" / "ggml-vocab-llama-spm.gguf")
    return SPM(Strings.of(keys["tokenizer.ggml.tokens"]), keys["tokenizer.ggml.scores"], **arguments(keys))


def plain(tokens: list[str], scores: list[float], text: str) -> list[str]:
    """The rule: of all adjacent pairs whose text is a token the best score, the leftmost of equals, one at a time."""
    score = dict(zip(tokens, scores, strict=True))
    parts = list(text)
    while True:
        found = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_ids_equal_llama_cpp_in_all_vectors(llama: SPM, shared: Path) -> None:
    base = shared / "vocab" / "ggml-vocab-llama-spm.gguf"
    for text, expected in vectors(base.with_suffix(".gguf.inp"), base.with_suffix(".gguf.out")):
        assert llama.encode(text) == expected, text
        assert llama.decode_bytes(expected) == text.encode()


def test_bytes_of_every_id_come_back(llama: SPM) -> None:
    for i in range(llama.vocab_size):
        data = llama.token_bytes(i)
        assert llama.decode_bytes(llama.encode(data)) == data, i


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=40), st.text(" a▁\n😀é<s>", max_size=30).map(str.encode)))
def test_any_bytes_come_back_the_space_sign_too(llama: SPM, data: bytes) -> None:
    assert llama.decode_bytes(llama.encode(data)) == data


def test_long_text_joins_as_by_the_rule(llama: SPM) -> None:
    text = "The quick  brown fox, naïve; " * 3 + "a" * 700 + "   " * 250 + "中文字" * 40 + "x y"
    tokens = [t.decode() for t in llama.tokens]
    ordinary = [i for i in range(llama.vocab_size) if llama.types is not None and llama.types[i] == 1]
    expected = plain(
        [tokens[i] for i in ordinary], [float(llama.scores[i]) for i in ordinary], "▁" + text.replace(" ", "▁")
    )
    got = [tokens[i] for i in llama.encode(text)]
    known = set(tokens)
    assert got == [q for p in expected for q in ([p] if p in known else [f"<0x{b:02X}>" for b in p.encode()])]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab▁", min_size=2, max_size=4), unique=True, max_size=10),
    st.lists(st.integers(-4, 4), min_size=13, max_size=13),
    st.text("ab ", max_size=60),
)
def test_any_vocabulary_joins_as_by_the_rule(words: list[str], scores: list[int], text: str) -> None:
    tokens = ["a", "b", "▁", *words]
    values = [float(s) for s in scores[: len(tokens)]]
    tokenizer = SPM(
        Strings.of(t.encode() for t in tokens), np.array(values, np.float32), add_space_prefix=False, ids={"bos": -1}
    )
    assert [tokens[i] for i in tokenizer.encode(text)] == plain(tokens, values, text.replace(" ", "▁"))


def test_control_tokens_and_prefix_spaces(llama: SPM) -> None:
    assert llama.encode("</s>") != [2]
    ids = llama.encode("a</s>b", special=True)
    assert ids == [*llama.encode("a"), 2, *llama.encode("b")]
    assert llama.decode_bytes(ids) == b"a</s>b"
    assert llama.encode_prompt("a") == [1, *llama.encode("a")]
    assert llama.encode("") == []
    assert llama.end_ids == {2}


def small(**more: Any) -> SPM:
    tokens = ["<unk>", "<s>", "</s>", "a", "▁", "▁a"]
    types = np.array([2, 3, 3, 1, 1, 1], np.int32)
    return SPM(Strings.of(t.encode() for t in tokens), np.arange(6, dtype=np.float32), types=types, **more)


def test_without_byte_tokens_an_unknown_character_is_an_error() -> None:
    assert small().encode("a") == [5]
    for data in ("é", b"\xff"):
        with pytest.raises(UnsupportedError, match="no token for a byte"):
            small().encode(data)


def test_malformed_vocabularies() -> None:
    with pytest.raises(FormatError, match="scores does not have one entry for each token"):
        SPM(Strings.of([b"a", b"b"]), np.zeros(1, np.float32)).encode("a")
    with pytest.raises(FormatError, match="written the same"):
        SPM(Strings.of([b"x", b"a", b"a"]), np.zeros(3, np.float32)).encode("a")
    tokenizer = SPM(Strings.of([b"<0xZZ>"]), None, types=np.array([6], np.int32))
    assert "no scores" in tokenizer.notes[0]
    with pytest.raises(FormatError, match="byte token"):
        tokenizer.token_bytes(0)

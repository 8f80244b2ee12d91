"""Character tokenizers: microgpt's and byte maps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.tokenizer.chars import CharTokenizer


def test_microgpts_ids(shared: Path) -> None:
    uchars = json.loads((shared / "microgpt_names.json").read_text())["uchars"]
    tokenizer = CharTokenizer.from_chars(list(uchars))
    assert tokenizer.vocab_size == 27
    assert tokenizer.bos == tokenizer.eos == 26
    assert tokenizer.encode("emma") == [4, 12, 12, 0]
    assert tokenizer.encode_prompt("emma") == [26, 4, 12, 12, 0]
    assert tokenizer.decode([26, 4, 12, 12, 0, 26]) == "emma"
    assert tokenizer.end_ids == {26}


def test_byte_map_of_the_qwen2_trainer(shared: Path) -> None:
    data = (shared / "nx_ours_qwen_vocab.bin").read_bytes()
    tokenizer = CharTokenizer.from_bytes(data)
    text = "the quick brown fox jumps over the lazy dog. "
    order = "".join(dict.fromkeys(text))
    assert tokenizer.encode(text) == [order.index(c) for c in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.bos is None
    assert not tokenizer.add_bos
    assert tokenizer.encode_prompt("the") == [0, 1, 2]


def test_any_byte_can_be_a_token() -> None:
    tokenizer = CharTokenizer.from_bytes(b"\xff\x00a")
    assert tokenizer.encode(b"a\x00\xff") == [2, 1, 0]
    assert list(tokenizer.alphabet_texts()) == ["ÿ".encode(), "Ā".encode(), b"a"]


def test_alphabet_texts_are_read_back() -> None:
    for tokenizer in (CharTokenizer.from_bytes(b" a\xff"), CharTokenizer.from_chars(["a", "é"])):
        again = CharTokenizer.from_alphabet(tokenizer.alphabet_texts(), tokenizer.bos)
        assert list(again.tokens) == list(tokenizer.tokens)
        assert again.bos == tokenizer.bos


def test_unknown_characters_and_bad_vocabularies() -> None:
    tokenizer = CharTokenizer.from_chars(["a", "b"])
    for text in ("abc", "é", b"\xff"):
        with pytest.raises(UnsupportedError, match="not in the vocabulary"):
            tokenizer.encode(text)
    with pytest.raises(FormatError, match="same character"):
        CharTokenizer.from_bytes(b"aba")
    with pytest.raises(FormatError, match="empty"):
        CharTokenizer([b"a", b""])
    with pytest.raises(FormatError, match="outside the vocabulary"):
        CharTokenizer([b"a"], 1)
    assert tokenizer.encode("<bos>a"[5:]) == [0]

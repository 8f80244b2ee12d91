"""The table of splitters, judged by llama.cpp: pre_vectors.json holds llama_tokenize's ids with GPT-2's vocabulary.

They were taken from ggml-vocab-gpt-2.gguf with another `tokenizer.ggml.pre` written into it (libllama of
llama-cpp-python 0.3.36 or xllamacpp, no special tokens), one name for each row of the table.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_files import byte_bpe

from ckptkit.errors import UnsupportedError
from ckptkit.tokenizer import ByteBPE
from ckptkit.tokenizer.pre import ELSEWHERE, PATTERNS, PRES, SETS, lookup
from ckptkit.tokenizer.split import classify, ranges, words

VECTORS = json.loads((Path(__file__).parent / "pre_vectors.json").read_text())


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> ByteBPE:
    return byte_bpe(shared / "vocab" / "ggml-vocab-gpt-2.gguf")  # type: ignore[no-any-return]


def test_every_row_has_vectors() -> None:
    covered = {PRES[name].patterns for name in VECTORS["ids"]}
    assert covered == set(PATTERNS.values()) == {pre.patterns for pre in PRES.values()}


@pytest.mark.parametrize("name", VECTORS["ids"])
def test_ids_equal_llama_cpp_for_every_row(name: str, gpt2: ByteBPE) -> None:
    tokenizer = ByteBPE(gpt2.tokens, gpt2.merge_texts(), pre=name, types=gpt2.types)
    for text, expected in zip(VECTORS["texts"], VECTORS["ids"][name], strict=True):
        assert tokenizer.encode(text) == expected, text


@given(st.text(max_size=40), st.sampled_from(sorted(PRES)))
def test_words_add_up_to_the_text(text: str, name: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    pieces = list(words(PRES[name], text))
    assert "".join(pieces) == text
    assert all(pieces)


def test_words_are_cut_as_written_in_the_patterns() -> None:
    text = "Don't  12345\n\n x"
    assert list(words(PRES["gpt-2"], text)) == ["Don", "'t", " ", " 12345", "\n\n", " x"]
    assert list(words(PRES["llama-bpe"], text)) == ["Don", "'t", " ", " ", "123", "45", "\n\n", " x"]
    assert list(words(PRES["qwen2"], "'S 12")) == ["'S", " ", "1", "2"]
    assert list(words(PRES["smollm"], "a12 3")) == ["a", "1", "2", " ", "3"]
    assert list(words(PRES["default"], "12345,x")) == ["123", "45", ",", "x"]


def test_names_share_rows_and_carry_their_defaults() -> None:
    assert PRES["deepseek-r1-qwen"] == PRES["qwen2"]
    assert lookup("llama-bpe").add_bos
    assert lookup("llama-bpe").ignore_merges
    assert not lookup("qwen2").add_bos
    assert lookup("tekken").add_bos
    for name in ("nanoeuler", ""):
        with pytest.raises(UnsupportedError, match=re.escape(f"unknown pre-tokenizer {name!r}")):
            lookup(name)
    for name in ELSEWHERE:
        with pytest.raises(UnsupportedError, match="not supported"):
            lookup(name)


def test_classes_are_those_of_unicode_16_on_any_python() -> None:
    letter, number, mark, symbol, space = 1, 2, 3, 5, 0
    given_text = "é½\u0301€\u00a0\U00011f04\U00011f50\u0cf3\u2ffc\u3000"
    kinds = [letter, number, mark, symbol, space, letter, number, mark, symbol, space]
    assert list(classify(given_text, ())) == [0x80 | k for k in kinds]
    assert classify("aé", ("latin",)) == bytes([ord("a"), 0x80 | letter | 8])
    assert classify("中\u3000", ("cjk", "wide")) == bytes([0x80 | letter | 8, 0x80])


def test_sets_are_sorted_ranges_outside_ascii() -> None:
    for name, text in SETS.items():
        bounds = ranges(text)
        assert bounds == sorted(bounds), name
        assert all(0x80 <= lo <= hi <= 0x10FFFF for lo, hi in bounds), name


def test_tokenizers_package_is_imported_on_first_use_only() -> None:
    code = "import sys, ckptkit.tokenizer.spm; sys.exit(not {'tokenizers', 'numba'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

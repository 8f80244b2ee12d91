"""Byte-level BPE: ids judged by llama.cpp's vectors, by llm.c's and by the `tokenizers` package."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smollm import SMOLLM
from vocab_files import byte_bpe, gguf_keys, vectors

from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.tokenizer import ByteBPE, Strings, TokenType
from ckptkit.tokenizer.byte_alphabet import ORDER, to_bytes, to_text
from ckptkit.tokenizer.byte_bpe import LONG
from ckptkit.tokenizer.merging import encode_blocks, merge

NAMES = ("gpt-2", "qwen2", "llama-bpe", "smollm")
HOSTILE = bytes(range(256)) * 2 + b"\xff\xfe abc \xe2\x82 \xed\xa0\x80 \xf4\x90\x80\x80 caf\xc3\xa9 <|endoftext|> </s>"


@pytest.fixture(scope="session")
def real(shared: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    known: dict[str, Any] = {}

    class Lazy(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            if name == "smollm":
                path = request.getfixturevalue("models") / SMOLLM
            else:
                path = shared / "vocab" / f"ggml-vocab-{name}.gguf"
            known[name] = self[name] = byte_bpe(path)
            return self[name]

    return Lazy()


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_llama_cpp_in_all_vectors(name: str, real: dict[str, Any], shared: Path) -> None:
    folder = shared / "vocab"
    base = "gpt-2" if name == "smollm" else name
    texts = folder / f"ggml-vocab-{base}.gguf.inp"
    ids = folder / ("smollm.out" if name == "smollm" else f"ggml-vocab-{name}.gguf.out")
    tokenizer = real[name]
    for text, expected in vectors(texts, ids):
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode_bytes(expected) == text.encode()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_every_id_come_back(name: str, real: dict[str, Any]) -> None:
    tokenizer = real[name]
    for i in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(i)
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data, i


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe"])
def test_any_bytes_come_back(name: str, real: dict[str, Any]) -> None:
    tokenizer = real[name]
    for special in (False, True):
        assert tokenizer.decode_bytes(tokenizer.encode(HOSTILE, special)) == HOSTILE


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_come_back_from_a_tiny_vocabulary(data: bytes) -> None:
    tokenizer = tiny()
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_text_of_special_tokens_is_text_unless_asked(real: dict[str, Any]) -> None:
    gpt2 = real["gpt-2"]
    text = "a<|endoftext|>b"
    assert len(gpt2.encode(text)) > 3
    assert gpt2.encode(text, special=True) == [*gpt2.encode("a"), 50256, *gpt2.encode("b")]
    assert gpt2.decode([64, 50256, 65]) == "ab"
    assert gpt2.decode([64, 50256, 65], special=True) == text
    assert gpt2.end_ids == {50256}


def test_prompt_keeps_one_bos(real: dict[str, Any]) -> None:
    llama = real["llama-bpe"]
    said: list[str] = []
    assert llama.add_bos
    plain = llama.encode("Hi")
    assert llama.encode_prompt("Hi", warn=said.append) == [128000, *plain]
    assert not said
    assert llama.encode_prompt("<|begin_of_text|>Hi", special=True, warn=said.append) == [128000, *plain]
    assert len(said) == 1
    assert "BOS" in said[0]
    assert llama.encode_prompt("<|begin_of_text|>Hi")[0:2] != [128000, 128000]


def test_merges_rebuilt_from_ids_are_the_original_ones(shared: Path) -> None:
    for name in ("gpt-2", "qwen2"):
        keys = gguf_keys(shared / "vocab" / f"ggml-vocab-{name}.gguf")
        merges = keys["tokenizer.ggml.merges"]
        tokens = keys["tokenizer.ggml.tokens"]
        bare = ByteBPE(Strings.of(tokens), None, pre=name, types=keys["tokenizer.ggml.token_type"])
        assert "rebuilt" in bare.notes[0]
        assert list(bare.merge_texts()) == merges, name


def test_missing_pre_is_default_with_a_note_and_differs_from_gpt2(shared: Path) -> None:
    keys = gguf_keys(shared / "vocab" / "ggml-vocab-gpt-2.gguf")
    tokens, merges = (Strings.of(keys["tokenizer.ggml." + k]) for k in ("tokens", "merges"))
    text = "12345 don't  x"
    default = ByteBPE(tokens, merges, pre="")
    assert default.pre == "default"
    assert '"default"' in default.notes[0]
    pieces = [default.token_bytes(i) for i in default.encode(text)]
    assert pieces == [b"123", b"45", b" don", b"'", b"t", b" ", b" x"]
    gpt2 = ByteBPE(tokens, merges, pre="gpt-2")
    assert [gpt2.token_bytes(i) for i in gpt2.encode(text)] == [b"123", b"45", b" don", b"'t", b" ", b" x"]


def test_unknown_pre_is_named() -> None:
    tokenizer = ByteBPE(tiny().tokens, tiny().merge_texts(), pre="nanoeuler")
    assert "'nanoeuler'" in tokenizer.notes[0]
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer 'nanoeuler'"):
        tokenizer.encode("a")
    assert tokenizer.decode([0]) == "!"


def test_alphabet_is_gpt2s() -> None:
    assert to_text(b" a\n\x00\xff\xad") == "ĠaĊĀÿŃ"
    assert to_bytes("ĠaĊĀÿŃ") == b" a\n\x00\xff\xad"
    assert to_bytes("中") is None
    assert to_bytes("a b") is None


def tiny(merges: list[bytes] | None = None, extra: list[bytes] | None = None, **more: Any) -> ByteBPE:
    """256 bytes in GPT-2's order and a few merges: ab, abc, aa, aaaa."""
    added = [b"ab", b"abc", b"aa", b"aaaa"] if extra is None else extra
    listed = [b"a b", b"ab c", b"a a", b"aa aa"] if merges is None else merges
    return ByteBPE(
        Strings.of([*(to_text(bytes([b])).encode() for b in ORDER), *added]), Strings.of(listed), pre="gpt-2", **more
    )


def test_lower_rank_merges_first_and_leftmost_first() -> None:
    assert tiny().encode("aab") == [64, 256]
    assert tiny().encode("aaaaa") == [259, 64]
    assert tiny().encode("abcaa") == [257, 258]


def test_user_defined_tokens_are_always_cut_out_longest_first() -> None:
    extra = [b"<x>", b"<x><x>", b"<c>"]
    types = np.array([1] * 256 + [4, 4, 3], np.int32)
    tokenizer = tiny([], extra, types=types)
    assert tokenizer.encode("a<x><x><x><c>") == [64, 257, 256, *tokenizer.encode("<c>")]
    assert len(tokenizer.encode("<c>")) == 3
    assert tokenizer.encode("a<c>", special=True) == [64, 258]
    assert tokenizer.type_of(256) == TokenType.USER_DEFINED


def test_strip_flags_swallow_whitespace() -> None:
    tokenizer = tiny([], [b"<m>"], types=np.array([1] * 256 + [4], np.int32))
    tokenizer.lstrip, tokenizer.rstrip = frozenset({256}), frozenset()
    assert tokenizer.decode_bytes(tokenizer.encode("a  <m> b")) == b"a<m> b"
    tokenizer.lstrip, tokenizer.rstrip = frozenset(), frozenset({256})
    assert tokenizer.decode_bytes(tokenizer.encode("a  <m> b")) == b"a  <m>b"


def test_a_byte_without_a_token_is_named() -> None:
    tokens = Strings.of(c.encode() for b, c in enumerate(CHARS_IN_ORDER) if b != ord("q"))
    tokenizer = ByteBPE(tokens, Strings.of([]), pre="gpt-2")
    assert tokenizer.decode_bytes(tokenizer.encode("apr")) == b"apr"
    for data in (b"aqr", b"\xff q"):
        with pytest.raises(UnsupportedError, match="no token for a byte") as e:
            tokenizer.encode(data)
        assert e.value.got == "0x71"


CHARS_IN_ORDER = [to_text(bytes([b])) for b in range(256)]


@pytest.mark.parametrize(
    ("merges", "extra", "said"),
    [
        ([b"a z"], [b"ab"], "names a token that the vocabulary lacks"),
        ([b"ab"], [b"ab"], "not two tokens"),
        ([b"a b c"], [b"ab"], "not two tokens"),
        ([b"a b"], [b"ab", b"ab"], "written the same"),
    ],
)
def test_malformed_vocabularies_give_one_clear_error(merges: list[bytes], extra: list[bytes], said: str) -> None:
    tokenizer = tiny(merges, extra)
    with pytest.raises(FormatError, match=said) as e:
        tokenizer.encode("ab")
    assert e.value.at


def test_short_types_and_stray_ids() -> None:
    tokenizer = tiny(ids={"bos": 999, "eos": 5}, types=np.full(3, 3, np.int32))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.type_of(2), tokenizer.type_of(3)) == (None, 5, 3, 1)
    assert ["token_type has 3" in n or "bos_token_id 999" in n for n in tokenizer.notes] == [True, True]
    with pytest.raises(FormatError, match="one entry for each token"):
        tokenizer.encode("a")
    with pytest.raises(UnsupportedError, match="no such token"):
        tokenizer.decode([260])


def test_hf_package_agrees_on_gpt2_tiny(shared: Path) -> None:
    from tokenizers import Tokenizer as Judge

    judge = Judge.from_file(str(shared / "gpt2_tiny_hf_tokenizer.json"))
    vocabulary = json.loads((shared / "gpt2_tiny_hf_tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in vocabulary["merges"]]
    ours = ByteBPE(Strings.of(t.encode() for t in tokens), Strings.of(m.encode() for m in merges), pre="gpt-2")
    text = (shared / "tinyshakespeare.txt").read_text()[:200_000] + "é中😀  \n\t x"
    assert ours.encode(text) == judge.encode(text).ids


@pytest.mark.parametrize("unit", ["a", " ", "😀", "\n", "ab", "aab ", "中国"])
def test_a_long_run_is_cut_without_changing_the_ids(unit: str, real: dict[str, Any]) -> None:
    gpt2 = real["gpt-2"]
    text = unit * ((5 * LONG + 321) // len(unit.encode()))
    whole = [t.id for word in gpt2_words(text) for t in gpt2._model.tokenize(to_text(word.encode()))]
    assert gpt2.encode(text) == whole


@st.composite
def pair_tables(draw: st.DrawFn) -> tuple[list[str], dict[tuple[int, int], tuple[int, int]]]:
    """Spellings of ids and a table of merges with any ranks, equal ones too, parts later than wholes too."""
    spelled = ["a", "b", "c"]
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for _ in range(draw(st.integers(1, 14))):
        pair = (draw(st.integers(0, len(spelled) - 1)), draw(st.integers(0, len(spelled) - 1)))
        if pair not in pairs and len(spelled[pair[0]] + spelled[pair[1]]) < 10:
            pairs[pair] = (draw(st.integers(0, 6)), len(spelled))
            spelled.append(spelled[pair[0]] + spelled[pair[1]])
    return spelled, pairs


@settings(max_examples=200, deadline=None)
@given(pair_tables(), st.text("abc", min_size=1, max_size=300), st.integers(17, 60))
def test_heap_and_blocks_give_what_the_definition_gives(table: Any, text: str, block: int) -> None:
    spelled, pairs = table
    word = ["abc".index(c) for c in text]
    expected = slow_merge(word, pairs)
    assert merge(word, pairs) == expected

    def clean(a: int, b: int) -> bool:
        return slow_merge(["abc".index(c) for c in spelled[a] + spelled[b]], pairs) == [a, b]

    def encode(lo: int, hi: int) -> list[int]:
        return merge(word[lo:hi], pairs)

    assert encode_blocks(len(word), encode, lambda i: len(spelled[i]), clean, block) == expected


def slow_merge(symbols: list[int], pairs: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """The definition: lowest rank first, leftmost first, one merge at a time."""
    word = list(symbols)
    while True:
        found = [(pairs[p][0], i) for i, p in enumerate(pairwise(word)) if p in pairs]
        if not found:
            return word
        _, i = min(found)
        word[i : i + 2] = [pairs[word[i], word[i + 1]][1]]


def gpt2_words(text: str) -> list[str]:
    """GPT-2's words by the `tokenizers` package's own splitter."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [text[a:b] for _, (a, b) in pieces]

"""nanoeuler's tokenizer against the ids that the original program gave, and its form in GGUF."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import FormatError
from ckptkit.tokenizer import ByteBPE
from ckptkit.tokenizer.nanoeuler_bpe import WORD, NanoeulerBPE, gguf_vocabulary


def trained(shared: Path) -> NanoeulerBPE:
    header = np.fromfile(shared / "nanoeuler_main.bin", "<i4", 10 + 2 * 384)
    return NanoeulerBPE(header[10 : 10 + 384], header[10 + 384 :])


def original_words(data: bytes) -> list[bytes]:
    """The original's chunk_end, step by step."""
    space, words, i = b" \n\t\r", [], 0
    while i < len(data):
        j = i
        if data[i] in space:
            while j < len(data) and data[j] in space:
                j += 1
            if j > i + 1 and j < len(data):
                end = j - 1
            elif j < len(data):
                end = j
                while end < len(data) and data[end] not in space and end - i < 4096:
                    end += 1
            else:
                end = j
        else:
            end = i
            while end < len(data) and data[end] not in space and end - i < 4096:
                end += 1
        words.append(data[i:end])
        i = end
    return words


def original_merge(word: list[int], pairs: dict[tuple[int, int], int]) -> list[int]:
    """The original's bpe_encode_word: the lowest id, all its places from the left, again."""
    while True:
        best = min((pairs[p] for p in pairwise(word) if p in pairs), default=None)
        if best is None:
            return word
        out, i = [], 0
        while i < len(word):
            if i + 1 < len(word) and pairs.get((word[i], word[i + 1])) == best:
                out.append(best)
                i += 2
            else:
                out.append(word[i])
                i += 1
        word = out


def original_encode(tokenizer: NanoeulerBPE, data: bytes) -> list[int]:
    left, right = tokenizer.merges()
    pairs = {(int(a), int(b)): 256 + m for m, (a, b) in enumerate(zip(left, right, strict=True))}
    return [i for w in original_words(data) for i in original_merge(list(w), pairs)]


def test_ids_equal_the_original_programs(shared: Path) -> None:
    tokenizer = trained(shared)
    for case in json.loads((shared / "nanoeuler_main.info.json").read_text())["encode"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]


def test_a_play_encodes_as_by_the_original_rules(shared: Path) -> None:
    tokenizer = trained(shared)
    data = (
        (shared / "tinyshakespeare.txt").read_bytes()[:60_000] + b"   \n\n x\t\ty  " + b"z" * 9000 + b" " + b"q" * 5000
    )
    assert tokenizer.encode(data) == original_encode(tokenizer, data)
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


@given(st.binary(max_size=40).map(lambda b: bytes(b" \n\tab\xc3\x00"[x % 7] for x in b)))
def test_words_are_the_originals(data: bytes) -> None:
    assert [m.group() for m in WORD.finditer(data)] == original_words(data)


@settings(deadline=None)
@given(st.binary(max_size=50), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=12))
def test_any_merges_and_any_bytes(data: bytes, choice: list[tuple[int, int]]) -> None:
    used = sorted(set(data)) or [97]
    merges: list[tuple[int, int]] = []
    for a, b in choice:
        ids = used + list(range(256, 256 + len(merges)))
        merges.append((ids[a % len(ids)], ids[b % len(ids)]))
    tokenizer = NanoeulerBPE([a for a, _ in merges], [b for _, b in merges])
    ids = tokenizer.encode(data)
    assert ids == original_encode(tokenizer, data)
    assert tokenizer.decode_bytes(ids) == data


def test_whitespace_beyond_the_originals_buffer() -> None:
    tokenizer = NanoeulerBPE([32, 256, 257], [32, 256, 257])  # 2, 4, 8 spaces
    assert tokenizer.encode(b" " * 20_003) == [258] * 2500 + [256, 32]
    assert tokenizer.encode(b" " * 3) == [256, 32]


def test_there_are_no_special_tokens() -> None:
    text = b"</s>"
    tokenizer = NanoeulerBPE([60, 256, 257], [47, 115, 62])  # merges that spell </s>
    assert tokenizer.encode(text) == [258]
    assert tokenizer.encode("</s>", special=True) == [258]
    assert tokenizer.end_ids == frozenset()
    assert tokenizer.decode([258]) == "</s>"


def test_two_merges_that_spell_the_same_are_kept_apart_in_gguf() -> None:
    tokenizer = NanoeulerBPE([97, 98, 256, 97], [98, 99, 99, 257])  # ab, bc, ab|c, a|bc
    assert tokenizer.token_bytes(258) == tokenizer.token_bytes(259) == b"abc"
    v = gguf_vocabulary(tokenizer)
    assert v.renamed == (259,)
    assert len(set(v.tokens)) == len(v.tokens) == 260
    assert v.tokens[259] == "abcĀ".encode()
    assert list(v.merges) == [b"a b", b"b c", b"ab c", b"a bc"]
    again = v.pairs.reshape(-1, 2)
    assert NanoeulerBPE(again[:, 0], again[:, 1]).encode("abcbcabc") == tokenizer.encode("abcbcabc")


def test_gguf_form_gives_the_same_ids_where_words_agree(shared: Path) -> None:
    tokenizer = trained(shared)
    v = gguf_vocabulary(tokenizer)
    theirs = ByteBPE(v.tokens, v.merges, pre=v.pre)
    text = (shared / "tinyshakespeare.txt").read_text()[:20_000]
    assert theirs.decode_bytes(theirs.encode(text)) == text.encode()
    for word in set(re.findall(r" ?[a-z]+", text)):
        assert theirs.encode(word) == tokenizer.encode(word), word


@pytest.mark.parametrize(("left", "right"), [([256], [97]), ([97], [-1]), ([97, 256, 999], [97, 256, 0])])
def test_merges_of_tokens_that_do_not_exist_yet(left: list[int], right: list[int]) -> None:
    with pytest.raises(FormatError, match="does not exist yet"):
        NanoeulerBPE(left, right)


def test_merges_that_double_without_end_take_no_memory() -> None:
    doubling = [97, *range(256, 256 + 2000)]
    with pytest.raises(FormatError, match="too long"):
        NanoeulerBPE(doubling, doubling)

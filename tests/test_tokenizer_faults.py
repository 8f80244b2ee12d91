"""Faults of vocabularies as a list; Strings, on which every vocabulary stands."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_files import gguf_keys

from ckptkit.errors import FormatError
from ckptkit.tokenizer import ByteBPE, Strings
from ckptkit.tokenizer.faults import faults


def test_every_fault_is_listed() -> None:
    tokens = [b"a", b"b", b"ab", b"a", b"", b""]
    found = [str(f) for f in faults(tokens, [b"a b", b"ab", b"a  b", b"b a", b"x b"])]
    assert found == [
        "tokens 0 and 3 are both written 'a'",
        "token 4 is empty",
        "token 5 is empty",
        "merge 1 is not two tokens: 'ab'",
        "merge 2 is not two tokens: 'a  b'",
        "merge 3 names 'ba', which is no token",
        "merge 4 names 'x', which is no token",
    ]


def test_real_vocabularies_have_none(shared: Path) -> None:
    for name in ("gpt-2", "qwen2", "llama-bpe", "llama-spm"):
        keys = gguf_keys(shared / "vocab" / f"ggml-vocab-{name}.gguf")
        assert not list(faults(keys["tokenizer.ggml.tokens"], keys.get("tokenizer.ggml.merges"))), name


def test_empty_tokens_do_not_stop_encoding() -> None:
    tokenizer = ByteBPE(Strings.of([b"a", b"", b"", b"b", b"ab"]), Strings.of([b"a b"]), pre="gpt-2")
    assert tokenizer.encode("abb") == [4, 3]
    assert tokenizer.token_bytes(1) == b""


@given(st.lists(st.binary(max_size=5)))
def test_strings_are_the_strings(items: list[bytes]) -> None:
    strings = Strings.of(items)
    assert list(strings) == items
    assert [strings[i] for i in range(len(strings))] == items
    assert list(strings[1:3]) == items[1:3]
    for item in [*items, b"zz"]:
        assert strings.find(item) == (items.index(item) if item in items else -1)
    data = b"head" + b"".join(pack("<I", len(i)) + i for i in items) + b"tail"
    walked, end = Strings.prefixed(data, 4, len(items), 4)
    assert list(walked) == items
    assert end == len(data) - 4


@pytest.mark.parametrize(("count", "offset"), [(3, 5), (2**62, 0), (-1, 0)])
def test_strings_that_run_past_the_end_name_the_place(count: int, offset: int) -> None:
    data = pack("<I", 1) + b"a" + pack("<I", 9) + b"bcdefgh"
    with pytest.raises(FormatError) as e:
        Strings.prefixed(data, 0, count, 4)
    assert e.value.offset == offset

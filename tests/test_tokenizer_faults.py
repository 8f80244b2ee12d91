"""Faults of vocabularies as a list; Strings, on which every vocabulary stands."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import pytest
from check_files import REFUSED, array, build, put, tokens
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from vocab_files import gguf_keys

from ckptkit.cli import cli
from ckptkit.errors import CkptError, FormatError
from ckptkit.tokenizer import ByteBPE, Strings
from ckptkit.tokenizer.faults import Vocabulary, faults
from fixtures.writers import gguf


def test_every_fault_is_listed() -> None:
    tokens, merges = [b"a", b"b", b"ab", b"a", b"", b""], [b"a b", b"ab", b"a  b", b"b a", b"x b"]
    ids = {"bos": 5, "eos": 6, "pad": -1, "unk": 0xFFFFFFFF, "mask": -2}  # two of them are real files' word for none
    found = [str(f) for f in faults(Vocabulary(tokens, merges, ids, {"token_type": 2, "scores": 6}))]
    assert found == [
        "token_type has 2 entries for 6 tokens",
        "eos_token_id 6 is outside the vocabulary",
        "mask_token_id -2 is outside the vocabulary",
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
        found = Vocabulary(keys["tokenizer.ggml.tokens"], keys.get("tokenizer.ggml.merges"), c_strings=True)
        assert not list(faults(found)), name


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


T = "tokenizer.ggml."
# a malformed file, a command on it, and what the one error says; the file's name is in each
MALFORMED = {
    "equal": (REFUSED["equal"][1], "tokenize", "tokens 27 and 28"),
    "equal pieces": (build(tokens(lambda t: [*t[:-1], t[-2]]), arch="llama"), "tokenize", "tokens 268 and 269"),
    "merge of three": (build(array(f"{T}merges", gguf.STRING, ["a b c"])), "tokenize", "merge 0"),
    "merge of what is no token": (build(array(f"{T}merges", gguf.STRING, ["zz yy"])), "tokenize", "'zz'"),
    "merge into what is no token": (build(array(f"{T}merges", gguf.STRING, ["a b"])), "tokenize", "'ab'"),
    "short types": (REFUSED["types-short"][1], "convert", "expected 29, got 2"),
    "short scores": (REFUSED["scores-short"][1], "convert", "expected 270, got 9"),
    "types of u32": (REFUSED["types-u32"][1], "convert", "expected array of i32, got u32"),
    "more rows": (REFUSED["rows"][1], "convert", "expected 32 tokens"),
    "unknown splitter": (REFUSED["pre"][1], "tokenize", "'nanoeuler'"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_vocabulary_is_one_clear_error(what: str, tmp_path: Path) -> None:
    data, command, said = MALFORMED[what]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    rest = ["he the"] if command == "tokenize" else [str(tmp_path / "out.gguf")]
    result = CliRunner().invoke(cli, [command, str(path), *rest])
    assert isinstance(result.exception, CkptError)
    assert said in str(result.exception)
    assert "m.gguf" in str(result.exception) or what == "unknown splitter"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_faults_that_llama_cpp_lives_with_are_said(tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    path.write_bytes(build(put(f"{T}eos_token_id", gguf.U32, 999), tokens(lambda t: ["", *t[1:]])))
    result = CliRunner().invoke(cli, ["convert", str(path), str(out)])
    assert result.exit_code == 0
    assert "eos id 999 is outside the vocabulary and ignored" in result.stdout
    assert CliRunner().invoke(cli, ["tokenize", str(path), "he"]).exit_code == 0
    path.write_bytes(REFUSED["equal"][1])
    result = CliRunner().invoke(cli, ["convert", str(path), str(out), "--force"])
    assert "tokens 27 and 28 are written the same: llama.cpp stops the process" in result.stdout

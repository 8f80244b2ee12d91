"""Tokenizer files of llm.c and llama2.c: read and written back, and judged by the original programs' ids."""

from __future__ import annotations

import json
from pathlib import Path
from struct import pack

import pytest
from vocab_files import arguments, byte_bpe, gguf_keys, vectors

from ckptkit.errors import CkptError, FormatError, UnsupportedError
from ckptkit.formats import llama2c_tokenizer, llmc_tokenizer
from ckptkit.tokenizer import Strings
from ckptkit.tokenizer.byte_alphabet import ORDER
from ckptkit.tokenizer.chars import CharTokenizer
from ckptkit.tokenizer.nanoeuler_bpe import NanoeulerBPE
from ckptkit.tokenizer.spm import SPM


def llmc(tokens: list[bytes], version: int = 2, eot: int = 0, magic: int = 20240328, n: int | None = None) -> bytes:
    """An llm.c tokenizer file by struct alone."""
    header = [magic, version, len(tokens) if n is None else n, eot] + [0] * 252
    return pack("<256I", *header) + b"".join(bytes([len(t)]) + t for t in tokens)


SMALL = [*(bytes([b]) for b in ORDER), b"he", b"the", b" the", b"<|endoftext|>"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "m_tokenizer.bin"
    path.write_bytes(llmc([*SMALL[:256], b"he", b"the", b" t", b"<|endoftext|>"], eot=259))
    return path


# -- llm.c


@pytest.mark.parametrize(
    "name", ["gpt2_tiny_tokenizer.bin", "realvocab/gpt2_tokenizer.bin", "realvocab/gpt2_tokenizer_v1.bin"]
)
def test_llmc_files_are_written_back_byte_identical(name: str, shared: Path, tmp_path: Path) -> None:
    tokenizer = llmc_tokenizer.read(shared / name)
    llmc_tokenizer.write(tokenizer, tmp_path / "t.bin")
    assert (tmp_path / "t.bin").read_bytes() == (shared / name).read_bytes()
    assert llmc_tokenizer.holds(tokenizer)


def test_llmc_vocabularies_encode_as_the_original_programs(shared: Path) -> None:
    tiny = llmc_tokenizer.read(shared / "gpt2_tiny_tokenizer.bin")
    for case in json.loads((shared / "gpt2_tiny.info.json").read_text())["encode"]:
        assert tiny.encode(case["text"]) == case["ids"]
    assert tiny.bos == tiny.eos == 508
    assert not tiny.add_bos
    gpt2 = llmc_tokenizer.read(shared / "realvocab" / "gpt2_tokenizer_v1.bin")
    for case in json.loads((shared / "realvocab" / "encode_ref.json").read_text()):
        assert gpt2.encode(case["text"]) == case["ids"]
    assert gpt2.eos == 50256
    assert any("50,256" in note for note in gpt2.notes)
    original = gguf_keys(shared / "vocab" / "ggml-vocab-gpt-2.gguf")["tokenizer.ggml.merges"]
    assert list(gpt2.merge_texts()) == original


def test_llmc_version_1_of_another_size_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(llmc([bytes([b]) for b in range(256)], version=1))
    tokenizer = llmc_tokenizer.read(path)
    assert tokenizer.eos is None
    assert any("there is none" in note for note in tokenizer.notes)
    llmc_tokenizer.write(tokenizer, tmp_path / "u.bin")
    assert (tmp_path / "u.bin").read_bytes() == path.read_bytes()


GOOD = llmc([b"a", b"bb"], eot=1)


@pytest.mark.parametrize(
    ("data", "said", "offset"),
    [
        (llmc([b"a"], magic=7), "not an llm.c tokenizer", 0),
        (llmc([b"a"], version=3), "unknown version", 4),
        (llmc([b"a", b"b"], eot=2), "outside the vocabulary", 12),
        (llmc([b"a", b"b"], n=3), "more strings than|cut off", None),
        (llmc([b"a", b"b"], n=2**31), "more strings than", 1024),
        (GOOD[:-1], "longer than what is left", 1026),
        (GOOD + b"x", "follow the last token", 1029),
        (llmc([b"a", b"", b"b"]), "empty", 1026),
        (GOOD[:1000], "ends early", None),
        (b"", "ends early", None),
    ],
)
def test_llmc_damage_is_named_with_its_place(data: bytes, said: str, offset: int | None, tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(data)
    with pytest.raises(CkptError, match=said) as e:
        llmc_tokenizer.read(path)
    assert e.value.path == path
    assert offset is None or e.value.offset == offset


def test_llmc_cut_anywhere_is_an_error(small: Path) -> None:
    data = small.read_bytes()
    for n in (0, 3, 4, 1023, 1024, 1025, len(data) - 14, len(data) - 13, len(data) - 1):
        small.write_bytes(data[:n])
        with pytest.raises(CkptError):
            llmc_tokenizer.read(small)


def test_llmc_tokenizer_is_found_beside_the_model(small: Path) -> None:
    n = len(SMALL)
    for model in ("m.bin", "m_bf16.bin"):
        found, paths, notes = llmc_tokenizer.find_tokenizer(small.with_name(model), n, None)
        assert found is not None
        assert paths == (small,)
        assert notes[0] == "tokenizer from m_tokenizer.bin"
    none, _, notes = llmc_tokenizer.find_tokenizer(small.with_name("m.bin"), n + 1, None)
    assert none is None
    assert f"has {n} tokens and the model {n + 1}" in notes[0]
    assert llmc_tokenizer.find_tokenizer(small.with_name("x.bin"), n, None)[0] is None
    small.with_name("gpt2_tokenizer.bin").write_bytes(small.read_bytes())
    assert llmc_tokenizer.find_tokenizer(small.with_name("x.bin"), n, None)[1] == (
        small.with_name("gpt2_tokenizer.bin"),
    )
    small.with_name("m_bf16_tokenizer.bin").write_bytes(small.read_bytes())
    with pytest.raises(FormatError, match="several tokenizers"):
        llmc_tokenizer.find_tokenizer(small.with_name("m_bf16.bin"), n, None)


def test_llmc_file_holds_only_what_it_can_say(shared: Path, small: Path, tmp_path: Path) -> None:
    gpt2 = byte_bpe(shared / "vocab" / "ggml-vocab-gpt-2.gguf")
    assert llmc_tokenizer.holds(gpt2)
    assert not llmc_tokenizer.holds(byte_bpe(shared / "vocab" / "ggml-vocab-qwen2.gguf"))
    assert not llmc_tokenizer.holds(NanoeulerBPE([97], [98]))
    assert not llmc_tokenizer.holds(None)
    llmc_tokenizer.write(gpt2, tmp_path / "t.bin")
    assert (tmp_path / "t.bin").read_bytes() == (shared / "realvocab" / "gpt2_tokenizer.bin").read_bytes()
    tokenizer = llmc_tokenizer.read(small)
    assert llmc_tokenizer.write_tokenizer_beside(tmp_path / "new_bf16.bin", tokenizer) == (
        tmp_path / "new_tokenizer.bin",
    )
    assert llmc_tokenizer.write_tokenizer_beside(tmp_path / "new_bf16.bin", tokenizer) == ()


def test_merges_that_cannot_be_rebuilt_ask_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(llmc([*SMALL[:256], b"xyz", b"<|endoftext|>"], eot=257))
    tokenizer = llmc_tokenizer.read(path)
    assert tokenizer.decode([256]) == "xyz"
    with pytest.raises(UnsupportedError, match="merges cannot be rebuilt") as e:
        tokenizer.encode("xyz")
    assert "merges file" in e.value.hint


# -- llama2.c


def test_llama2c_file_is_read_and_written_back(fixtures_dir: Path, tmp_path: Path) -> None:
    path = fixtures_dir / "llama2c" / "tokenizer.bin"
    for n in (270, 0):
        tokenizer = llama2c_tokenizer.read(path, n)
        assert tokenizer.vocab_size == 270
        assert [tokenizer.tokens[i] for i in (0, 1, 2, 3)] == [b"<unk>", b"<s>", b"</s>", b"<0x00>"]
        assert [tokenizer.type_of(i) for i in (0, 1, 2, 3, 258, 269)] == [2, 3, 3, 6, 6, 1]
        llama2c_tokenizer.write(tokenizer, tmp_path / "t.bin")
        assert (tmp_path / "t.bin").read_bytes() == path.read_bytes()
    assert tokenizer.encode_prompt("the é") == [1, 261, 262, 269]
    assert tokenizer.decode(tokenizer.encode("中 the")) == "中 the"


def test_llama2c_real_vocabulary_encodes_as_spm(shared: Path, tmp_path: Path) -> None:
    base = shared / "vocab" / "ggml-vocab-llama-spm.gguf"
    keys = gguf_keys(base)
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    names = {1: b"\n<s>\n", 2: b"\n</s>\n"}
    stored = [names.get(i, t.replace("▁".encode(), b" ")) for i, t in enumerate(tokens)]
    path = tmp_path / "tokenizer.bin"
    body = b"".join(pack("<fi", s, len(t)) + t for s, t in zip(scores, stored, strict=True))
    path.write_bytes(pack("<I", max(map(len, stored))) + body)
    tokenizer = llama2c_tokenizer.read(path, len(tokens))
    for text, expected in vectors(base.with_suffix(".gguf.inp"), base.with_suffix(".gguf.out")):
        assert tokenizer.encode(text) == expected
    spm = SPM(Strings.of(tokens), scores, **arguments(keys))
    llama2c_tokenizer.write(spm, tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("data", "n", "said", "offset"),
    [
        (pack("<Ifi", 1, 0.0, 1) + b"a", 2, "more strings than", 4),
        (pack("<Ififi", 1, 0.0, 1, 0.0, 9)[:-8] + b"a" + pack("<fi", 0.0, 9), 2, "longer than what is left", 17),
        (pack("<Ifi", 1, 0.0, 1) + b"ab", 1, "follow the last token", 13),
        (pack("<Ifi", 1, 0.0, 0), 1, "empty", 8),
        (pack("<Ifi", 1, 0.0, 2) + b"ab", 1, "longer than the longest", 8),
        (pack("<Ifi", 1, 0.0, -1) + b"ab", 1, "longer than what is left", 8),
        (pack("<Ifi", 1, float("nan"), 1) + b"a", 1, "not finite", 4),
        (b"\1\0", 1, "ends early", 0),
    ],
)
def test_llama2c_damage_is_named_with_its_place(data: bytes, n: int, said: str, offset: int, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=said) as e:
        llama2c_tokenizer.read(path, n)
    assert e.value.offset == offset


def test_llama2c_tokenizer_beside_the_model(fixtures_dir: Path, tmp_path: Path) -> None:
    data = (fixtures_dir / "llama2c" / "tokenizer.bin").read_bytes()
    (tmp_path / "tokenizer.bin").write_bytes(data)
    found, paths, _ = llama2c_tokenizer.find_tokenizer(tmp_path / "m.bin", 270, None)
    assert found is not None
    assert paths == (tmp_path / "tokenizer.bin",)
    none, _, notes = llama2c_tokenizer.find_tokenizer(tmp_path / "m.bin", 271, None)
    assert none is None
    assert "not used" in notes[0]
    assert llama2c_tokenizer.write_tokenizer_beside(tmp_path / "m.bin", found) == (tmp_path / "m_tokenizer.bin",)
    assert (tmp_path / "m_tokenizer.bin").read_bytes() == data
    assert llama2c_tokenizer.write_tokenizer_beside(tmp_path / "m.bin", CharTokenizer.from_bytes(b"ab")) == ()

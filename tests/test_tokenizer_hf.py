"""Tokenizers in Hugging Face form: read, written, and judged by the `tokenizers` package itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smollm import SMOLLM
from vocab_files import arguments, byte_bpe, gguf_keys, vectors

import ckptkit
from ckptkit import formats
from ckptkit.errors import CkptError, UnsupportedError
from ckptkit.formats import gguf_tokenizer, hf_tokenizer, hf_tokenizer_write, llmc_tokenizer
from ckptkit.tokenizer import ByteBPE, Strings, Tokenizer, TokenType
from ckptkit.tokenizer.chars import CharTokenizer
from ckptkit.tokenizer.hf import HFTokenizer
from ckptkit.tokenizer.nanoeuler_bpe import NanoeulerBPE
from ckptkit.tokenizer.spm import SPM

TEXTS = ["", " ", "The  quick\n\nbrown\tfox, don't I'LL 12345 é中文字😀!!  ", "x\n \n  y", "a  b ", "ÀÉ Ωmega ǅ x́y"]


def real(name: str, shared: Path) -> Tokenizer:
    path = shared / "vocab" / f"ggml-vocab-{name}.gguf"
    if name != "llama-spm":
        return byte_bpe(path)  # type: ignore[no-any-return]
    keys = gguf_keys(path)
    return SPM(Strings.of(keys["tokenizer.ggml.tokens"]), keys["tokenizer.ggml.scores"], **arguments(keys))


def judge_of(folder: Path) -> Any:
    from tokenizers import Tokenizer as Judge

    return Judge.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-bpe", "llama-spm"])
def test_hf_package_gives_the_same_ids_and_reading_gives_the_same_tokenizer(
    name: str, shared: Path, tmp_path: Path
) -> None:
    ours = real(name, shared)
    assert [p.name for p in hf_tokenizer.write(ours, tmp_path)] == ["tokenizer.json", "tokenizer_config.json"]
    judge = judge_of(tmp_path)
    play = (shared / "tinyshakespeare.txt").read_text()[:20_000]
    texts = [
        t for t, _ in vectors(shared / "vocab/ggml-vocab-gpt-2.gguf.inp", shared / "vocab/ggml-vocab-gpt-2.gguf.out")
    ]
    for text in [*texts, *TEXTS, play]:
        assert judge.encode(text, add_special_tokens=False).ids == ours.encode(text), text
        assert judge.encode(text).ids == ours.encode_prompt(text)
    again = hf_tokenizer.read(tmp_path)
    assert again is not None
    assert again.encode(play) == ours.encode(play)
    assert list(again.tokens) == list(ours.tokens)
    for fact in ("kind", "pre", "ids", "add_bos", "add_eos", "chat_template", "vocab_size"):
        assert getattr(again, fact) == getattr(ours, fact), fact
    assert again.types is not None
    assert ours.types is not None
    assert (again.types == ours.types).all()


def test_smollm_in_hugging_face_form(models: Path, tmp_path: Path, shared: Path) -> None:
    ours = byte_bpe(models / SMOLLM)
    hf_tokenizer.write(ours, tmp_path)
    judge = judge_of(tmp_path)
    for text, expected in vectors(shared / "vocab/ggml-vocab-gpt-2.gguf.inp", shared / "vocab/smollm.out"):
        assert judge.encode(text, add_special_tokens=False).ids == expected


@pytest.mark.parametrize(
    "pre", ["default", "gpt-4o", "tekken", "deepseek-llm", "deepseek-v3", "kimi-k2", "poro-chat", "falcon"]
)
def test_splitters_as_the_package_runs_them(pre: str, shared: Path, tmp_path: Path) -> None:
    gpt2 = byte_bpe(shared / "vocab" / "ggml-vocab-gpt-2.gguf")
    ours = ByteBPE(gpt2.tokens, gpt2.merge_texts(), pre=pre, types=gpt2.types, add_bos=False)
    hf_tokenizer.write(ours, tmp_path)
    judge = judge_of(tmp_path)
    for text in TEXTS:
        assert judge.encode(text, add_special_tokens=False).ids == ours.encode(text), text
    again = hf_tokenizer.read(tmp_path)
    assert again is not None
    assert again.pre == pre


def test_hf_files_of_the_original_package(shared: Path) -> None:
    path = shared / "gpt2_tiny_hf_tokenizer.json"
    ours = hf_tokenizer.read(path)
    assert ours is not None
    assert (ours.kind, ours.pre, ours.vocab_size) == ("byte-bpe", "gpt-2", 508)
    from tokenizers import Tokenizer as Judge

    play = (shared / "tinyshakespeare.txt").read_text()[-20_000:]
    assert ours.encode(play) == Judge.from_file(str(path)).encode(play).ids


def test_nanoeuler_and_characters_come_back_from_hugging_face_form(shared: Path, tmp_path: Path) -> None:
    header = np.fromfile(shared / "nanoeuler_main.bin", "<i4", 10 + 2 * 384)
    play = (shared / "tinyshakespeare.txt").read_text()[:5_000] + "  x \n\n é"
    nano = NanoeulerBPE(header[10 : 10 + 384], header[10 + 384 :])
    byte_map = CharTokenizer.from_bytes((shared / "nx_ours_qwen_vocab.bin").read_bytes())
    names = CharTokenizer.from_chars(["a", "b", "é"])
    for ours, text in ((nano, play), (byte_map, "the quick fox"), (names, "abéa")):
        hf_tokenizer.write(ours, tmp_path)
        assert judge_of(tmp_path).encode(text, add_special_tokens=False).ids == ours.encode(text)
        again = hf_tokenizer.read(tmp_path)
        assert again is not None
        assert (again.kind, again.bos, again.encode(text)) == (ours.kind, ours.bos, ours.encode(text))


def test_roles_without_a_token_are_written_as_null(trained: Path) -> None:
    """Or a class of transformers takes its own <|endoftext|> for them and gives it the id after the last row."""
    tokenizer = CharTokenizer.from_bytes((trained / "nx_ours_qwen_vocab.bin").read_bytes())
    found = json.loads(hf_tokenizer_write.tokenizer_config(tokenizer))
    assert [found[f"{role}_token"] for role in ("bos", "eos", "unk", "pad")] == [None] * 4
    tokenizer = llmc_tokenizer.read(trained / "gpt2_tiny_tokenizer.bin")
    found = json.loads(hf_tokenizer_write.tokenizer_config(tokenizer))
    assert [found[f"{role}_token"] for role in ("bos", "eos", "unk", "pad")] == ["<|endoftext|>"] * 2 + [None] * 2


def spm(scores: list[float]) -> SPM:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
    return SPM(Strings.of(t.encode() for t in tokens), np.array(scores, np.float32), add_space_prefix=False)


@pytest.mark.parametrize("scores", [[0, 0, 0, 0, 0, -1, -2], [0, 0, 0, 0, 0, -2, -1], [0] * 7], ids=["1", "2", "ties"])
def test_pairs_of_equal_scores_join_otherwise_in_the_package_as_said(scores: list[float]) -> None:
    from tokenizers import Tokenizer as Judge

    ours = spm(scores)
    theirs = Judge.from_str(hf_tokenizer_write.tokenizer_json(ours))
    same = [theirs.encode(t, add_special_tokens=False).ids == ours.encode(t) for t in ("ab", "bab", "abab", "baba")]
    assert all(same) != any(scores.count(s) > 1 for s in scores[5:])
    assert all(same) == (not hf_tokenizer.differs(ours))


def test_metaspace_before_a_space_as_the_note_says(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "▁", "▁a", "▁▁"]
    types = np.array([2, 3, 3, 1, 1, 1, 1], np.int32)
    found = json.loads(
        hf_tokenizer_write.tokenizer_json(SPM(Strings.of(t.encode() for t in tokens), None, types=types))
    )
    found |= {"normalizer": None}
    found["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    ours, theirs = hf_tokenizer.read(tmp_path), judge_of(tmp_path)
    assert ours is not None
    assert "as in llama.cpp" in ours.notes[0]
    assert ours.encode("a a") == theirs.encode("a a", add_special_tokens=False).ids
    assert (ours.encode(" a"), theirs.encode(" a", add_special_tokens=False).ids) == ([4, 5], [5])


def test_what_transformers_does_differently_for_a_qwen2(shared: Path) -> None:
    own = byte_bpe(shared / "vocab" / "ggml-vocab-qwen2.gguf")
    other = llmc_tokenizer.read(shared / "gpt2_tiny_tokenizer.bin")
    assert [hf_tokenizer.differs(t) for t in (own, other)] == [(), ()]
    assert "NFC" in hf_tokenizer.differs(own, "qwen2")[0]
    assert "PreTrainedTokenizerFast" in hf_tokenizer.differs(other, "qwen2")[0]


def test_a_vocabulary_alone_becomes_a_directory_that_is_read(shared: Path, tmp_path: Path) -> None:
    path = shared / "vocab" / "ggml-vocab-llama-spm.gguf"
    ckptkit.convert(path, tmp_path / "out")
    with formats.open(path) as a, formats.open(tmp_path / "out") as b:
        assert not b.tensors
        assert replace(b.config, rope_pairing="") == a.config
        assert b.tokenizer is not None
        assert a.tokenizer is not None
        assert b.tokenizer.encode("a b\n") == a.tokenizer.encode("a b\n")
    with pytest.raises(CkptError, match="missing"):
        ckptkit.load(tmp_path / "out")


def test_vocab_json_and_merges_txt(shared: Path, tmp_path: Path) -> None:
    model = json.loads((shared / "gpt2_tiny_hf_tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    ours, whole = hf_tokenizer.read(tmp_path), hf_tokenizer.read(shared / "gpt2_tiny_hf_tokenizer.json")
    assert ours is not None
    assert whole is not None
    assert ours.encode("First Citizen: we'll") == whole.encode("First Citizen: we'll")
    assert "GPT-2" in ours.notes[0]


def test_a_splitter_without_a_name_is_run_by_the_package(shared: Path, tmp_path: Path) -> None:
    found = json.loads((shared / "gpt2_tiny_hf_tokenizer.json").read_text())
    found["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, found["pre_tokenizer"]],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    ours = hf_tokenizer.read(tmp_path)
    assert isinstance(ours, HFTokenizer)
    assert "as it is" in ours.notes[0]
    text = "First Citizen, we'll"
    assert ours.encode(text) == judge_of(tmp_path).encode(text).ids
    assert ours.decode_bytes(ours.encode(b"\xff\xfe")) == b"\xff\xfe"
    hf_tokenizer.write(ours, tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == json.dumps(found)
    with pytest.raises(UnsupportedError, match="no name for this tokenizer"):
        gguf_tokenizer.keys(ours)


def test_special_tokens_bos_and_template_are_read(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2}
    found = {
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "added_tokens": [
            {"id": 3, "content": "<s>", "special": True},
            {"id": 5, "content": "<u>", "special": False, "lstrip": True},
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<s>"}, "chat_template": "{{ x }}"})
    )
    ours = hf_tokenizer.read(tmp_path)
    assert ours is not None
    assert (ours.bos, ours.eos, ours.add_bos, ours.add_eos, ours.chat_template) == (3, 3, True, False, "{{ x }}")
    special = [TokenType.CONTROL, TokenType.UNUSED, TokenType.USER_DEFINED]
    assert [ours.type_of(i) for i in range(6)] == [*[TokenType.NORMAL] * 3, *special]
    assert ours.encode_prompt("ab \n<u>ab") == [3, 2, 5, 2]
    assert ours.vocab_size == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"model": {"type": "BPE", "vocab": [1]}}', "not a vocabulary"),
        ('{"model": {"type": "BPE", "vocab": {"a": -1}}}', "no id"),
        ('{"model": {"type": "BPE", "vocab": {"a": 1.5}}}', "no id"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}}', "same id"),
        ('{"model": {"type": "BPE", "vocab": {"a": 999999999}}}', "holes"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": "x"}]}', "damaged"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}, "pre_tokenizer": {"type": "ByteLevel"}}',
            "not two tokens",
        ),
    ],
)
def test_hf_damage_is_one_clear_error(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CkptError, match=said) as e:
        hf_tokenizer.read(tmp_path)
    assert e.value.path == tmp_path / "tokenizer.json"


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert hf_tokenizer.read(tmp_path) is None

"""Malformed vocabularies: every fault listed, one clear error of each; Strings, on which every vocabulary stands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from check_files import REFUSED, array, build, put, tokens
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import formats
from ckptkit.cli import cli
from ckptkit.errors import CkptError, FormatError
from ckptkit.formats import gguf_tokenizer
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


def test_a_text_ends_at_a_nul_where_llama_cpp_reads_it() -> None:
    tokens = [b"a", b"a\0b", b"\0"]
    assert not list(faults(Vocabulary(tokens)))
    assert [(f.kind, f.index) for f in faults(Vocabulary(tokens, c_strings=True))] == [("equal", 1), ("empty", 2)]


def test_real_vocabularies_have_none(shared: Path, fixtures_dir: Path) -> None:
    paths = [*shared.rglob("*.gguf"), *fixtures_dir.rglob("*.gguf")]
    assert len(paths) > 12
    for path in paths:
        if "big_endian" not in path.name and "-of-" not in path.name:
            with formats.open(path) as ck:
                found = gguf_tokenizer.vocabulary(ck.source.metadata)
                assert found is None or not list(faults(found)), path
                assert ck.tokenizer is None or not list(faults(ck.tokenizer.vocabulary())), path


def test_what_encoding_looked_at_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Vocabulary] = []
    monkeypatch.setattr("ckptkit.tokenizer.base.refuse", lambda vocabulary, _origin: looked.append(vocabulary))
    tokens, merges = Strings.of([b"a", b"b", b"ab"]), Strings.of([b"a b"])
    for encoded in (True, False):
        tokenizer = ByteBPE(tokens, merges, pre="gpt-2")
        if encoded:
            assert tokenizer.encode("ab") == [2]
        tokenizer.check_vocabulary()
        assert bool(looked) != encoded


def test_a_malformed_vocabulary_can_be_looked_at_and_cuts_no_text() -> None:
    tokenizer = ByteBPE(Strings.of([b"a", b"", b"b", b"ab"]), Strings.of([b"a b"]), pre="gpt-2")
    assert tokenizer.token_bytes(1) == b""
    for _ in range(2):
        with pytest.raises(FormatError, match="a token is empty"):
            tokenizer.encode("abb")


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
# the edits of a sound file, the key and the place that its one error names, and what it found
FAULTS = {
    "equal": (tokens(lambda t: [*t[:-1], t[-2]]), f"{T}tokens, tokens 27 and 28", "twice"),
    "empty": (tokens(lambda t: [*t[:4], "", *t[5:]]), f"{T}tokens, token 4", "an empty string"),
    "merge of what is no token": (array(f"{T}merges", gguf.STRING, ["zz yy"]), f"{T}merges, merge 0", "'zz'"),
    "merge into what is no token": (array(f"{T}merges", gguf.STRING, ["a b"]), f"{T}merges, merge 0", "'ab'"),
    "merge of three": (array(f"{T}merges", gguf.STRING, ["a b c"]), f"{T}merges, merge 0", "'a b c'"),
    "eos": (put(f"{T}eos_token_id", gguf.U32, 999), f"{T}eos_token_id", "expected an id below 29, got 999"),
    "pad": (put(f"{T}padding_token_id", gguf.I32, -2), f"{T}padding_token_id", "got -2"),
    "short types": (array(f"{T}token_type", gguf.I32, [1, 1]), f"{T}token_type", "expected 29, got 2"),
    "long types": (array(f"{T}token_type", gguf.I32, [1] * 40), f"{T}token_type", "expected 29, got 40"),
    "scores": (array(f"{T}scores", gguf.F32, [0.0] * 9), f"{T}scores", "expected 29, got 9"),
}
COMMANDS = {
    "tokenize": "tokenize m.gguf hethe",
    "generate": "generate m.gguf -p he -n 1 --device cpu",
    "generate from ids": "generate m.gguf --ids 1,2 -n 1 --device cpu",
    "logits": "logits m.gguf -p he --out out.npz --device cpu",
    "ppl": "ppl m.gguf --text m.txt -c 4 --device cpu",
    "gguf": "convert m.gguf out.gguf",
    "another type": "convert m.gguf out.gguf --type f16 --manifest out.json",
    "another tensor layout": "convert m.gguf out.gguf --split-max-size 10K",
    "safetensors": "convert m.gguf out.safetensors",
    "directory": "convert m.gguf out",
    "llm.c": "convert m.gguf out.bin",
    "ollama": "convert m.gguf out.gguf --ollama out",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """A command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner().invoke(cli, line.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_vocabulary_is_one_clear_error(fault: str, command: str, run: Callable[[str], Result]) -> None:
    edit, place, found = FAULTS[fault]
    Path("m.gguf").write_bytes(build(edit))
    Path("m.txt").write_text("he the rest he the rest")
    result = run(COMMANDS[command])
    assert isinstance(result.exception, FormatError)
    lines = str(result.exception).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("m.gguf: ")
    assert lines[1].startswith(f"  at key {place}: expected ")
    assert lines[1].endswith(found)
    assert lines[2].startswith("  hint: ")
    assert sorted(p.name for p in Path().iterdir()) == ["m.gguf", "m.txt"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_needs_no_vocabulary_goes_on(fault: str, run: Callable[[str], Result], fixtures_dir: Path) -> None:
    Path("m.gguf").write_bytes(build(FAULTS[fault][0]))
    shard = fixtures_dir / "llmc" / "shard.bin"
    for line in ("inspect m.gguf", "verify m.gguf m.gguf --device cpu", f"ppl m.gguf --text {shard} -c 4 --device cpu"):
        assert run(line).exception is None, line
    assert isinstance(run("check m.gguf").exception, SystemExit | None)


MENDED = {  # what the hints say, one after another; the last one writes out.gguf
    "empty": ["check m.gguf --fix out.gguf"],
    "eos": [f"convert m.gguf out.gguf --set {T}eos_token_id=5"],
    "pad": [f"convert m.gguf out.gguf --remove {T}padding_token_id"],
    "long types": ["check m.gguf --fix out.gguf"],
    "short types": [f"convert m.gguf out.gguf --remove {T}token_type"],
    "merge of three": [f"convert m.gguf bare.gguf --remove {T}merges", "check bare.gguf --fix out.gguf"],
    "equal": ["convert m.gguf out.gguf --tokenizer sound.gguf"],
}


@pytest.mark.parametrize("fault", MENDED)
def test_the_hints_mend(fault: str, run: Callable[[str], Result]) -> None:
    Path("m.gguf").write_bytes(build(FAULTS[fault][0]))
    Path("sound.gguf").write_bytes(build())
    for line in MENDED[fault]:
        assert isinstance(run(line).exception, SystemExit | None), line
    for line in ("tokenize out.gguf hethe", "convert out.gguf hf", "generate out.gguf -p he -n 1 --device cpu"):
        assert run(line).exception is None, line


def test_an_edit_that_makes_a_vocabulary_malformed_is_refused(run: Callable[[str], Result], fixtures_dir: Path) -> None:
    for source in ("gguf/gpt2.gguf", "hf_gpt2", "llmc/gpt2_v3.bin"):
        result = run(f"convert {fixtures_dir / source} out.gguf --set {T}padding_token_id=999")
        assert "at key tokenizer.ggml.padding_token_id" in str(result.exception), source
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("key", "value"), [("general.architecture", "bloom"), (f"{T}model", "bert")])
def test_models_that_are_only_copied_are_held_to_the_same_rules(
    key: str, value: str, run: Callable[[str], Result]
) -> None:
    Path("m.gguf").write_bytes(build(put(key, gguf.STRING, value), FAULTS["equal"][0]))
    assert "tokens 27 and 28" in str(run("convert m.gguf out.gguf").exception)
    assert [p.name for p in Path().iterdir()] == ["m.gguf"]


def test_no_token_is_said_as_real_files_say_it(run: Callable[[str], Result]) -> None:
    Path("m.gguf").write_bytes(build(put(f"{T}padding_token_id", gguf.U32, 0xFFFFFFFF)))
    for line in ("tokenize m.gguf he", "convert m.gguf out.gguf", "convert m.gguf out"):
        assert run(line).exception is None, line


def of_json(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        body = json.loads(path.read_text())
        change(body)
        path.write_text(json.dumps(body))

    return edit


def of_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 999}))


HUGGING_FACE = {
    "equal": (of_json(lambda b: b["added_tokens"].append({"id": 28, "content": "a"})), "tokens, tokens "),
    "empty": (of_json(lambda b: b["model"]["vocab"].update({"": b["model"]["vocab"].pop("b")})), "tokens, token "),
    "merge": (of_json(lambda b: b["model"]["merges"].insert(1, "zz yy")), "merges, merge 1"),
    "id": (of_config, "pad_token_id"),
}


@pytest.mark.parametrize("fault", HUGGING_FACE)
@pytest.mark.parametrize("source", ["hf_gpt2", "hf_llama"])
def test_directories_are_held_to_the_same_rules(
    source: str, fault: str, run: Callable[[str], Result], fixtures_dir: Path
) -> None:
    edit, place = HUGGING_FACE[fault]
    shutil.copytree(fixtures_dir / source, "m")
    edit(Path("m"))
    for line in ("tokenize m he", "convert m out.gguf", "convert m out", "generate m --ids 1 -n 1 --device cpu"):
        error = run(line).exception
        assert isinstance(error, FormatError), line
        assert f"tokenizer.json: {error.what}\n  at {place}" in str(error)
    assert [p.name for p in Path().iterdir()] == ["m"]
    assert (run("check m").exit_code == 1) == (fault == "merge")  # which the tokenizers package refuses


def test_an_id_that_transformers_writes_unasked_is_none(run: Callable[[str], Result], fixtures_dir: Path) -> None:
    shutil.copytree(fixtures_dir / "hf_gpt2", "m")
    path = Path("m") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": 50256, "pad_token_id": -1}))
    for line in ("tokenize m he", "convert m out.gguf"):
        assert run(line).exception is None, line


# other malformed files, a command on them, and what the one error says
MALFORMED = {
    "equal pieces": (build(tokens(lambda t: [*t[:-1], t[-2]]), arch="llama"), "tokenize", "tokens 268 and 269"),
    "types of u32": (REFUSED["types-u32"][1], "convert", "expected array of i32, got u32"),
    "more rows": (REFUSED["rows"][1], "convert", "expected 32 tokens"),
    "unknown splitter": (REFUSED["pre"][1], "tokenize", "'nanoeuler'"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_else_is_malformed(what: str, tmp_path: Path) -> None:
    data, command, said = MALFORMED[what]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    rest = ["he the"] if command == "tokenize" else [str(tmp_path / "out.gguf")]
    result = CliRunner().invoke(cli, [command, str(path), *rest])
    assert isinstance(result.exception, CkptError)
    assert said in str(result.exception)
    assert "m.gguf" in str(result.exception) or what == "unknown splitter"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]

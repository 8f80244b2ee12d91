"""Hand-made hostile files: one error that names the file and the place, no traceback, nothing half-written."""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ckptkit
from ckptkit.cli import cli
from ckptkit.errors import CkptError, FormatError, UnsupportedError
from ckptkit.formats import hf_tokenizer
from ckptkit.formats.tokenizer_files import read_tokenizer
from ckptkit.runtime import LONGEST
from fixtures.models import gpt2, llama, microgpt
from fixtures.writers import gguf
from fixtures.writers import microgpt as microgpt_files


def refused(*args: object) -> CkptError:
    """The error that a command ends with; any other end is a failure."""
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert isinstance(result.exception, CkptError), result.exception or result.output
    assert result.exception.path is not None
    assert len(str(result.exception)) < 8000
    return result.exception


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


# -- errors


def test_a_message_stays_short_and_printable_whatever_the_file_says(tmp_path: Path) -> None:
    name = "\x1b[31m" + "a" * 100_000
    (tmp_path / "m.gguf").write_bytes(gguf.gguf([(name, gguf.U32, 1), (name, gguf.U32, 1)], {}))
    assert "\x1b" not in str(refused("inspect", tmp_path / "m.gguf"))


def test_a_byte_map_that_cannot_be_is_named(fixtures_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.bin").write_bytes(b"a" * 28)
    with pytest.raises(FormatError, match="same character") as e:
        read_tokenizer(tmp_path / "vocab.bin", 28)
    assert e.value.path == tmp_path / "vocab.bin"
    model = fixtures_dir / "nx" / "weights.npz"
    assert refused("inspect", model, "--tokenizer", tmp_path / "vocab.bin").path == tmp_path / "vocab.bin"


def test_what_a_vocabulary_cannot_spell_names_the_file(fixtures_dir: Path) -> None:
    model = fixtures_dir / "gguf" / "gpt2.gguf"
    assert refused("tokenize", model, "Hello").path == model
    assert refused("ppl", model, "--text", fixtures_dir / "SHA256SUMS").path == model


# -- Hugging Face's tokenizer files

PLACES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "added_tokens": ("tokenizer.json", lambda t: t.update(added_tokens=5)),
    "merges": ("tokenizer.json", lambda t: t["model"].update(merges={"a": 1})),
    "merge": ("tokenizer.json", lambda t: t["model"].update(merges=[nested(300)])),
    "vocab": ("tokenizer.json", lambda t: t["model"].update(vocab={"a": nested(300)})),
    "config": ("tokenizer_config.json", lambda t: t.update(added_tokens_decoder=[1])),
    "merges as ids": ("tokenizer_config.json", lambda t: t.update(ckptkit_nanoeuler_merges=[1, [2]])),
    "odd merges": ("tokenizer_config.json", lambda t: t.update(ckptkit_nanoeuler_merges=[1, 2, 3])),
    "huge merges": ("tokenizer_config.json", lambda t: t.update(ckptkit_nanoeuler_merges=[2**40, 2])),
    "characters": ("tokenizer_config.json", lambda t: t.update(ckptkit_chars=5)),
    "bos of characters": ("tokenizer_config.json", lambda t: t.update(ckptkit_chars={"bos": "x"})),
}
IGNORED: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "post_processor": (
        "tokenizer.json",
        lambda t: t.update(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": 5}, 5]}),
    ),
    "unk_token": ("tokenizer.json", lambda t: t["model"].update(unk_token="\ud800")),
    "bos_token": ("tokenizer_config.json", lambda t: t.update(bos_token="\ud800", eos_token=5)),
    "ids": ("tokenizer_config.json", lambda t: t.update(added_tokens_decoder={"²": {}, "9" * 5000: {}})),
    "template": ("tokenizer_config.json", lambda t: t.update(chat_template=[{"name": [], "template": 5}, 5])),
}


@pytest.fixture
def directory(fixtures_dir: Path, tmp_path: Path) -> Path:
    """A model directory that may be damaged."""
    shutil.copytree(fixtures_dir / "hf_gpt2", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "model"


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON object in a file."""
    found = json.loads(path.read_text())
    how(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("what", PLACES)
def test_parts_of_tokenizer_files_of_another_type_are_refused(what: str, directory: Path) -> None:
    file, how = PLACES[what]
    change(directory / file, how)
    assert refused("inspect", directory).path in (directory / "tokenizer.json", directory / file)


@pytest.mark.parametrize("what", IGNORED)
def test_parts_that_say_nothing_are_passed_over(what: str, directory: Path) -> None:
    file, how = IGNORED[what]
    change(directory / file, how)
    assert hf_tokenizer.read(directory) is not None


@pytest.mark.parametrize("text", ["[]", "5", "null", "1" * 5000, "[" * 100_000, '"\\ud800"', "\ufeff{}"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_files_that_are_no_object_are_refused(name: str, text: str, directory: Path) -> None:
    (directory / name).write_text(text)
    assert refused("inspect", directory).path == directory / name


def test_what_the_tokenizers_package_refuses_is_an_error_of_the_file(directory: Path) -> None:
    change(directory / "tokenizer.json", lambda t: t.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}))
    assert refused("tokenize", directory, "a").path == directory / "tokenizer.json"


def test_a_token_that_is_almost_a_byte_is_text(directory: Path) -> None:
    def how(t: dict[str, Any]) -> None:
        t["model"]["vocab"] = {"<0xZZ>": 0, "<0x0A>": 1}
        t |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "added_tokens": []}

    change(directory / "tokenizer.json", how)
    tokenizer = hf_tokenizer.read(directory)
    assert tokenizer is not None
    assert [tokenizer.token_bytes(i) for i in (0, 1)] == [b"<0xZZ>", b"\n"]


def test_a_tokenizer_in_the_metadata_of_a_file_is_read_from_there_alone(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "hf_gpt2"
    found = json.loads((source / "tokenizer.json").read_text()) | {"pre_tokenizer": {"type": "Whitespace"}}
    tokenizer = hf_tokenizer.from_texts(tmp_path / "m.safetensors", json.dumps(found), "{}")
    assert tokenizer.kind == "hf"
    with pytest.raises(FormatError) as e:
        hf_tokenizer.from_texts(tmp_path / "m.safetensors", "[]", "{}")
    assert e.value.path == tmp_path / "m.safetensors"


# -- GGUF


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5])
@pytest.mark.parametrize(
    "key",
    ["llama.block_count", "llama.context_length", "llama.rope.dimension_count", "ckptkit.mtp_heads", "split.count"],
)
def test_sizes_that_are_no_whole_numbers_are_refused(key: str, value: float, tmp_path: Path) -> None:
    m = llama()
    keys = [k for k in gguf.llama_keys(m) if k[0] != key] + [(key, gguf.F32, value)]
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, gguf.llama_tensors(m)))
    assert refused("inspect", tmp_path / "m.gguf").at == f"key {key}"
    CliRunner().invoke(cli, ["check", str(tmp_path / "m.gguf")], catch_exceptions=False)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0])
def test_a_rope_scaling_that_cannot_be_is_refused(factor: float, tmp_path: Path) -> None:
    m = llama()
    keys = [*gguf.llama_keys(m), ("llama.rope.scaling.factor", gguf.F32, factor)]
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, gguf.llama_tensors(m)))
    assert refused("inspect", tmp_path / "m.gguf").at == "key llama.rope.scaling.factor"


@pytest.mark.parametrize(
    "key",
    [
        ("ckptkit.nanoeuler.merges", gguf.STRING, "ab"),
        ("ckptkit.nanoeuler.merges", gguf.ARRAY, (gguf.F32, [math.nan])),
        ("ckptkit.nanoeuler.merges", gguf.ARRAY, (gguf.I32, [1, 2, 3])),
        ("ckptkit.chars.bos", gguf.STRING, "ab"),
    ],
)
def test_tokenizer_keys_of_our_own_are_no_more_trusted_than_others(key: gguf.Key, tmp_path: Path) -> None:
    m = gpt2()
    keys = [*gguf.gpt2_keys(m), *gguf.bpe_keys(["", ""], [], eot=0), key]
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, gguf.gpt2_tensors(m)))
    assert refused("inspect", tmp_path / "m.gguf").path == tmp_path / "m.gguf"


def test_an_array_for_the_kind_of_tokenizer_is_no_kind(tmp_path: Path) -> None:
    m = gpt2()
    keys = [k for k in (*gguf.gpt2_keys(m), *gguf.bpe_keys(["a"], [], eot=0)) if k[0] != "tokenizer.ggml.model"]
    keys.append(("tokenizer.ggml.model", gguf.ARRAY, (gguf.I32, [1, 2])))
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, gguf.gpt2_tensors(m)))
    CliRunner().invoke(cli, ["inspect", str(tmp_path / "m.gguf")], catch_exceptions=False)


@pytest.mark.parametrize("number", ["²", "9" * 5000])
def test_layers_with_odd_numbers_have_no_place(number: str, tmp_path: Path) -> None:
    m = llama()
    keys = [k for k in gguf.llama_keys(m) if k[0] != "llama.block_count"]
    tensors = gguf.llama_tensors(m) | {f"blk.{number}.x": (np.ones(4, np.float32), "f32")}
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, tensors))
    for args in (["inspect"], ["check"], ["convert", "--type", "q8_0", str(tmp_path / "o.gguf")]):
        result = CliRunner().invoke(cli, [args[0], str(tmp_path / "m.gguf"), *args[1:]])
        assert isinstance(result.exception, SystemExit | CkptError | None), result.exception


# -- what is converted


def test_a_model_that_is_only_listed_is_neither_converted_nor_scored(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer.json").unlink()
    change(directory / "config.json", lambda c: c.update(model_type={}))
    assert isinstance(refused("convert", directory, tmp_path / "out"), UnsupportedError)
    change(directory / "config.json", lambda c: c.update(model_type="other"))
    for target in ("out", "out.safetensors"):
        assert isinstance(refused("convert", directory, tmp_path / target), UnsupportedError)
    assert isinstance(refused("ppl", directory, "--text", directory / "config.json", "-c", 8), UnsupportedError)
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_a_model_that_cannot_be_written_leaves_no_prediction_heads(fixtures_dir: Path, tmp_path: Path) -> None:
    data = bytearray((fixtures_dir / "nanoeuler" / "nanoeuler.bin").read_bytes())
    n_merges = int.from_bytes(data[36:40], "little")
    data[40 + 8 * n_merges : 44 + 8 * n_merges] = np.float32(np.nan).tobytes()
    (tmp_path / "m.bin").write_bytes(data)
    refused("convert", tmp_path / "m.bin", tmp_path / "out.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["m.bin"]


@pytest.mark.filterwarnings("error")
def test_values_at_the_end_of_float64_are_no_warning(tmp_path: Path) -> None:
    m = microgpt()
    m.p["wte"][0, 0] = 1e308
    (tmp_path / "m.json").write_bytes(microgpt_files.as_json(m))
    (tmp_path / "zero.json").write_bytes(microgpt_files.as_json(microgpt()))
    for args in (["inspect", "--stats"], ["verify", str(tmp_path / "zero.json"), "--no-logits"]):
        result = CliRunner().invoke(cli, [args[0], str(tmp_path / "m.json"), *args[1:]])
        assert isinstance(result.exception, SystemExit | None), result.exception


def test_a_context_that_no_memory_holds_costs_nothing_until_it_is_asked_for(tmp_path: Path) -> None:
    m = llama()
    keys = [k for k in gguf.llama_keys(m) if k[0] != "llama.context_length"]
    keys.append(("llama.context_length", gguf.U32, 2**31 - 1))
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, gguf.llama_tensors(m)))
    with ckptkit.load(tmp_path / "m.gguf") as model:
        assert model.context == LONGEST
    with pytest.raises(UnsupportedError, match="memory"):
        ckptkit.load(tmp_path / "m.gguf", context=2**31 - 1)


def test_padding_rows_come_back_beside_an_embedding_in_blocks(fixtures_dir: Path, tmp_path: Path) -> None:
    ckptkit.convert(fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / "m.gguf", type="q4_k_m")
    report = ckptkit.convert(tmp_path / "m.gguf", tmp_path / "m.bin")
    with ckptkit.open(report.paths[0]) as ck:
        assert not ck.tensors["token_embd.padding"].read().any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "padded", [(gguf.U32, 2**31 - 1), (gguf.U32, 1), (gguf.F32, math.nan), (gguf.STRING, "x"), (gguf.U32, 2**20)]
)
def test_padding_that_a_gguf_claims_is_believed_within_reason(padded: tuple[int, Any], tmp_path: Path) -> None:
    m = gpt2()
    keys = [*gguf.gpt2_keys(m), ("ckptkit.padded_vocab_size", *padded)]
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(keys, gguf.gpt2_tensors(m)))
    assert CliRunner().invoke(cli, ["inspect", str(tmp_path / "m.gguf")]).exit_code == 0
    report = ckptkit.convert(tmp_path / "m.gguf", tmp_path / "m.bin")
    assert report.nbytes < 1 << 20


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf])
def test_divisors_of_rotary_frequencies_that_cannot_be_are_refused(divisor: float, tmp_path: Path) -> None:
    m = llama()
    half = m.dims["dim"] // m.dims["n_head"] // 2
    tensors = gguf.llama_tensors(m) | {"rope_freqs.weight": (np.full(half, divisor, np.float32), "f32")}
    (tmp_path / "m.gguf").write_bytes(gguf.gguf(gguf.llama_keys(m), tensors))
    assert refused("generate", tmp_path / "m.gguf", "--ids", "1,2", "-n", 1).at == "rope_freqs.weight"


# -- files


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert refused("inspect", tmp_path / "m.gguf").path == tmp_path / "m.gguf"


def test_a_shard_of_an_impossible_name_is_missing(fixtures_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(fixtures_dir / "hf_llama_sharded", tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a" * 999 + ".safetensors"}}))
    assert refused("inspect", tmp_path / "m").path == index


# -- npz


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_numpy_never_writes_are_refused(method: int, fixtures_dir: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(fixtures_dir / "nx" / "weights.npz") as z, zipfile.ZipFile(tmp_path / "m.npz", "w") as out:
        for info in z.infolist():
            out.writestr(info.filename, z.read(info), method)
    assert "method" in str(refused("inspect", tmp_path / "m.npz"))

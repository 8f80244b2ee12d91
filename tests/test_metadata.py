"""Editing the keys of a GGUF: what was asked for changes, and not one other byte of a key or a tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from check_files import build, put
from click.testing import CliRunner, Result

from ckptkit.cli import cli
from ckptkit.errors import CkptError
from fixtures.writers import gguf as writer

FILES = ["gpt2", "llama", "llama31", "llama_q8_0", "qwen2_bf16"]
TYPE = gguf.GGUFValueType


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, args)])


def fields(path: Path) -> dict[str, tuple[list[TYPE], bytes]]:
    """Every key's types and bytes as stored, by the gguf package; the counts of the header are no keys."""
    read = gguf.GGUFReader(path)
    return {
        name: (list(f.types), b"".join(np.asarray(part).tobytes() for part in f.parts))
        for name, f in read.fields.items()
        if not name.startswith("GGUF.")
    }


def tensors(path: Path) -> list[tuple[str, object, list[int], bytes]]:
    return [(t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors]


@pytest.mark.parametrize("name", FILES)
def test_nothing_else_changes(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    source, out, template = fixtures_dir / "gguf" / f"{name}.gguf", tmp_path / "out.gguf", tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}\n")
    arch = {"llama31": "llama", "llama_q8_0": "llama", "qwen2_bf16": "qwen2"}.get(name, name)
    context = 16 if arch == "gpt2" else 5  # of GPT-2 as many as there are positions
    result = run(
        "convert", source, out, "--set", f"{arch}.context_length={context}", "--set", "my.flag=true",
        "--remove", "tokenizer.ggml.add_bos_token", "--chat-template", template, "--name", "named",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    before, after = fields(source), fields(out)
    asked = {
        f"{arch}.context_length", "my.flag", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template", "general.name",
    }  # fmt: skip
    assert {k: v for k, v in before.items() if k not in asked} == {k: v for k, v in after.items() if k not in asked}
    assert [k for k in before if k in after] == [k for k in after if k in before]  # in the same order
    read = gguf.GGUFReader(out)
    assert read.fields["general.name"].contents() == "named"
    assert read.fields["tokenizer.chat_template"].contents() == template.read_text()
    assert read.fields[f"{arch}.context_length"].contents() == context
    assert read.fields[f"{arch}.context_length"].types == [TYPE.UINT32]
    assert read.fields["my.flag"].contents() is True
    assert "tokenizer.ggml.add_bos_token" not in read.fields
    assert tensors(source) == tensors(out)


@pytest.mark.parametrize("name", FILES)
def test_a_copy_without_edits_has_the_same_keys_and_tensors(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    source, out = fixtures_dir / "gguf" / f"{name}.gguf", tmp_path / "out.gguf"
    assert run("convert", source, out).exit_code == 0
    assert list(fields(source).items()) == list(fields(out).items())
    assert tensors(source) == tensors(out)


def test_files_of_other_architectures_are_edited_too(tmp_path: Path) -> None:
    keys = [("general.architecture", writer.STRING, "mamba"), ("mamba.context_length", writer.U32, 7),
            ("x.list", writer.ARRAY, (writer.I16, [1, -2]))]  # fmt: skip
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    source.write_bytes(writer.gguf(keys, {"a.weight": (np.ones((3, 5), np.float32), "f16")}))
    assert run("convert", source, out, "--set", "mamba.context_length=9", "--set", "a.b=c").exit_code == 0
    before, after = fields(source), fields(out)
    assert {k: v for k, v in after.items() if k not in ("mamba.context_length", "a.b")} == {
        k: v for k, v in before.items() if k != "mamba.context_length"
    }
    assert gguf.GGUFReader(out).fields["mamba.context_length"].contents() == 9
    assert tensors(source) == tensors(out)


WRONG = {
    "llama.context_length": "many",
    "llama.block_count": "-1",
    "llama.rope.freq_base": "x",
    "tokenizer.ggml.add_bos_token": "perhaps",
    "tokenizer.ggml.tokens": "a",
    "llama.attention.head_count": "4294967296",
    "llama.rope.scaling.factor": "much",  # not in the file: the type is known all the same
    "general.tags": "a",
    "general.alignment": "64",
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_are_one_error_and_leave_nothing(key: str, fixtures_dir: Path, tmp_path: Path) -> None:
    result = run("convert", fixtures_dir / "gguf" / "llama.gguf", tmp_path / "out.gguf", "--set", f"{key}={WRONG[key]}")
    assert isinstance(result.exception, CkptError)
    assert key in str(result.exception)
    assert list(tmp_path.iterdir()) == []


# key, text, type and value in the file; none of them is there before
KNOWN = [
    ("llama.attention.layer_norm_rms_epsilon", "1", TYPE.FLOAT32, 1.0),
    ("llama.rope.freq_base", "500000", TYPE.FLOAT32, 500000.0),
    ("llama.rope.scaling.factor", "2", TYPE.FLOAT32, 2.0),
    ("llama.rope.scaling.type", "none", TYPE.STRING, "none"),
    ("llama.attention.causal", "true", TYPE.BOOL, True),
    ("llama.attention.key_length", "4", TYPE.UINT32, 4),
    ("tokenizer.ggml.padding_token_id", "0", TYPE.UINT32, 0),
    ("tokenizer.ggml.add_eos_token", "0", TYPE.BOOL, False),
    ("general.version", "2", TYPE.STRING, "2"),
    ("general.quantization_version", "2", TYPE.UINT32, 2),
    ("a.u", "7", TYPE.UINT32, 7),
    ("a.i", "-7", TYPE.INT32, -7),
    ("a.f", "0.5", TYPE.FLOAT32, 0.5),
    ("a.b", "false", TYPE.BOOL, False),
    ("a.s", "seven", TYPE.STRING, "seven"),
    ("a.eq", "x=y", TYPE.STRING, "x=y"),
]


@pytest.mark.parametrize(("key", "given", "kind", "value"), KNOWN)
def test_new_keys_take_the_type_that_is_known_or_looks_right(
    key: str, given: str, kind: TYPE, value: object, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    gone = ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base")
    source.write_bytes(build(lambda k, t: ([x for x in k if x[0] not in gone], t), arch="llama"))
    assert run("convert", source, out, "--set", f"{key}={given}").exit_code == 0
    field = gguf.GGUFReader(out).fields[key]
    assert (field.types, field.contents()) == ([kind], value)


def test_setting_a_known_key_mends_its_type(tmp_path: Path) -> None:
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    source.write_bytes(build(put("llama.context_length", writer.U64, 16), arch="llama"))
    assert run("check", source).exit_code == 1
    assert run("convert", source, out, "--set", "llama.context_length=16").exit_code == 0
    assert run("check", out).exit_code == 0


def test_a_vocabulary_without_an_end_gets_a_stand_in_that_is_none(fixtures_dir: Path, tmp_path: Path) -> None:
    """llama.cpp would take token 11; what is written instead does not come back as a real id, nor is it hidden."""
    import json
    import shutil

    from ckptkit import formats

    folder, out, back = tmp_path / "m", tmp_path / "out.gguf", tmp_path / "back"
    shutil.copytree(fixtures_dir / "hf_gpt2", folder)
    body = json.loads((folder / "tokenizer.json").read_text())
    for token in body["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(body))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("bos_token_id", "eos_token_id")})
    )
    result = run("convert", folder, out)
    assert result.exit_code == 0, result.output
    assert "names no EOS" in result.stdout
    read = gguf.GGUFReader(out).fields
    assert read["tokenizer.ggml.eos_token_id"].contents() == read["ckptkit.stand_in.eos"].contents()
    with formats.open(folder) as a, formats.open(out) as b:
        assert a.tokenizer is not None
        assert b.tokenizer is not None
        assert a.tokenizer.eos is b.tokenizer.eos is None
        assert a.tokenizer.bos is b.tokenizer.bos is None
    assert run("check", out).exit_code == 0
    assert run("convert", out, back).exit_code == 0
    assert json.loads((back / "config.json").read_text())["eos_token_id"] is None
    assert run("convert", out, tmp_path / "set.gguf", "--set", "tokenizer.ggml.eos_token_id=5").exit_code == 0
    with formats.open(tmp_path / "set.gguf") as ck:
        assert ck.tokenizer is not None
        assert ck.tokenizer.eos == 5

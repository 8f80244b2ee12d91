"""Editing the keys of a GGUF: what was asked for changes, and not one other byte of a key or a tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptkit import conversion
from ckptkit.errors import CkptError
from ckptkit.files import File
from ckptkit.formats.gguf_io import Kind, encode_value, read_header
from ckptkit.formats.options import WriteOptions

FILES = ["gpt2", "llama", "llama31", "llama_q8_0", "qwen2_bf16"]


def keys(path: Path) -> dict[str, bytes]:
    """Every key's type and value as stored."""
    file = File(path)
    try:
        return {name: encode_value(value) for name, value in read_header(file).keys.items()}
    finally:
        file.close()


def edit(source: Path, target: Path, **how: object) -> None:
    conversion.convert(source, target, conversion.Options(write=WriteOptions(**how)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
def test_nothing_else_changes(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    import gguf

    source, out = fixtures_dir / "gguf" / f"{name}.gguf", tmp_path / "out.gguf"
    template = "{{ messages[0]['content'] }}"
    arch = {"llama31": "llama", "llama_q8_0": "llama", "qwen2_bf16": "qwen2"}.get(name, name)
    edits = {"tokenizer.chat_template": template, f"{arch}.context_length": "5", "my.flag": "true"}
    if arch == "gpt2":
        edits["gpt2.context_length"] = str(gguf.GGUFReader(source).fields["gpt2.context_length"].contents())
    edit(source, out, metadata=edits, remove=("tokenizer.ggml.add_bos_token",), name="named")
    before, after = keys(source), keys(out)
    asked = {*edits, "tokenizer.ggml.add_bos_token", "general.name"}
    assert {k: v for k, v in before.items() if k not in asked} == {k: v for k, v in after.items() if k not in asked}
    read = gguf.GGUFReader(out)
    assert read.fields["general.name"].contents() == "named"
    assert read.fields["tokenizer.chat_template"].contents() == template
    assert read.fields[f"{arch}.context_length"].types == [gguf.GGUFValueType.UINT32]
    assert read.fields["my.flag"].contents() is True
    assert "tokenizer.ggml.add_bos_token" not in read.fields
    old = gguf.GGUFReader(source).tensors
    assert [(t.name, t.tensor_type) for t in read.tensors] == [(t.name, t.tensor_type) for t in old]
    for a, b in zip(old, read.tensors, strict=True):
        np.testing.assert_array_equal(np.asarray(a.data).view(np.uint8), np.asarray(b.data).view(np.uint8))


WRONG = {
    "llama.context_length": "many",
    "llama.block_count": "-1",
    "llama.rope.freq_base": "x",
    "tokenizer.ggml.add_bos_token": "perhaps",
    "tokenizer.ggml.tokens": "a",
    "llama.attention.head_count": "4294967296",
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_are_one_error_and_leave_nothing(key: str, fixtures_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as e:
        edit(fixtures_dir / "gguf" / "llama.gguf", tmp_path / "out.gguf", metadata={key: WRONG[key]})
    assert key in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_new_keys_take_the_type_they_look_like(fixtures_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    given = {"a.u": "7", "a.i": "-7", "a.f": "0.5", "a.b": "false", "a.s": "seven"}
    edit(fixtures_dir / "gguf" / "llama.gguf", out, metadata=given)
    file = File(out)
    found = {k: v.kind for k, v in read_header(file).keys.items() if k.startswith("a.")}
    file.close()
    assert found == {"a.u": Kind.U32, "a.i": Kind.I32, "a.f": Kind.F32, "a.b": Kind.BOOL, "a.s": Kind.STRING}

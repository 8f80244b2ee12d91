"""`check --fix OUT`: what is mended loads in llama.cpp and is clean; what cannot be mended leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import llamacpp
import numpy as np
import pytest
from check_files import REFUSED, T, array, build, put, tensor, tokens, without
from click.testing import CliRunner, Result

from ckptkit import formats
from ckptkit.check import check
from ckptkit.cli import cli
from ckptkit.errors import CkptError
from fixtures.make import BPE, LLAMA
from fixtures.writers import gguf


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, args)])


def refused(*args: object) -> bool:
    """Whether the command ends with one of our errors."""
    return isinstance(run(*args).exception, CkptError)


def fixed(data: bytes, folder: Path) -> Path:
    source, out = folder / "m.gguf", folder / "mended.gguf"
    source.write_bytes(data)
    result = run("check", source, "--fix", out)
    assert "--fix does it" in result.stdout, result.output
    assert source.read_bytes() == data
    return out


SAFE = [
    "context-u64", "eps-f64", "base-f64", "file-type-u64", "bos-i32", "add-bos-u32", "no-context", "no-ff", "no-width",
    "no-layers", "positions", "merges", "gap", "alignment-8", "f16-norm", "bf16-bias", "f16-factors",
]  # fmt: skip

VOCABULARY = {  # which llama.cpp loads with a warning
    "empty": build(
        tokens(lambda t: [*t[:4], "", *t[5:-1], "\0x"]),
        array(f"{T}token_type", gguf.I32, [3 if i in (4, 28) else 1 for i in range(29)]),
    ),
    "pad-range": build(put(f"{T}padding_token_id", gguf.U32, 99)),
    "types-long": build(array(f"{T}token_type", gguf.I32, [1] * 40)),
    "scores-long": build(array(f"{T}scores", gguf.F32, [0.0] * 300), arch="llama"),
}


def test_mended_files_are_accepted_and_clean(tmp_path: Path) -> None:
    files = {name: REFUSED[name][1] for name in SAFE} | VOCABULARY
    outs = []
    for name, data in files.items():
        (tmp_path / name).mkdir()
        outs.append(fixed(data, tmp_path / name))
        assert [f for f in check(outs[-1], deep=True).findings if f.severity != "note"] == [], name
    for name, (loaded, words) in zip(files, llamacpp.judged(outs), strict=True):
        assert loaded, (name, words)


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_mended_vocabulary_is_what_llama_cpp_took_it_for(name: str, tmp_path: Path) -> None:
    out = fixed(VOCABULARY[name], tmp_path)
    texts = ["he the rest", "[EMPTY_4]he[EMPTY_28]"]
    (before, said), (after, says) = (llamacpp.tokenized(p, texts) for p in (tmp_path / "m.gguf", out))
    assert after == before
    assert (says["bos_token"], says["eos_token"]) == (said["bos_token"], said["eos_token"])
    assert (name == "empty") == ({4, 28} <= set(after[1]))  # it calls them so
    with formats.open(out) as ck:
        assert ck.tokenizer is not None
        assert "pad" not in ck.tokenizer.ids
        if name == "empty":
            assert [ck.tokenizer.tokens[i] for i in (4, 28)] == [b"[EMPTY_4]", b"[EMPTY_28]"]


def test_several_mends_at_once_leave_the_rest_as_it_was(tmp_path: Path) -> None:
    import gguf as judge

    edits = [put("gpt2.context_length", gguf.U64, 16), put("my.key", gguf.I16, -3), without("gpt2.block_count"),
             tensor("blk.0.attn_norm.bias", kind="f16"), without("tokenizer.ggml.merges")]  # fmt: skip
    out = fixed(build(*edits) + b"hidden" * 100, tmp_path)
    right = tmp_path / "right.gguf"
    right.write_bytes(build(edits[1]))
    want, got = judge.GGUFReader(right), judge.GGUFReader(out)
    named = [k for k in want.fields if not k.startswith("GGUF.")]
    assert sorted(named) == sorted(k for k in got.fields if not k.startswith("GGUF."))
    for key in named:
        assert got.fields[key].types == want.fields[key].types, key
        assert got.fields[key].contents() == want.fields[key].contents(), key
    assert [(t.name, t.tensor_type) for t in got.tensors] == [(t.name, t.tensor_type) for t in want.tensors]
    for a, b in zip(want.tensors, got.tensors, strict=True):
        limit = 2**-11 if a.name == "blk.0.attn_norm.bias" else 0  # it came as F16
        np.testing.assert_allclose(b.data, a.data, rtol=limit, atol=0)
    assert b"hidden" not in out.read_bytes()
    assert llamacpp.judged([out])[0][0]


def test_trailing_bytes_are_left_out(tmp_path: Path) -> None:
    assert fixed(build() + bytes(100), tmp_path).read_bytes() == build()


def test_shards_are_mended_into_one_file(tmp_path: Path) -> None:
    keys = [k for k in gguf.llama_keys(LLAMA) if k[0] != "llama.block_count"] + BPE
    for name, data in gguf.split(keys, gguf.llama_tensors(LLAMA), 3, "tiny").items():
        (tmp_path / name).write_bytes(data)
    first, out = tmp_path / "tiny-00001-of-00003.gguf", tmp_path / "one.gguf"
    assert {f.rule for f in check(first).findings if f.severity == "error"} == {"key-missing"}
    assert not llamacpp.judged([first])[0][0]
    assert run("check", first, "--fix", out).exit_code == 1  # of the file that was checked
    assert run("check", out).exit_code == 0
    assert llamacpp.judged([out])[0][0]
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(gguf.gguf(gguf.llama_keys(LLAMA) + BPE, gguf.llama_tensors(LLAMA)))
    prompt = [1, 5, 9]
    assert llamacpp.run(out, prompt, 4) == llamacpp.run(whole, prompt, 4)


@pytest.mark.parametrize("name", ["pre", "extra", "shape", "cut"])
def test_nothing_is_written_where_nothing_can_be_mended(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    path.write_bytes(REFUSED[name][1])
    assert refused("check", path, "--fix", out)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    path.write_bytes(REFUSED["merges"][1])
    out.write_bytes(b"mine")
    assert refused("check", path, "--fix", out)
    assert out.read_bytes() == b"mine"
    assert run("check", path, "--fix", out, "--force").exit_code == 1
    assert run("check", out).exit_code == 0
    assert refused("check", out, "--fix", out)  # nothing left to mend


# -- other formats


def test_directories_of_hugging_face_are_looked_at(fixtures_dir: Path, tmp_path: Path) -> None:
    result = run("check", fixtures_dir / "hf_gpt2")
    assert result.exit_code == 0, result.output
    assert "safetensors, arch gpt2" in result.stdout
    assert refused("check", fixtures_dir / "hf_gpt2", "--fix", tmp_path / "o")


def test_more_tokens_than_rows_are_an_error_of_hugging_face(fixtures_dir: Path, tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(fixtures_dir / "hf_llama", folder)
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text())
    n = len(body["model"]["vocab"]) + len(body["added_tokens"])
    body["added_tokens"] += [
        {"id": n + 40 + k, "content": f"<extra{k}>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False} for k in range(3)
    ]  # fmt: skip
    path.write_text(json.dumps(body))
    found = {f.rule: f for f in check(folder).findings}
    assert "tokens-beyond-rows" in found
    assert found["tokens-beyond-rows"].severity == "error"


def test_a_template_in_a_directory_is_read(fixtures_dir: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(fixtures_dir / "hf_gpt2", folder)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__ }}")
    assert {f.rule for f in check(folder).findings} == {"template-code"}


def test_what_is_unknown_here_is_no_error(fixtures_dir: Path, tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(fixtures_dir / "hf_llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "nova", "architectures": ["NovaForCausalLM"]})
    )
    result = run("check", folder)
    assert result.exit_code == 0, result.output
    assert "note: model_type 'nova' is not known" in result.stdout

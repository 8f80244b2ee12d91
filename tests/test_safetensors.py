"""Hugging Face directories and single files against independent writers: read, written back, made anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile import error_of
from safetensors.numpy import load_file
from safetensors_models import (
    DIRECTORIES,
    EXPECTED,
    GPT2,
    LLAMA,
    LLAMA31,
    assert_holds,
    canonical_gpt2,
    opened,
    put,
    write,
)

from ckptkit.checkpoint import RopeScaling
from ckptkit.errors import FormatError
from ckptkit.formats import safetensors
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.formats.safetensors_io import read_header, write_file
from ckptkit.formats.safetensors_write import TOKENIZER
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from fixtures.writers import safetensors as writer
from fixtures.writers import vocab


@pytest.mark.parametrize("name", DIRECTORIES)
def test_reads_directories(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as ck:
        assert_holds(ck, EXPECTED[name])
        c = ck.config
        assert c.arch == name.split()[0]
        assert (c.context_length, c.vocab_size, c.n_layer, c.n_head, c.n_embd) == (16, 29, 2, 3, 18)
        if c.arch == "gpt2":
            assert (c.n_ff, c.head_dim, c.norm_eps, c.rope_pairing, c.tied_output) == (72, 6, 1e-5, "", True)
        else:
            assert (c.n_kv_head, c.n_ff, c.head_dim, c.norm_eps, c.rope_pairing) == (1, 28, 6, 1e-5, "half")
            assert c.rope_theta == {"llama": 1e4, "qwen2": 1e6}.get(name, c.rope_theta)
            assert c.tied_output == (name == "qwen2")
        assert (c.rope_scaling is not None) == (name == "llama 3.1")
        if c.rope_scaling:
            assert c.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_writes_the_same_bytes_back(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as ck:
        found = write(ck, tmp_path / "out", split_max_size=5000 if "shards" in name else 0)
    expected = DIRECTORIES[name]
    if "shards" in name:  # ours are cut by size, the writer's by count
        assert found["config.json"] == expected["config.json"]
        assert sum(n.startswith("model-") for n in found) > 1
        with safetensors.read(tmp_path / "out", ReadOptions()) as ck:
            assert_holds(ck, EXPECTED[name])
    else:
        assert found == expected


def test_shards_hold_no_more_than_asked_and_the_index_is_right(tmp_path: Path) -> None:
    with opened(tmp_path, "llama") as ck:
        found = write(ck, tmp_path / "out", split_max_size=4000)
    index = json.loads(found["model.safetensors.index.json"])
    everything = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "out" / name)
        assert len(part) == 1 or sum(a.nbytes for a in part.values()) <= 4000
        assert {n for n, where in index["weight_map"].items() if where == name} == set(part)
        everything |= part
    arrays = writer.llama_arrays(LLAMA)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    assert everything.keys() == arrays.keys()
    for name, a in arrays.items():
        np.testing.assert_array_equal(everything[name], a)


def test_tokenizer_and_generation_config_come_back_as_they_were(tmp_path: Path) -> None:
    tokenizer = writer.tokenizer_json(list(vocab.BPE_STRINGS), list(vocab.BPE_MERGE_STRINGS), eot=vocab.BPE_EOT)
    files = writer.directory(writer.gpt2_arrays(GPT2), writer.gpt2_config(GPT2), tokenizer)
    files |= {"generation_config.json": b'{"eos_token_id":28}', "tokenizer_config.json": b'{"model_max_length": 16 }'}
    with safetensors.read(put(tmp_path / "in", files), ReadOptions()) as ck:
        assert ck.tokenizer is not None
        assert ck.tokenizer.encode(" the hen")[:1] == [20]
        assert write(ck, tmp_path / "out") == files
        elsewhere = replace(ck, source=replace(ck.source, format="gguf", metadata={}))
        found = write(elsewhere, tmp_path / "new")
    assert json.loads(found["tokenizer.json"])["model"]["vocab"] == tokenizer["model"]["vocab"]
    with safetensors.read(tmp_path / "new", ReadOptions()) as ck:
        assert ck.tokenizer is not None
        assert ck.tokenizer.decode_bytes(ck.tokenizer.encode("the rest on a hill")) == b"the rest on a hill"


def test_a_config_made_anew_reads_as_the_same_model(tmp_path: Path) -> None:
    for name in ("llama 3.1", "qwen2", "gpt2"):
        with opened(tmp_path, name) as ck:
            bare = replace(ck, source=replace(ck.source, format="gguf", metadata={}))
            found = write(bare, tmp_path / name)
            config = json.loads(found["config.json"])
            original = json.loads(DIRECTORIES[name]["config.json"])
            for key in original.keys() - {"bos_token_id", "eos_token_id"}:
                assert config[key] == original[key], key
            with safetensors.read(tmp_path / name, ReadOptions()) as again:
                assert again.config == ck.config
                assert_holds(again, EXPECTED[name])


def test_numbers_that_went_through_float32_are_written_short(tmp_path: Path) -> None:
    with opened(tmp_path, "llama") as ck:
        config = replace(ck.config, norm_eps=float(np.float32(1e-5)), rope_theta=float(np.float32(1e6)))
        bare = replace(ck, config=config, source=replace(ck.source, format="gguf", metadata={}))
        found = json.loads(write(bare, tmp_path / "out")["config.json"])
    assert (found["rms_norm_eps"], found["rope_theta"]) == (1e-5, 1e6)


def test_new_style_rope_parameters(tmp_path: Path) -> None:
    config = writer.llama_config(LLAMA, rope_parameters={"rope_theta": 5e5, **LLAMA31})
    del config["rope_theta"]
    files = writer.directory(writer.llama_arrays(LLAMA), config)
    with safetensors.read(put(tmp_path / "in", files), ReadOptions()) as ck:
        assert ck.config.rope_theta == 5e5
        assert ck.config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
        assert write(ck, tmp_path / "out") == files
        changed = replace(ck, config=replace(ck.config, rope_theta=1e4))
        found = json.loads(write(changed, tmp_path / "other")["config.json"])
        assert "rope_parameters" not in found
        assert (found["rope_theta"], found["rope_scaling"]["factor"]) == (1e4, 8.0)


def test_causal_masks_and_other_buffers_are_left_out(tmp_path: Path) -> None:
    arrays = writer.gpt2_arrays(GPT2, masks=True)
    arrays |= {n: a.astype(bool) for n, a in arrays.items() if n.endswith(".attn.bias")}
    files = writer.directory(arrays, writer.gpt2_config(GPT2))
    with safetensors.read(put(tmp_path / "in", files), ReadOptions()) as ck:
        assert_holds(ck, canonical_gpt2(GPT2))
        assert any("2 constant buffers" in note for note in ck.source.notes)


def test_a_copy_of_a_tied_output_is_left_out_with_a_note(tmp_path: Path) -> None:
    arrays = writer.gpt2_arrays(GPT2) | {"lm_head.weight": GPT2.p["wte"]}
    with safetensors.read(
        put(tmp_path / "in", writer.directory(arrays, writer.gpt2_config(GPT2))), ReadOptions()
    ) as ck:
        assert "output.weight" not in ck.tensors
        assert any("lm_head" in note for note in ck.source.notes)


def test_a_lost_output_is_an_error(tmp_path: Path) -> None:
    arrays = writer.llama_arrays(LLAMA)
    del arrays["lm_head.weight"]
    path = put(tmp_path / "in", writer.directory(arrays, writer.llama_config(LLAMA)))
    with pytest.raises(FormatError, match="lm_head"):
        safetensors.read(path, ReadOptions())


def test_one_shard_opens_all(tmp_path: Path) -> None:
    folder = put(tmp_path / "in", DIRECTORIES["llama bf16 in shards"])
    with safetensors.read(folder / "model-00002-of-00003.safetensors", ReadOptions()) as ck:
        assert_holds(ck, EXPECTED["llama bf16 in shards"])


def test_a_single_file_carries_its_config(tmp_path: Path) -> None:
    for name in ("llama 3.1", "qwen2", "gpt2"):
        with opened(tmp_path, name) as ck:
            out = tmp_path / "x.safetensors"
            write(ck, out)
            with safetensors.read(out, ReadOptions()) as again:
                assert again.config == ck.config
                assert_holds(again, EXPECTED[name])


def test_a_single_file_carries_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = writer.tokenizer_json(list(vocab.BPE_STRINGS), list(vocab.BPE_MERGE_STRINGS), eot=vocab.BPE_EOT)
    files = writer.directory(writer.gpt2_arrays(GPT2), writer.gpt2_config(GPT2), tokenizer)
    with safetensors.read(put(tmp_path / "in", files), ReadOptions()) as ck:
        first = write(ck, tmp_path / "x.safetensors")["x.safetensors"]
        with safetensors.read(tmp_path / "x.safetensors", ReadOptions()) as again:
            assert ck.tokenizer is not None
            assert again.tokenizer is not None
            assert again.tokenizer.ids == ck.tokenizer.ids
            assert again.tokenizer.encode(" the hen") == ck.tokenizer.encode(" the hen")
            assert write(again, tmp_path / "y.safetensors")["y.safetensors"] == first
            write(again, tmp_path / "back")
    with safetensors.read(tmp_path / "back", ReadOptions()) as back:
        assert back.tokenizer is not None
        assert back.tokenizer.encode(" the hen")[0] == 20
    for text in ("[", "[]", "{}", "[" * 100_000):
        with safetensors.read(tmp_path / "x.safetensors", ReadOptions()) as ck:
            _, tensors = read_header(ck.files[0])
            write_file(tmp_path / "z.safetensors", tensors, dict(ck.source.metadata["metadata"]) | {TOKENIZER: text})
        assert isinstance(error_of(safetensors.read, tmp_path / "z.safetensors"), FormatError)


def test_mixed_types_become_one_type_first(tmp_path: Path) -> None:
    with opened(tmp_path, "qwen2") as ck:
        from ckptkit.quant.encode import encode

        tensors = {n: encode(t, QType.F32) if "norm" in n else t for n, t in ck.tensors.items()}
        mixed = replace(ck, tensors=tensors)
        assert [t.mixture for t in safetensors.targets(mixed, WriteOptions())] == ["bf16", ""]
        assert [t.mixture for t in safetensors.targets(ck, WriteOptions())] == [""]
        stored = write_rows(safetensors.LAYOUTS["qwen2"], ck.config, tensors)
        assert safetensors.plan(ck.config, stored, "")["model.norm.weight"] == QType.F32
        assert set(safetensors.plan(ck.config, stored, "f16").values()) == {QType.F16}

"""Hugging Face directories, single files, microgpt's and the Qwen2 trainer's weights, against independent writers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import accepted, error_of
from safetensors.numpy import load_file

from ckptkit.checkpoint import Checkpoint, RopeScaling
from ckptkit.errors import CkptError, FormatError, OutputError, UnsupportedError
from ckptkit.formats import safetensors
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.formats.safetensors_io import read_header, write_file
from ckptkit.formats.safetensors_write import TOKENIZER
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from fixtures import models
from fixtures.models import Model
from fixtures.writers import microgpt as microgpt_writer
from fixtures.writers import safetensors as writer
from fixtures.writers import vocab

LLAMA = models.llama(61)
QWEN2 = models.llama(62, bias=True, tied=True)
GPT2 = models.gpt2(63)
NX = models.nx(64)
MICROGPT = models.microgpt(65)
LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DIRECTORIES = {
    "llama": writer.directory(writer.llama_arrays(LLAMA), writer.llama_config(LLAMA)),
    "llama bf16 in shards": writer.directory(
        writer.llama_arrays(LLAMA), writer.llama_config(LLAMA), shards=3, bf16=True
    ),
    "llama 3.1": writer.directory(
        writer.llama_arrays(LLAMA), writer.llama_config(LLAMA, rope_theta=5e5, rope_scaling=LLAMA31)
    ),
    "qwen2": writer.directory(
        writer.llama_arrays(QWEN2, permute=False),
        writer.llama_config(QWEN2, "qwen2", rope_theta=1e6, use_sliding_window=False),
        bf16=True,
    ),
    "gpt2": writer.directory(writer.gpt2_arrays(GPT2), writer.gpt2_config(GPT2)),
    "gpt2 without prefix": writer.directory(writer.gpt2_arrays(GPT2, prefix=""), writer.gpt2_config(GPT2)),
}
LAYERS = {
    "attn_norm": "rms_att", "attn_q": "wq", "attn_k": "wk", "attn_v": "wv", "attn_output": "wo",
    "ffn_norm": "rms_ffn", "ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2",
}  # fmt: skip


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def opened(folder: Path, name: str, **options: Any) -> Checkpoint:
    return safetensors.read(put(folder / "in", DIRECTORIES[name]), ReadOptions(**options))


def values(ck: Checkpoint, name: str) -> np.ndarray:
    t = ck.tensors[name]
    raw = t.read().reshape(-1)
    if t.type == QType.BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(t.shape)
    return raw.view({QType.F32: "<f4", QType.F64: "<f8"}[t.type]).reshape(t.shape)


def canonical(m: Model, half: bool = False) -> dict[str, np.ndarray]:
    """A llama's or Qwen2's arrays by canonical name; `half`: as a file with half pairing holds them."""
    p = models.half_paired(m).p if half else m.p
    out = {"token_embd.weight": p["tok_emb"], "output_norm.weight": p["rms_final"]}
    out |= {"output.weight": p["wcls"]} if "wcls" in p else {}
    for i in range(m.dims["n_layer"]):
        out |= {f"blk.{i}.{ours}.weight": p[theirs][i] for ours, theirs in LAYERS.items()}
        out |= {f"blk.{i}.attn_{c}.bias": p["b" + c][i] for c in "qkv" if "b" + c in p}
    return out


def canonical_gpt2(m: Model) -> dict[str, np.ndarray]:
    p, c = m.p, m.dims["channels"]
    out = {"token_embd.weight": p["wte"], "position_embd.weight": p["wpe"]}
    out |= {"output_norm.weight": p["lnfw"], "output_norm.bias": p["lnfb"]}
    for i in range(m.dims["n_layer"]):
        for ours, theirs in {"attn_norm": "ln1", "attn_output": "attproj", "ffn_norm": "ln2", "ffn_up": "fc"}.items():
            out |= {f"blk.{i}.{ours}.weight": p[theirs + "w"][i], f"blk.{i}.{ours}.bias": p[theirs + "b"][i]}
        out |= {f"blk.{i}.ffn_down.weight": p["fcprojw"][i], f"blk.{i}.ffn_down.bias": p["fcprojb"][i]}
        for k, part in enumerate("qkv"):
            out[f"blk.{i}.attn_{part}.weight"] = p["qkvw"][i][k * c : (k + 1) * c]
            out[f"blk.{i}.attn_{part}.bias"] = p["qkvb"][i][k * c : (k + 1) * c]
    return out


def assert_holds(ck: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert set(ck.tensors) == set(expected)
    for name, a in expected.items():
        np.testing.assert_array_equal(values(ck, name), a, err_msg=name)


EXPECTED = {
    "llama": canonical(LLAMA, half=True),
    "llama bf16 in shards": canonical(models.rounded(LLAMA), half=True),
    "llama 3.1": canonical(LLAMA, half=True),
    "qwen2": canonical(models.rounded(QWEN2)),
    "gpt2": canonical_gpt2(GPT2),
    "gpt2 without prefix": canonical_gpt2(GPT2),
}


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


def write(ck: Checkpoint, path: Path, **options: Any) -> dict[str, bytes]:
    target = safetensors.targets(ck, WriteOptions(**options))[0]
    stored = write_rows(target.layout, ck.config, ck.tensors)
    safetensors.write(ck, stored, path, WriteOptions(**({"version": target.version} | options)))
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else {path.name: path.read_bytes()}


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


# ---------------------------------------------------------------- other namings


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_microgpt_comes_back_byte_identical(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(microgpt_writer.as_safetensors(MICROGPT, dtype))
    with safetensors.read(path, ReadOptions()) as ck:
        c = ck.config
        assert (c.arch, c.n_layer, c.n_head, c.context_length, c.vocab_size) == ("microgpt", 2, 3, 8, 7)
        assert ck.tokenizer is not None
        assert ck.tokenizer.encode("ban") == [1, 0, 5]
        np.testing.assert_array_equal(
            values(ck, "blk.1.ffn_down.weight"), MICROGPT.p["layer1.mlp_fc2"].astype("<" + dtype)
        )
        found = write(ck, tmp_path / "out.safetensors")
        assert found["out.safetensors"] == path.read_bytes()
        bare = replace(ck, source=replace(ck.source, format="gguf", metadata={}))
        assert write(bare, tmp_path / "out.safetensors") == found
        with pytest.raises(UnsupportedError, match="one file"):
            write(ck, tmp_path / "directory")


def test_microgpt_of_the_program(tmp_path: Path, shared: Path) -> None:
    for name in ("microgpt_names.f64.safetensors", "microgpt_names.f32.safetensors"):
        with safetensors.read(shared / name, ReadOptions()) as ck:
            assert (ck.config.n_head, ck.config.vocab_size) == (4, 27)
            assert write(ck, tmp_path / name)[name] == (shared / name).read_bytes()


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_in_major_weights_are_transposed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w.{suffix}"
    path.write_bytes({"safetensors": writer.safetensors, "npz": writer.npz}[suffix](NX.p))
    with safetensors.read(path, ReadOptions(context_length=64)) as ck:
        c = ck.config
        assert (c.arch, c.n_head, c.n_kv_head, c.n_embd, c.n_ff, c.vocab_size) == ("qwen2", 1, 1, 16, 36, 28)
        assert (c.rope_theta, c.norm_eps, c.rope_pairing, c.context_length) == (1e6, 1e-6, "half", 64)
        assert any("n_head is not stored; took 1" in note for note in ck.source.notes)
        np.testing.assert_array_equal(values(ck, "token_embd.weight"), NX.p["E"])
        np.testing.assert_array_equal(values(ck, "output.weight"), NX.p["Wlm"].T)
        np.testing.assert_array_equal(values(ck, "blk.1.ffn_down.weight"), NX.p["L1.Wd"].T)
        np.testing.assert_array_equal(values(ck, "blk.1.attn_k.bias"), NX.p["L1.bk"])
        assert len(ck.tensors) == len(NX.p)
        found = write(ck, tmp_path / "out.safetensors", version="nx")
        if suffix == "safetensors":
            assert found["out.safetensors"] == path.read_bytes()
        with pytest.raises(UnsupportedError, match="one file"):
            write(ck, tmp_path / "directory", version="nx")
        write(ck, tmp_path / "directory")
        with safetensors.read(tmp_path / "directory", ReadOptions()) as again:
            assert again.config == c
            np.testing.assert_array_equal(values(again, "blk.1.ffn_down.weight"), NX.p["L1.Wd"].T)
        with safetensors.read(tmp_path / "out.safetensors", ReadOptions()) as again:
            assert {n: t.read().tobytes() for n, t in again.tensors.items()} == {
                n: t.read().tobytes() for n, t in ck.tensors.items()
            }
    with safetensors.read(path, ReadOptions(n_head=2)) as ck:
        assert (ck.config.n_head, ck.config.n_kv_head, ck.config.head_dim) == (2, 2, 8)
    assert error_of(safetensors.read, path, options=ReadOptions(n_head=3)) is not None


def test_in_major_weights_tell_what_a_later_reader_needs(tmp_path: Path) -> None:
    with opened(tmp_path, "qwen2") as ck:
        config = replace(ck.config, tied_output=False)
        tensors = ck.tensors | {"output.weight": ck.tensors["token_embd.weight"]}
        write(replace(ck, config=config, tensors=tensors), tmp_path / "w.safetensors", version="nx")
    with safetensors.read(tmp_path / "w.safetensors", ReadOptions()) as again:
        assert again.config == config
        assert_holds(again, EXPECTED["qwen2"] | {"output.weight": EXPECTED["qwen2"]["token_embd.weight"]})


def test_numpys_own_files(tmp_path: Path) -> None:
    arrays = {n: np.asfortranarray(a) if n == "Wlm" else a.astype(np.float64) for n, a in NX.p.items()}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "w.npz", **arrays)
        with safetensors.read(tmp_path / "w.npz", ReadOptions()) as ck:
            np.testing.assert_array_equal(values(ck, "output.weight"), NX.p["Wlm"].T)
            np.testing.assert_array_equal(values(ck, "blk.0.attn_q.weight"), NX.p["L0.Wq"].T)


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", E=np.array([{"a": 1}], object), **{n: a for n, a in NX.p.items() if n != "E"})
    error = error_of(safetensors.read, tmp_path / "w.npz")
    assert isinstance(error, UnsupportedError)
    assert "dtype" in error.what


# ---------------------------------------------------------------- refusals


def test_existing_directories(tmp_path: Path) -> None:
    with opened(tmp_path, "llama") as ck:
        with pytest.raises(OutputError, match="same directory"):
            write(ck, tmp_path / "in")
        (tmp_path / "file").write_bytes(b"x")
        with pytest.raises(OutputError, match="no directory"):
            write(ck, tmp_path / "file")
        put(tmp_path / "old", DIRECTORIES["llama bf16 in shards"] | {"README.md": b"mine"})
        found = write(ck, tmp_path / "old")
    assert found.keys() == {"config.json", "model.safetensors", "README.md"}


def test_a_directory_with_something_in_it_needs_force(tmp_path: Path) -> None:
    from ckptkit.conversion import Options, convert

    source = put(tmp_path / "in", DIRECTORIES["gpt2"])
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    with pytest.raises(OutputError, match="exists already"):
        convert(source, tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    convert(source, tmp_path / "empty", Options(force=True))
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == DIRECTORIES["gpt2"]["model.safetensors"]
    with pytest.raises(OutputError):
        convert(source, source, Options(force=True))
    assert {p.name: p.read_bytes() for p in source.iterdir()} == DIRECTORIES["gpt2"]


def test_nothing_is_left_of_a_directory_that_failed(tmp_path: Path) -> None:
    def full(_lo: int, _hi: int) -> np.ndarray:
        raise OSError(28, "No space left on device")

    with opened(tmp_path, "llama") as ck:
        last = {"output_norm.weight": replace(ck.tensors["output_norm.weight"], rows=full)}
        with pytest.raises(OutputError, match="No space") as e:
            write(replace(ck, tensors=ck.tensors | last), tmp_path / "out")
    assert e.value.path == tmp_path / "out" / "model.safetensors"
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_files_that_mean_nothing_can_be_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(writer.safetensors({"a": np.ones((2, 3), np.float32)}))
    with safetensors.read(path, ReadOptions()) as ck:
        assert (ck.config.arch, list(ck.tensors)) == ("", ["a"])
        assert any("listed" in note for note in ck.source.notes)
    folder = put(tmp_path / "t5", {"config.json": b'{"model_type": "t5"}', "model.safetensors": path.read_bytes()})
    with safetensors.read(folder, ReadOptions()) as ck:
        assert ck.config.arch == "t5"


def test_eight_bit_floats_can_be_listed(tmp_path: Path) -> None:
    arrays = writer.llama_arrays(LLAMA)
    name = "model.layers.0.mlp.up_proj.weight"
    arrays[name] = arrays[name].astype(np.uint8)
    raw = writer.safetensors(arrays, edit={name: {"dtype": "F8_E4M3"}})
    files = DIRECTORIES["llama"] | {"model.safetensors": raw}
    with safetensors.read(put(tmp_path / "in", files), ReadOptions()) as ck:
        assert "F8_E4M3" in ck.config.arch
        assert len(ck.tensors) == len(arrays)


def config_error(folder: Path, arch: str, change: dict[str, Any], remove: str = "") -> CkptError | None:
    files = dict(DIRECTORIES[arch])
    config = json.loads(files["config.json"]) | change
    config.pop(remove, None)
    put(folder / "in", files | {"config.json": json.dumps(config).encode()})
    return error_of(safetensors.read, folder / "in")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_configs_that_cannot_be(tmp_path: Path, arch: str) -> None:
    from ckptkit.formats.hf_config import KEYS

    for ours, key in KEYS[arch].items():
        for value in (-1, 0, 1, 2**31 - 1, 2**70, "x", 2.5, True, [], {}):
            if (ours == "n_kv_head" and value == 1) or (ours == "norm_eps" and value in (1, 2**31 - 1, 2**70, 2.5)):
                continue
            if ours == "context_length" and value in (0, 1, 2**31 - 1) and arch != "gpt2":
                continue  # takes no room; 0 is taken as not stated
            if (ours == "head_dim" and value == 0) or (arch == "gpt2" and ours == "n_head" and value == 1):
                continue
            error = config_error(tmp_path, arch, {key: value})
            if ours == "norm_eps" and value is True:
                assert isinstance(error, FormatError)
            assert error is not None, (key, value)
    other = {"llama": "gelu", "qwen2": "relu", "gpt2": "gelu"}[arch]
    assert config_error(tmp_path, arch, {"hidden_act": other, "activation_function": other}) is not None
    assert config_error(tmp_path, arch, {"quantization_config": {"quant_method": "gptq"}}) is not None
    assert config_error(tmp_path, arch, {"tie_word_embeddings": "yes"}) is not None
    required = [k for o, k in KEYS[arch].items() if o not in ("n_kv_head", "n_ff", "head_dim", "context_length")]
    for key in required:
        assert config_error(tmp_path, arch, {}, remove=key) is not None, key


def test_a_sliding_window_in_use_is_kept_and_does_not_run(tmp_path: Path) -> None:
    from ckptkit import runtime

    files = dict(DIRECTORIES["qwen2"])
    config = json.loads(files["config.json"])
    for used, expected in ((False, 0), (True, 8)):
        changed = json.dumps(config | {"use_sliding_window": used, "sliding_window": 8}).encode()
        with safetensors.read(put(tmp_path / "in", files | {"config.json": changed}), ReadOptions()) as ck:
            assert ck.config.sliding_window == expected
            if used:
                with pytest.raises(UnsupportedError, match="sliding"):
                    runtime.load(ck)


def test_mathematics_we_do_not_have_is_refused(tmp_path: Path) -> None:
    for change in ({"attention_bias": True}, {"mlp_bias": True}, {"partial_rotary_factor": 0.5}):
        assert isinstance(config_error(tmp_path, "llama", change), UnsupportedError)
    for change in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}):
        assert isinstance(config_error(tmp_path, "gpt2", change), UnsupportedError)


@pytest.mark.parametrize(
    "scaling",
    [
        "x", [], {"rope_type": 3}, {"rope_type": "llama3"}, LLAMA31 | {"factor": 0}, LLAMA31 | {"factor": "8"},
        LLAMA31 | {"low_freq_factor": 4.0}, LLAMA31 | {"original_max_position_embeddings": 0}, {"type": "linear"},
        {"full_attention": {"rope_type": "default"}, "rope_type": []},
    ],
    ids=str,
)  # fmt: skip
def test_rope_scalings_that_cannot_be(tmp_path: Path, scaling: Any) -> None:
    assert config_error(tmp_path, "llama", {"rope_scaling": scaling}) is not None


def test_linear_scaling_and_null(tmp_path: Path) -> None:
    files = DIRECTORIES["llama"]
    for value, expected in ((None, None), ({"type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0))):
        config = json.loads(files["config.json"]) | {"rope_scaling": value}
        put(tmp_path / "in", files | {"config.json": json.dumps(config).encode()})
        with safetensors.read(tmp_path / "in", ReadOptions()) as ck:
            assert ck.config.rope_scaling == expected


def index_error(folder: Path, **change: Any) -> CkptError | None:
    files = dict(DIRECTORIES["llama bf16 in shards"])
    index = json.loads(files["model.safetensors.index.json"]) | change
    put(folder / "in", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    return error_of(safetensors.read, folder / "in")


def test_indexes_that_cannot_be(tmp_path: Path) -> None:
    good = json.loads(DIRECTORIES["llama bf16 in shards"]["model.safetensors.index.json"])["weight_map"]
    assert index_error(tmp_path) is None
    first = next(iter(good))
    (tmp_path / "outside.safetensors").write_bytes(DIRECTORIES["llama"]["model.safetensors"])
    bad = ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", "", "config.json", "a\\b.safetensors")
    for where in (*bad, "model-00009-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        assert isinstance(index_error(tmp_path, weight_map=good | {first: where}), FormatError), where
    for weight_map in (None, [], {}, {"a": 1}, good | {"not there": good[first]}):
        assert isinstance(index_error(tmp_path, weight_map=weight_map), FormatError)


def test_broken_files_of_a_directory(tmp_path: Path) -> None:
    folder = put(tmp_path / "in", DIRECTORIES["llama"])
    for name in ("config.json", "model.safetensors"):
        good = DIRECTORIES["llama"][name]
        for data in (
            b"",
            good[: len(good) // 2],
            good[:-2],
            b"\xff" + good,
            b"[" * 100_000,
            b"[]",
            b'{"a":' + b"9" * 5000,
        ):
            (folder / name).write_bytes(data)
            assert error_of(safetensors.read, folder) is not None, (name, data[:20])
        (folder / name).write_bytes(good)
    (folder / "model.safetensors").unlink()
    error = error_of(safetensors.read, folder)
    assert isinstance(error, FormatError)
    assert "pickle" in error.hint


def test_tensors_that_contradict_the_config(tmp_path: Path) -> None:
    arrays = writer.llama_arrays(LLAMA)
    for name, a in {"lm_head.weight": np.ones((29, 17)), "model.norm.weight": np.ones((18, 1))}.items():
        files = writer.directory(arrays | {name: a.astype(np.float32)}, writer.llama_config(LLAMA))
        with pytest.raises(FormatError, match="another shape") as e:
            safetensors.read(put(tmp_path / "in", files), ReadOptions())
        assert e.value.offset is not None


def test_broken_npz(tmp_path: Path) -> None:
    good = writer.npz(NX.p)
    start = good.index(b"\x93NUMPY")
    cases: list[tuple[Any, bytes]] = [(n, good[:n]) for n in range(0, len(good), 61)]
    cases += [(("magic", i), good[:i] + b"?" + good[i + 1 :]) for i in range(start, start + 8)]
    shape = good.index(b"(28, 16)")
    for text in (b"(28, 17)", b"(-8, 16)", b"(28,'x')", b"(28, 99]", b"__import", b"(28,\xff\xff,)", b"(28,16))"):
        cases.append((text, good[:shape] + text + good[shape + 8 :]))
    assert accepted(safetensors.read, tmp_path / "w.npz", cases) == []


def test_detection(tmp_path: Path) -> None:
    good = writer.safetensors(NX.p)
    assert safetensors.detect(tmp_path / "x", good[:4096], len(good))
    assert safetensors.detect(tmp_path / "x.safetensors", b"", 0)
    assert safetensors.detect(tmp_path / "x", writer.npz(NX.p)[:4096], 1)
    assert not safetensors.detect(tmp_path / "x", b"GGUF" + bytes(100), 104)
    assert not safetensors.detect(tmp_path, b"", 0)
    assert safetensors.detect(put(tmp_path / "in", DIRECTORIES["llama"]), b"", 0)

"""What a safetensors directory or file may not be: every refusal names what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import accepted, error_of
from safetensors_models import (
    DIRECTORIES,
    LLAMA,
    LLAMA31,
    NX,
    opened,
    put,
    write,
)

from ckptkit.checkpoint import RopeScaling
from ckptkit.errors import CkptError, FormatError, OutputError, UnsupportedError
from ckptkit.formats import safetensors
from ckptkit.formats.options import ReadOptions
from fixtures.writers import safetensors as writer


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


@pytest.mark.parametrize("type", ["q8_0", "q4_k_m", "iq4_nl", "i8"])
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_types_that_it_has_no_place_for(name: str, type: str, tmp_path: Path) -> None:
    from ckptkit.conversion import Options, convert

    source = put(tmp_path / "in", DIRECTORIES["gpt2"])
    with pytest.raises(UnsupportedError, match="cannot store this type") as e:
        convert(source, tmp_path / name, Options(type=type))
    assert (e.value.expected, e.value.got) == ("f32, f16, bf16, f64", type)
    assert not (tmp_path / name).exists()


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

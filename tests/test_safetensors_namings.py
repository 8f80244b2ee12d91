"""Other namings in safetensors and numpy's files: microgpt's and the Qwen2 trainer's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile import error_of
from safetensors_models import (
    EXPECTED,
    MICROGPT,
    NX,
    assert_holds,
    opened,
    values,
    write,
)

from ckptkit.errors import UnsupportedError
from ckptkit.formats import safetensors
from ckptkit.formats.options import ReadOptions
from fixtures.writers import microgpt as microgpt_writer
from fixtures.writers import safetensors as writer


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

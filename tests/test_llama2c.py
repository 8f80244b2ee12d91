"""llama2.c files, versions 0 to 2, against independent writers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import accepted, cuts, error_of, int_changes

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptError, FormatError, UnsupportedError
from ckptkit.formats import llama2c
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from fixtures import models
from fixtures.models import Model
from fixtures.writers import llama2c as writer

UNTIED = models.llama(31, dim=12, hidden=20)
TIED = models.llama(32, dim=12, hidden=20, tied=True)
FILES = {
    "v0": writer.v0(UNTIED),
    "v0 tied": writer.v0(TIED),
    "v1": writer.v1(UNTIED),
    "v1 tied": writer.v1(TIED),
    "v2": writer.v2(UNTIED),
    "v2 tied": writer.v2(TIED),
    "v2 groups across rows": writer.v2(TIED, group=6),
}
NAMES = {
    "tok_emb": "token_embd.weight", "wcls": "output.weight", "rms_final": "output_norm.weight",
    "rms_att": "attn_norm", "wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output",
    "rms_ffn": "ffn_norm", "w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up",
}  # fmt: skip


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def values(ck: Checkpoint, name: str) -> np.ndarray:
    t = ck.tensors[name]
    assert t.type == QType.F32
    return t.read().view("<f4").reshape(t.shape)


def assert_is(ck: Checkpoint, m: Model) -> None:
    n = 0
    for theirs, a in m.p.items():
        ours = NAMES[theirs]
        for i, layer in [(None, a)] if ours.endswith("weight") else list(enumerate(a)):
            np.testing.assert_array_equal(values(ck, ours if i is None else f"blk.{i}.{ours}.weight"), layer)
            n += 1
    assert len(ck.tensors) == n


@pytest.mark.parametrize("name", FILES)
def test_reads_every_version(tmp_path: Path, name: str) -> None:
    m = TIED if "tied" in name or "across" in name else UNTIED
    with llama2c.read(put(tmp_path / "m.bin", FILES[name]), ReadOptions()) as ck:
        group = 6 if "across" in name else None
        assert_is(ck, writer.dequantised(m, group) if "v2" in name else m)
        c = ck.config
        assert (c.arch, c.n_embd, c.n_ff, c.n_layer, c.n_head, c.n_kv_head) == ("llama", 12, 20, 2, 3, 1)
        assert (c.vocab_size, c.context_length, c.head_dim, c.tied_output) == (29, 16, 4, m is TIED)
        assert (c.norm_eps, c.rope_theta, c.rope_pairing) == (1e-5, 10000.0, "adjacent")
        assert ck.source.version == f"version {name[1]}"


def test_int8_groups_hand_typed(tmp_path: Path) -> None:
    """Two rows of three values in groups of two: values 1..6 with scales 0.5, 2 and 10."""
    path = put(tmp_path / "x", b"??" + bytes([1, 2, 3, 4, 5, 0xFA]) + np.array([0.5, 2, 10], "<f4").tobytes())
    file = llama2c.File(path)
    t = llama2c.from_groups(file, 2, (2, 3), 2, "x")
    assert t.read().view("<f4").tolist() == [[0.5, 1, 6], [8, 50, -60]]
    assert t.rows(1, 2).view("<f4").tolist() == [[8, 50, -60]]
    file.close()


@pytest.mark.parametrize("name", [n for n in FILES if "v2" not in n])
def test_writes_the_same_bytes_back(tmp_path: Path, name: str) -> None:
    source = put(tmp_path / "m.bin", FILES[name])
    with llama2c.read(source, ReadOptions()) as ck:
        [target] = llama2c.targets(ck, WriteOptions())
        assert target.version == name[1]
        stored = write_rows(target.layout, ck.config, ck.tensors)
        paths = llama2c.write(ck, stored, tmp_path / "out.bin", WriteOptions(version=target.version))
    assert paths == (tmp_path / "out.bin",)
    assert paths[0].read_bytes() == source.read_bytes()


@pytest.mark.parametrize("version", ["0", "1"])
def test_other_versions_are_written_on_request(tmp_path: Path, version: str) -> None:
    with llama2c.read(put(tmp_path / "m.bin", writer.v2(UNTIED)), ReadOptions()) as ck:
        [target] = llama2c.targets(ck, WriteOptions(version=version))
        stored = write_rows(target.layout, ck.config, ck.tensors)
        llama2c.write(ck, stored, tmp_path / "out.bin", WriteOptions(version=version))
    expected = {"0": writer.v0, "1": writer.v1}[version](writer.dequantised(UNTIED))
    assert (tmp_path / "out.bin").read_bytes() == expected


def test_version_2_is_not_written(tmp_path: Path) -> None:
    with llama2c.read(put(tmp_path / "m.bin", writer.v2(UNTIED)), ReadOptions()) as ck:
        assert [t.version for t in llama2c.targets(ck, WriteOptions())] == ["0"]
        with pytest.raises(UnsupportedError, match="no such version"):
            llama2c.targets(ck, WriteOptions(version="2"))


@pytest.mark.parametrize(
    "change", [{"norm_eps": 1e-6}, {"rope_theta": 5e5}, {"head_dim": 8}, {"sliding_window": 4}], ids=str
)
def test_what_the_format_has_no_place_for_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with llama2c.read(put(tmp_path / "m.bin", FILES["v1"]), ReadOptions()) as ck:
        stored = write_rows(llama2c.V1, ck.config, ck.tensors)
        other = replace(ck, config=replace(ck.config, **change))
        with pytest.raises(UnsupportedError, match=next(iter(change))):
            llama2c.write(other, stored, tmp_path / "out.bin", WriteOptions(version="1"))
    assert not (tmp_path / "out.bin").exists()


def test_options_override_the_programs_constants(tmp_path: Path) -> None:
    options = ReadOptions(norm_eps=1e-6, rope_theta=500000.0)
    with llama2c.read(put(tmp_path / "m.bin", FILES["v0"]), options) as ck:
        assert (ck.config.norm_eps, ck.config.rope_theta) == (1e-6, 500000.0)
        assert any("rope_theta 500000" in note for note in ck.source.notes)


def test_foreign_rope_tables_are_said(tmp_path: Path) -> None:
    good = bytearray(FILES["v0 tied"])
    with llama2c.read(put(tmp_path / "m.bin", bytes(good)), ReadOptions()) as ck:
        assert not any("RoPE tables" in note for note in ck.source.notes)
    good[-2 * 16 * 2 * 4 + 8 :] = bytes(2 * 16 * 2 * 4 - 8)
    with llama2c.read(put(tmp_path / "m.bin", bytes(good)), ReadOptions()) as ck:
        assert any("RoPE tables" in note for note in ck.source.notes)


def test_detection(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    for data in FILES.values():
        assert llama2c.detect(path, data[:4096], len(data))
    assert not llama2c.detect(path, FILES["v0"][:4096], len(FILES["v0"]) + 1)
    assert not llama2c.detect(path, b"", 0)
    assert not llama2c.detect(path, bytes(4096), 4096)
    assert not llama2c.detect(path, b"\xff" * 4096, 4096)


@pytest.mark.parametrize("name", FILES)
def test_broken_files(tmp_path: Path, name: str) -> None:
    data, version = FILES[name], int(name[1])
    first = llama2c.SIZES_AT[version]
    sizes = range(first, first + 28, 4)
    cases: list[tuple[Any, bytes]] = [*cuts(data, [0, 4, *sizes, first + 28, 36, 37, 41, 256, 300, len(data) // 2])]
    cases += int_changes(data, [*([0, 4] if version else []), *sizes, *([37] if version == 2 else [])])
    read_all_the_same = accepted(llama2c.read, tmp_path / "m.bin", cases)
    # the context takes no room in versions 1 and 2; version 1's magic and number may turn into each other's
    fits = {(first + 24, 1), (first + 24, 2**31 - 1)} if version else set()
    assert set(read_all_the_same) <= fits


def test_a_classifier_the_header_denies_is_named(tmp_path: Path) -> None:
    data = bytearray(FILES["v1"])
    data[36] = 1
    error = error_of(llama2c.read, tmp_path / "m.bin", bytes(data))
    assert isinstance(error, FormatError)
    assert "classifier" in error.hint
    data[36] = 2
    error = error_of(llama2c.read, tmp_path / "m.bin", bytes(data))
    assert isinstance(error, CkptError)
    assert error.offset == 36

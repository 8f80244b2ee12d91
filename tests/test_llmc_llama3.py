"""llm.c's Llama-3 files against independent writers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import accepted, cuts, error_of, int_changes

from ckptkit.checkpoint import Checkpoint, RopeScaling
from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.formats import llmc_llama3
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from fixtures import models
from fixtures.writers import llmc as writer

N_FF = writer.llama3_ffn(18, 1.3, 4)  # 64
MODEL = models.llama(41, hidden=N_FF, seq=64)
FILES = {
    "v3": writer.llama3(MODEL, 3),
    "v5": writer.llama3(MODEL, 5),
    "v3 scaled": writer.llama3(MODEL, 3, scaled_rope=True, multiplier=1.5),
}
PARTS = {
    "attn_norm": "rms_att", "attn_q": "wq", "attn_k": "wk", "attn_v": "wv", "attn_output": "wo",
    "ffn_norm": "rms_ffn", "ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2",
}  # fmt: skip


def opened(folder: Path, name: str, **options: Any) -> Checkpoint:
    path = folder / "m.bin"
    path.write_bytes(FILES[name])
    return llmc_llama3.read(path, ReadOptions(**options))


def bits(a: np.ndarray, type: QType) -> bytes:
    return a.tobytes() if type == QType.F32 else models.bf16_bits(a).tobytes()


@pytest.mark.parametrize("name", FILES)
def test_reads_both_types(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as ck:
        c, type = ck.config, {"v3": QType.F32, "v5": QType.BF16}[name[:2]]
        assert (c.context_length, c.vocab_size, c.n_layer, c.n_head, c.n_kv_head) == (64, 29, 2, 3, 1)
        assert (c.n_embd, c.head_dim, c.n_ff, c.tied_output, c.rope_pairing) == (18, 6, N_FF, False, "adjacent")
        assert {t.type for t in ck.tensors.values()} == {type}
        for i in range(2):
            for ours, theirs in PARTS.items():
                assert ck.tensors[f"blk.{i}.{ours}.weight"].read().tobytes() == bits(MODEL.p[theirs][i], type)
        for ours, theirs in {"token_embd": "tok_emb", "output_norm": "rms_final", "output": "wcls"}.items():
            assert ck.tensors[f"{ours}.weight"].read().tobytes() == bits(MODEL.p[theirs], type)
        assert len(ck.tensors) == 3 + 2 * len(PARTS)


def test_feed_forward_width_is_not_what_the_truncated_header_gives(tmp_path: Path) -> None:
    assert writer.llama3_ffn(18, 1.0, 4) == 48 != N_FF
    with opened(tmp_path, "v3") as ck:
        assert ck.config.n_ff == N_FF
        assert any("n_ff" in note for note in ck.source.notes)


def test_epsilon_is_assumed_and_can_be_given(tmp_path: Path) -> None:
    with opened(tmp_path, "v3") as ck:
        assert ck.config.norm_eps == 1e-5
        assert any("norm_eps is not stored" in note for note in ck.source.notes)
    with opened(tmp_path, "v3", norm_eps=1e-6, rope_theta=1e4) as ck:
        assert (ck.config.norm_eps, ck.config.rope_theta) == (1e-6, 1e4)


def test_scaled_rope_is_llama_31s(tmp_path: Path) -> None:
    with opened(tmp_path, "v3") as ck:
        assert ck.config.rope_scaling is None
    with opened(tmp_path, "v3 scaled") as ck:
        assert ck.config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", FILES)
def test_writes_the_same_bytes_back(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, name) as ck:
        target = llmc_llama3.targets(ck, WriteOptions())[0]
        assert (target.version, target.mixture) == {"v3": ("3", "f32"), "v5": ("5", "bf16")}[name[:2]]
        stored = write_rows(target.layout, ck.config, ck.tensors)
        llmc_llama3.write(ck, stored, tmp_path / "out.bin", WriteOptions(version=target.version))
    assert (tmp_path / "out.bin").read_bytes() == FILES[name]


def test_header_of_a_model_from_elsewhere_agrees_with_its_width(tmp_path: Path) -> None:
    with opened(tmp_path, "v3") as ck:
        ck = replace(ck, source=replace(ck.source, metadata={}))
        stored = write_rows(llmc_llama3.LAYOUT, ck.config, ck.tensors)
        llmc_llama3.write(ck, stored, tmp_path / "out.bin", WriteOptions(version="3"))
    assert (tmp_path / "out.bin").read_bytes()[1024:] == FILES["v3"][1024:]
    with llmc_llama3.read(tmp_path / "out.bin", ReadOptions()) as ck:
        assert ck.config.n_ff == N_FF


@pytest.mark.parametrize(
    "change",
    [{"norm_eps": 1e-6}, {"rope_theta": 1e4 + 0.5}, {"head_dim": 8}, {"rope_scaling": RopeScaling("linear", 2.0)}],
    ids=lambda c: next(iter(c)),
)
def test_what_the_format_has_no_place_for_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with opened(tmp_path, "v3") as ck:
        stored = write_rows(llmc_llama3.LAYOUT, ck.config, ck.tensors)
        other = replace(ck, config=replace(ck.config, **change))
        with pytest.raises(UnsupportedError, match=next(iter(change))):
            llmc_llama3.write(other, stored, tmp_path / "out.bin", WriteOptions(version="3"))
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_state_is_told_from_a_model_though_its_batch_looks_like_a_version(tmp_path: Path, batch: int) -> None:
    ids = np.zeros((batch, 4), np.int32)
    data = writer.debug_state(ids, ids, np.zeros((batch, 4, 29), np.float32), 3.0, [], magic=writer.LLAMA3)
    error = error_of(llmc_llama3.read, tmp_path / "s.bin", data)
    assert isinstance(error, UnsupportedError)
    assert "debug state" in error.what
    assert "--state" in error.hint


def test_detection(tmp_path: Path) -> None:
    assert llmc_llama3.detect(tmp_path, FILES["v5"][:4096], 1)
    assert not llmc_llama3.detect(tmp_path, writer.gpt2(models.gpt2(), 3)[:4096], 1)
    assert not llmc_llama3.detect(tmp_path, b"", 0)


@pytest.mark.parametrize("name", FILES)
def test_broken_files(tmp_path: Path, name: str) -> None:
    data = FILES[name]
    cases: list[tuple[Any, bytes]] = [*cuts(data, [0, 4, 8, 512, 1024, 1100, len(data) // 2])]
    cases += int_changes(data, [4 * slot for slot in range(13)])
    fits = {  # what takes no room and may be
        *((8, v) for v in (1, 2**31 - 1)),  # context
        *((32, v) for v in (-1, 0, 1, 2**31 - 1)),  # the multiplier, cut off anyway
        (20, 1),  # one head, and a narrower feed-forward: adds up as well
        (36, 1),  # every width is a multiple of 1
        *((40, v) for v in (0, 1, 2**31 - 1)),  # an epsilon that was not cut off
        *((44, v) for v in (0, 1, 2**31 - 1)),  # RoPE base; 0 is taken as not stored
        *((48, v) for v in (0, 1)),
    }
    assert set(accepted(llmc_llama3.read, tmp_path / "m.bin", cases)) <= fits


def test_other_magic_numbers_are_refused(tmp_path: Path) -> None:
    error = error_of(llmc_llama3.read, tmp_path / "m.bin", writer.gpt2(models.gpt2(), 3))
    assert isinstance(error, FormatError)
    assert error.offset == 0

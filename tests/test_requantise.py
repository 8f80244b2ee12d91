"""GGUF to GGUF: types as llama-quantize chooses them from F16 and BF16 files, bytes as its encoders make them."""

from __future__ import annotations

from pathlib import Path

import gguf as judge
import libgguf
import numpy as np
import pytest

import ckptkit
from ckptkit.errors import CkptError
from fixtures.make import BPE, SPM
from fixtures.models import gpt2, llama
from fixtures.writers import gguf

# by llama-quantize's rules: matrices called *weight are quantised, output or tied embedding better in K mixtures,
# positions, norms and biases keep the type they have
MIXTURES = {"q8_0": ("Q8_0", "Q8_0"), "q4_k_m": ("Q4_K", "Q6_K"), "q6_k": ("Q6_K", "Q6_K"), "f16": ("F16", "F16"),
            "bf16": ("BF16", "BF16"), "f32": ("F32", "F32")}  # fmt: skip
IN_Q4_K_M = {f"blk.1.{part}.weight": "Q6_K" for part in ("attn_v", "attn_qkv", "ffn_down")}  # the last eighth of layers


def source(arch: str, kind: str, path: Path) -> None:
    """A file whose matrices, positions too, are all of one type."""
    if arch == "gpt2":
        m = gpt2(channels=256, n_head=4)
        stored = gguf.gpt2_tensors(m, kind)
        stored["position_embd.weight"] = (stored["position_embd.weight"][0], kind)
        path.write_bytes(gguf.gguf(gguf.gpt2_keys(m) + BPE, stored))
    else:
        m = llama(10, dim=256, hidden=512, vocab=270, n_head=4, n_kv_head=2)
        path.write_bytes(gguf.gguf(gguf.llama_keys(m) + SPM, gguf.llama_tensors(m, kind)))


def expected(name: str, arch: str, old: str, mixture: str) -> str:
    base, better = MIXTURES[mixture]
    if not name.endswith(".weight") or "norm" in name:
        return "F32"
    if name == "position_embd.weight":
        return old
    if name == ("token_embd.weight" if arch == "gpt2" else "output.weight"):
        return better
    return IN_Q4_K_M.get(name, base) if mixture == "q4_k_m" else base


def values(t: judge.ReaderTensor) -> np.ndarray:
    kind = t.tensor_type.name
    if kind == "BF16":
        return (t.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return t.data.astype(np.float32)


def encoded(rows: np.ndarray, kind: str) -> bytes:
    if kind in ("F32", "F16"):
        return rows.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()
    if kind == "BF16":
        return gguf.encode(rows, "bf16")
    return np.asarray(
        libgguf.quantize_rows(np.ascontiguousarray(rows), int(judge.GGMLQuantizationType[kind]))
    ).tobytes()


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("old", ["f16", "bf16"])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_types_and_bytes(arch: str, old: str, mixture: str, tmp_path: Path) -> None:
    path, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    source(arch, old, path)
    ckptkit.convert(path, out, type=mixture)
    before = {t.name: t for t in judge.GGUFReader(path).tensors}
    after = judge.GGUFReader(out).tensors
    assert [t.name for t in after] == list(before)
    for t in after:
        kind = expected(t.name, arch, old.upper(), mixture)
        assert t.tensor_type.name == kind, t.name
        assert t.data.tobytes() == encoded(values(before[t.name]), kind), t.name


@pytest.mark.parametrize("old", ["f16", "bf16"])
def test_a_copy_keeps_every_type(old: str, tmp_path: Path) -> None:
    path, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    source("gpt2", old, path)
    ckptkit.convert(path, out)
    for a, b in zip(judge.GGUFReader(path).tensors, judge.GGUFReader(out).tensors, strict=True):
        assert (a.name, a.tensor_type, a.data.tobytes()) == (b.name, b.tensor_type, b.data.tobytes())


@pytest.mark.parametrize("mixture", ["q8_0", "q4_k_m", "q6_k"])
def test_a_type_that_no_row_allows_is_one_error(mixture: str, fixtures_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as e:
        ckptkit.convert(fixtures_dir / "gguf" / "llama.gguf", tmp_path / "out.gguf", type=mixture)
    assert "rows of 12, 20" in str(e.value)
    assert "llama.gguf" in str(e.value)
    assert list(tmp_path.iterdir()) == []

"""A model against llm.c's debug state: the original program's numbers, and faults that only the logits can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ckptkit import formats
from ckptkit.cli import cli
from ckptkit.errors import CkptError
from ckptkit.verify import StateReport, verify_state
from fixtures import make, models
from fixtures.models import Array, Model
from fixtures.writers import gguf, llmc


def verified(model: Path, state: Path) -> StateReport:
    with formats.open(model) as ck:
        return verify_state(ck, state)


def test_the_original_programs_state_verifies_its_model(shared: Path) -> None:
    r = verified(shared / "gpt2_tiny.bin", shared / "gpt2_tiny_debug_state.bin")
    assert r.ok
    assert r.loss == pytest.approx(2.995784, abs=1e-6)
    assert r.loss_stored == pytest.approx(2.995784, abs=1e-6)
    assert r.max_error < 2e-4


def test_the_bf16_model_is_refused_and_by_how_much_is_said(shared: Path) -> None:
    r = verified(shared / "gpt2_tiny_bf16.bin", shared / "gpt2_tiny_debug_state.bin")
    with np.load(shared / "gpt2_tiny_bf16.ref.npz") as narrow, np.load(shared / "gpt2_tiny_fp32.ref.npz") as wide:
        by_judge = float(np.abs(narrow["logits_row0"].astype("f8") - wide["logits_row0"]).max())
    assert not r.ok
    assert r.max_error >= by_judge - 2e-4  # the judges' rows are the first sequence of four
    assert r.max_error > 100 * r.limit
    assert any("BF16" in note for note in r.notes)
    out = CliRunner().invoke(cli, ["verify", *map(str, (r.model, "--state", r.state))])
    assert out.exit_code == 1
    assert f"max |d| {r.max_error:.3g} (limit 0.001)" in out.output


@pytest.mark.parametrize("name", ["llmc/gpt2_v3", "llmc_llama3/llama3_v3"])
def test_fixtures_verify(fixtures_dir: Path, name: str) -> None:
    r = verified(fixtures_dir / f"{name}.bin", fixtures_dir / f"{name}_debug_state.bin")
    assert r.ok
    assert r.causes == ()
    assert r.max_error < 2e-5


def test_a_conversion_verifies_against_the_state_of_its_source(fixtures_dir: Path) -> None:
    assert verified(fixtures_dir / "gguf/gpt2.gguf", fixtures_dir / "llmc/gpt2_v3_debug_state.bin").ok


def llama3(m: Model = make.LLAMA3, *, theta: float = make.LLAMA3_THETA, **changes: Array) -> bytes:
    return llmc.llama3(Model(m.dims, m.p | changes), 3, theta=theta)


def as_gguf(change: Callable[[dict], dict] | None = None, eps: float = 1e-5) -> bytes:
    tensors = gguf.llama_tensors(make.LLAMA3)
    return gguf.gguf(
        gguf.llama_keys(make.LLAMA3, theta=make.LLAMA3_THETA, eps=eps), change(tensors) if change else tensors
    )


def gpt2(**changes: Array) -> bytes:
    return llmc.gpt2(Model(make.GPT2.dims, make.GPT2.p | changes), 3)


def turned(w: Array) -> Array:
    return np.ascontiguousarray(w.swapaxes(1, 2))


P3, P2 = make.LLAMA3.p, make.GPT2.p
FAULTS = {
    "pairing": ("llama", llama3(models.half_paired(make.LLAMA3)), "rope_pairing"),
    "base": ("llama", llama3(theta=10000.0), "rope_base"),
    "gate and up": ("llama", llama3(w1=P3["w3"], w3=P3["w1"]), "gate_up"),
    "transpose": ("llama", llama3(wo=turned(P3["wo"])), "transpose"),
    "transpose of all": ("llama", llama3(wo=turned(P3["wo"]), wq=turned(P3["wq"])), "transpose"),
    "eps": ("llama", as_gguf(eps=1e-2), "norm_eps"),
    "transpose in gpt2": ("gpt2", gpt2(attprojw=turned(P2["attprojw"])), "transpose"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_by_the_logits_alone(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    arch, data, key = FAULTS[name]
    path = tmp_path / ("m.gguf" if data[:4] == b"GGUF" else "m.bin")
    path.write_bytes(data)
    folder = {"llama": "llmc_llama3/llama3_v3", "gpt2": "llmc/gpt2_v3"}[arch]
    r = verified(path, fixtures_dir / f"{folder}_debug_state.bin")
    assert not r.ok
    assert [c.key for c in r.causes] == [key]


def test_a_fault_that_no_repair_undoes_has_no_cause(fixtures_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(gpt2(wpe=P2["wpe"] * np.float32(1.25)))
    r = verified(path, fixtures_dir / "llmc/gpt2_v3_debug_state.bin")
    assert not r.ok
    assert r.causes == ()


def test_states_of_other_models_are_refused(fixtures_dir: Path) -> None:
    with pytest.raises(CkptError, match="architecture"):
        verified(fixtures_dir / "llmc/gpt2_v3.bin", fixtures_dir / "llmc_llama3/llama3_v3_debug_state.bin")
    with pytest.raises(CkptError):
        verified(fixtures_dir / "llmc/gpt2_v3.bin", fixtures_dir / "llmc/gpt2_v3.bin")

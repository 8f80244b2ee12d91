"""Debug states of llm.c: from independent writers, and from llm.c itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import accepted, cuts, int_changes

from ckptkit.checkpoint import Config
from ckptkit.errors import CkptError, FormatError, UnsupportedError
from ckptkit.formats import llmc, llmc_state
from ckptkit.formats.options import ReadOptions
from fixtures import models
from fixtures.writers import llmc as writer

GPT2 = models.gpt2(71, n_layer=1)
LLAMA = models.llama(72, hidden=64, n_layer=1)
X = models.Bits(73).ids(6, 29).reshape(2, 3)
Y = models.Bits(74).ids(6, 29).reshape(2, 3)
LOGITS = models.Bits(75).spread(2, 3, 29, scale=4.0)
GPT2_CONFIG = Config(
    "gpt2", context_length=16, vocab_size=29, n_layer=1, n_head=3, n_kv_head=3, n_embd=18, n_ff=72, head_dim=6,
    tied_output=True,
)  # fmt: skip
LLAMA_CONFIG = Config(
    "llama", context_length=16, vocab_size=29, n_layer=1, n_head=3, n_kv_head=1, n_embd=18, n_ff=64, head_dim=6
)


def gpt2_grads(padded: bool) -> list[np.ndarray]:
    p = GPT2.p | {"wte": writer.padded(GPT2.p["wte"], 128)} if padded else GPT2.p
    return [p[name] for name in writer.GPT2_ORDER]


STATES = {
    "gpt2 v2": (writer.debug_state(X, Y, LOGITS, 3.25, gpt2_grads(True)), GPT2_CONFIG),
    "gpt2 v1": (writer.debug_state(X, Y, LOGITS, 3.25, gpt2_grads(False), version=1), GPT2_CONFIG),
    "llama": (
        writer.debug_state(X, Y, LOGITS, 3.25, list(writer.llama3_arrays(LLAMA).values()), magic=writer.LLAMA3),
        LLAMA_CONFIG,
    ),
}


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", STATES)
def test_reads_batch_logits_loss_and_gradients(tmp_path: Path, name: str) -> None:
    data, config = STATES[name]
    assert llmc_state.is_state(data[:4096])
    with llmc_state.read(put(tmp_path / "s", data), config) as state:
        np.testing.assert_array_equal(state.x, X)
        np.testing.assert_array_equal(state.y, Y)
        assert state.loss == 3.25
        for b in range(2):
            np.testing.assert_array_equal(state.logits(b), LOGITS[b])
        up = LLAMA.p["w3"][0] if name == "llama" else GPT2.p["fcw"][0]
        assert state.grads["blk.0.ffn_up.weight"].read().tobytes() == up.tobytes()
        last = LLAMA.p["wcls"] if name == "llama" else GPT2.p["lnfb"]
        assert (
            state.grads["output.weight" if name == "llama" else "output_norm.bias"].read().tobytes() == last.tobytes()
        )
        assert ("token_embd.padding" in state.grads) == (name == "gpt2 v2")


def test_state_of_the_original_program(shared: Path) -> None:
    with (
        llmc.read(shared / "gpt2_tiny.bin", ReadOptions()) as ck,
        llmc_state.read(shared / "gpt2_tiny_debug_state.bin", ck.config) as state,
        np.load(shared / "gpt2_tiny_fp32.ref.npz") as ref,
    ):
        assert state.version == "version 2"
        np.testing.assert_array_equal(state.x, ref["x"])
        np.testing.assert_array_equal(state.y, ref["y"])
        assert state.loss == pytest.approx(2.995784, abs=1e-6)
        np.testing.assert_allclose(state.logits(0), ref["logits_row0"], atol=2e-4)
        n = sum(t.nbytes for t in state.grads.values())
        assert n == (shared / "gpt2_tiny.bin").stat().st_size - 1024


def test_models_are_not_states() -> None:
    assert not llmc_state.is_state(writer.gpt2(GPT2, 3))
    assert not llmc_state.is_state(writer.llama3(LLAMA, 3))
    assert not llmc_state.is_state(b"")


def test_states_of_other_models_are_refused(tmp_path: Path) -> None:
    data, config = STATES["gpt2 v2"]
    path = put(tmp_path / "s", data)
    with pytest.raises(UnsupportedError, match="another architecture"):
        llmc_state.read(path, LLAMA_CONFIG)
    for change in ({"vocab_size": 28}, {"vocab_size": 31}, {"n_embd": 24}, {"n_layer": 2}, {"context_length": 2}):
        with pytest.raises(CkptError):
            llmc_state.read(path, replace(config, **change))
    with pytest.raises(FormatError, match="not a debug state"):
        llmc_state.read(put(tmp_path / "m", writer.llama3(LLAMA, 3)), LLAMA_CONFIG)


@pytest.mark.parametrize("name", STATES)
def test_broken_states(tmp_path: Path, name: str) -> None:
    data, config = STATES[name]
    slots = [0, 4, 8, 12] if "gpt2" in name else [0, 4, 8]
    cases: list[tuple[Any, bytes]] = [*cuts(data, [0, 4, 8, 16, 1024, 1024 + 24, 1024 + 48, 1200, len(data) // 2])]
    cases += int_changes(data, [*slots, 1024, 1024 + 24])

    def read(path: Path, _options: ReadOptions) -> Any:
        return llmc_state.read(path, config)

    ids = {(at, v) for at in (1024, 1048) for v in (0, 1)}
    assert set(accepted(read, tmp_path / "s", cases)) <= ids

"""Archs and layouts on models in memory: neutral filling, refusals, pairing, and every layout row both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit.arch import ARCHS, as_arch, check_model, is_neutral, template, with_pairing
from ckptkit.checkpoint import Checkpoint, Config, RopeScaling, Source
from ckptkit.errors import FormatError, LossyError, UnsupportedError
from ckptkit.formats import FORMATS, by_name
from ckptkit.layout import pack, places, read_named, stored_shape, unpack, write_rows
from ckptkit.quant.types import QType
from ckptkit.tensor import constant, from_array

SIZES = {
    "context_length": 7, "vocab_size": 11, "n_layer": 2, "n_head": 3, "n_kv_head": 1, "n_embd": 12, "n_ff": 20,
    "head_dim": 4,
}  # fmt: skip


def model(arch: str, **changes: object) -> Checkpoint:
    """A checkpoint with every tensor of an arch, each value different."""
    rope = {"rope_pairing": "adjacent"} if ARCHS[arch].position == "rope" else {}
    sizes = SIZES | ({} if rope else {"n_kv_head": 3})
    config = Config(arch, **{**sizes, **rope, **changes})  # type: ignore[arg-type]
    rng = np.random.default_rng(5)
    tensors = {
        name: from_array(rng.standard_normal(shape).astype(np.float32), QType.F32)
        for name, shape, _ in ARCHS[arch].names(config)
        if name != "rope_freqs.weight" and not (config.tied_output and name == "output.weight")
    }
    return Checkpoint(config, tensors, None, Source((Path("memory"),), "test"))


def array(ck: Checkpoint, name: str) -> np.ndarray:
    return ck.tensors[name].read().view(np.float32).reshape(ck.tensors[name].shape)


def test_llama_as_qwen2_gets_zero_biases_and_loses_nothing() -> None:
    ck, done = as_arch(model("llama"), "qwen2")
    assert ck.config.arch == "qwen2"
    assert not array(ck, "blk.1.attn_q.bias").any()
    assert set(model("llama").tensors) < set(ck.tensors)
    assert "6 tensors" in done[0]
    back, done = as_arch(ck, "llama")
    assert list(back.tensors) == list(model("llama").tensors)
    assert "left out" in done[0]


def test_qwen2_with_biases_does_not_become_llama_unless_told() -> None:
    ck = model("qwen2")
    with pytest.raises(LossyError, match="6 tensors"):
        as_arch(ck, "llama")
    biases = [f"blk.{{i}}.attn_{p}.bias" for p in "qkv"]
    assert "blk.0.attn_q.bias" not in as_arch(ck, "llama", biases)[0].tensors


@pytest.mark.parametrize(("source", "target", "trait"), [("microgpt", "llama", "act"), ("gpt2", "llama", "norm")])
def test_other_mathematics_is_refused_by_trait(source: str, target: str, trait: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        as_arch(model(source), target)
    assert e.value.at == trait


def test_pairing_permutes_q_and_k_of_every_head_and_nothing_else() -> None:
    ck = model("qwen2")
    half = with_pairing(ck, "half")
    for name in ck.tensors:
        old, new = array(ck, name), array(half, name)
        if template(name) in (
            "blk.{i}.attn_q.weight",
            "blk.{i}.attn_k.bias",
            "blk.{i}.attn_k.weight",
            "blk.{i}.attn_q.bias",
        ):
            for h in range(len(old) // 4):
                np.testing.assert_array_equal(new[4 * h : 4 * h + 4], old[4 * h : 4 * h + 4][[0, 2, 1, 3]])
        else:
            np.testing.assert_array_equal(new, old)
    back = with_pairing(half, "adjacent")
    assert all(np.array_equal(array(back, n), array(ck, n)) for n in ck.tensors)


def test_neutral_is_found_by_reading() -> None:
    assert is_neutral("a.bias", constant((5,), 0.0))
    assert not is_neutral("a.bias", from_array(np.array([0, 0, 1e-30], np.float32), QType.F32))
    assert is_neutral("attn_norm.weight", constant((5,), 1.0, QType.BF16))
    assert not is_neutral("ffn_up.weight", constant((5, 5), 0.0))


@pytest.mark.parametrize("change", ["missing", "shape", "extra"])
def test_a_model_that_is_not_its_arch_is_refused_by_tensor(change: str) -> None:
    ck = model("llama")
    tensors = dict(ck.tensors)
    name = "blk.1.ffn_up.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = constant((3, 3), 0.0)
    else:
        name = "blk.0.moe.weight"
        tensors[name] = constant((3, 3), 0.0)
    with pytest.raises(UnsupportedError) as e:
        check_model(replace(ck, tensors=tensors))
    assert name in str(e.value)


@pytest.mark.parametrize("field", [f for f in SIZES])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_impossible_sizes_are_named(field: str, value: int) -> None:
    with pytest.raises(FormatError, match=field):
        Config("llama", **{**SIZES, field: value}).check(Path("f"))


LAYOUTS = [(m.NAME, arch, layout) for m in map(by_name, FORMATS) for arch, layout in m.LAYOUTS.items()]


@pytest.mark.parametrize(("name", "arch", "layout"), LAYOUTS, ids=[f"{n}-{a}" for n, a, _ in LAYOUTS])
def test_every_layout_reads_what_it_writes(name: str, arch: str, layout) -> None:
    ck = model(arch, **({"tied_output": True} if layout.tied else {}))
    n_padding = 3 if any(r.padded for r in layout.rows) else 0
    stored = write_rows(layout, ck.config, ck.tensors, n_padding)
    if all(row.theirs for row in layout.rows):
        back = read_named(layout, ck.config, stored.get)
    else:
        back = {}
        for (stored_name, t), place in zip(
            stored.items(), places(layout, ck.config, 0, QType.F32, n_padding)[0], strict=True
        ):
            assert t.shape == place.shape == stored_shape(place.row, ck.config, n_padding), stored_name
            back.update(unpack(place.row, ck.config, t, place.index))
    held = layout.holds()
    for ours, t in ck.tensors.items():
        if template(ours) in held:
            np.testing.assert_array_equal(back[ours].read(), t.read(), err_msg=f"{name} {ours}")


def test_padding_rows_are_kept_apart() -> None:
    row = next(r for r in by_name("llmc").LAYOUTS["gpt2"].rows if r.padded)
    ck = model("gpt2", tied_output=True)
    rows = np.full((2, 12), 9, np.float32)
    t = pack(row, {**ck.tensors, row.padded: from_array(rows, QType.F32)}, None, 2)
    assert t is not None
    assert t.shape == (13, 12)
    parts = dict(unpack(row, ck.config, t, None))
    np.testing.assert_array_equal(parts[row.padded].read().view(np.float32), rows)


def test_llama31_factors_are_the_published_rule() -> None:
    """Frequencies of long waves divided by 8, short ones kept, a smooth passage between (Llama 3.1)."""
    factors = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192).factors(128, 500000.0)
    expected = []
    for k in range(64):
        wave = 2 * np.pi * 500000.0 ** (2 * k / 128)
        if wave < 8192 / 4:
            expected.append(1.0)
        elif wave > 8192:
            expected.append(8.0)
        else:
            s = (8192 / wave - 1) / 3
            expected.append(1 / ((1 - s) / 8 + s))
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    assert factors[0] == 1
    assert factors[-1] == 8

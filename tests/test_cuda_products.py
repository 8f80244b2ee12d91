"""CUDA kernels around matrix products, on the simulated card against float64: weights of every type at odd sizes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cudasim.driver import simulated

from benchmarks import gpu_check
from ckptkit.quant.encode import decode_rows
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime import cuda_plan, cuda_products
from ckptkit.runtime import kernels_cuda as k
from ckptkit.runtime.cuda_layout import LAYOUTS
from ckptkit.runtime.cuda_plan import PIECE, Cut, Decode
from ckptkit.runtime.cuda_products import rounding
from ckptkit.runtime.weights import Norm
from ckptkit.tensor import from_array

TYPES = sorted(LAYOUTS)
IDS = [t.name for t in TYPES]
SIZES = {1: ((1, 31), (9, 33), (5, 100)), 32: ((1, 32), (5, 96), (3, 160)), 256: ((1, 256), (3, 512), (5, 256))}
CASES = [
    ("rms", "", 1), ("layer", "gelu_tanh", 2), ("", "add", 2), ("rms", "silu_gate", 1), ("", "relu", 1),
    ("layer", "picked", 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer threads than a card would want."""
    monkeypatch.setattr(k, "Norm", partial(cuda_plan.Norm, threads=32))
    for name in ("Norm", "Finish", "Decode"):
        monkeypatch.setattr(cuda_products, name, partial(getattr(cuda_plan, name), threads=32))


@pytest.fixture(params=[(9, 0), (7, 5)], ids=["sm_90", "sm_75"])
def card(request: pytest.FixtureRequest):
    """sm_90 launches kernels while the one ahead runs."""
    with simulated(capability=request.param):
        yield


def check(finding: gpu_check.Finding) -> None:
    assert finding.ok, finding


@pytest.mark.parametrize("kind,act,n", CASES)  # noqa: PT006
@pytest.mark.parametrize("type", TYPES, ids=IDS)
def test_products_of_few_tokens(monkeypatch: pytest.MonkeyPatch, type: QType, kind, act, n) -> None:
    """The cut is small, so that blocks have more outputs than threads, rows several segments, and rests."""
    at = CASES.index((kind, act, n)) + TYPES.index(type)
    lanes, segments, unroll = ((4, 1, 2), (8, 2, 1), (16, 1, 3), (32, 1, 1), (8, 4, 4), (4, 2, 1))[at % 6]
    monkeypatch.setattr(k, "cut", lambda *_: Cut(32, 1, lanes, segments, unroll, 1 + at // 2 % 2))
    n_rows, n_in = SIZES[BLOCKS[type].elements][at % 3]
    with simulated(capability=((9, 0), (7, 5))[at % 2]):  # sm_90 launches kernels while the one ahead runs
        check(gpu_check.product(np.random.default_rng(at), type, n_rows, n_in, kind, act, n))


@pytest.mark.parametrize("type", TYPES, ids=IDS)
def test_products_as_they_are_cut(type: QType) -> None:
    with simulated(processors=2):
        check(gpu_check.product(np.random.default_rng(0), type, 3, 256, "layer", "silu_gate", 1))
        check(gpu_check.product(np.random.default_rng(0), type, 7, 256, "rms", "", 1))


def test_more_outputs_than_threads_and_more_activations_than_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated():
        monkeypatch.setattr(k, "cut", lambda *_: Cut(32, 1, 8, 1, 2))
        check(gpu_check.product(np.random.default_rng(0), QType.F32, 70, 9, "rms", "silu_gate", 1))
        check(gpu_check.product(np.random.default_rng(0), QType.BF16, 70, 9, "", "add", 1))
        check(gpu_check.product(np.random.default_rng(0), QType.Q4_0, 2, 2080, "", "relu", 1))
        check(gpu_check.product(np.random.default_rng(0), QType.F16, 2, 1100, "layer", "gelu_tanh", 1))


def test_rows_of_several_types_follow_each_other() -> None:
    rng = np.random.default_rng(1)
    parts = [gpu_check.matrix(rng, t, rows, 256) for t, rows in ((QType.Q4_K, 3), (QType.Q6_K, 2), (QType.F16, 3))]
    w = np.concatenate([values for _, values in parts])
    bias = [rng.standard_normal(len(values)).astype(np.float32) for _, values in parts]
    with simulated():
        weight = k.place([t for t, _ in parts], [from_array(b, QType.F32) for b in bias])
        for n in (1, 17):
            x = rng.standard_normal((n, 256)).astype(np.float32)
            out = gpu.upload(np.full((n, 8), np.nan, np.float32))
            k.norm_linear(out, gpu.upload(x), None, weight, gpu_check.batch(gpu_check.work()))
            want = x @ w.T + np.concatenate(bias)
            check(gpu_check.compare("stacked", gpu.download(out), want, 3e-6))


@pytest.mark.parametrize("kind,act,n", [("rms", "silu_gate", 17), ("", "add", 18), ("layer", "gelu_tanh", 19)])  # noqa: PT006
@pytest.mark.parametrize("type", TYPES, ids=IDS)
def test_products_of_many_tokens(type: QType, kind: str, act: str, n: int) -> None:
    n_rows, n_in = SIZES[BLOCKS[type].elements][1]
    with simulated():
        check(gpu_check.product(np.random.default_rng(n), type, n_rows, n_in, kind, act, n))


@pytest.mark.parametrize("type", TYPES, ids=IDS)
def test_fast_products_of_many_tokens(type: QType) -> None:
    """Both sides rounded to 11 bits at least, 8 with bf16: so the sum of 96 products errs by so much of a typical
    one."""
    rng, n = np.random.default_rng(3), 17
    n_rows, n_in = SIZES[BLOCKS[type].elements][1]
    t, w = gpu_check.matrix(rng, type, n_rows, n_in)
    x, gain = rng.standard_normal((n, n_in)).astype(np.float32), rng.uniform(0.5, 1.5, n_in).astype(np.float32)
    with simulated():
        out = gpu.upload(np.full((n, n_rows), np.nan, np.float32))
        norm = Norm("rms", gpu.upload(gain), None, 1e-5)
        k.norm_linear(out, gpu.upload(x), norm, k.place([t], None), gpu_check.batch(gpu_check.work(fast=True)))
        got = gpu.download(out)
    want = gpu_check.reference_norm(x, "rms", gain, None, 1e-5) @ w.T
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < (1e-2 if type == QType.BF16 else 1e-3)
    assert error > 1e-6, "nothing was rounded"


@pytest.mark.parametrize("to", [QType.F32, QType.F16, QType.BF16])
@pytest.mark.parametrize("type", [t for t in TYPES if t != QType.F32], ids=[n for n in IDS if n != "F32"])
def test_split_blocks_decode_to_what_was_stored(type: QType, to: QType) -> None:
    rng = np.random.default_rng(2)
    n_rows, n_in = SIZES[BLOCKS[type].elements][1]
    t, _ = gpu_check.matrix(rng, type, n_rows, n_in)
    want = decode_rows(t.read(), type).astype(np.float64)
    pieces = 2 if to == rounding(type, False)[0] and rounding(type, False)[2] == 2 else 1
    with simulated():
        part = k.place([t], None).parts[0]
        size = 4 if to == QType.F32 else 2
        out = gpu.upload(np.full((pieces, n_rows, n_in * size), 255, np.uint8))
        rest = gpu.Address(out.address + n_rows * n_in * size if pieces == 2 else 0)
        gpu.launch(Decode(type, n_in, to, pieces), (n_rows, 1, 1), [out, rest, *part.planes])
        raw = gpu.download(out)
    if to == QType.BF16:
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        values = raw.view(np.float32 if to == QType.F32 else np.float16).astype(np.float64)
    got = values[0] + (values[1] / (PIECE if to == QType.F16 else 1) if pieces == 2 else 0)
    bits = {QType.F32: 23, QType.F16: 11, QType.BF16: 8}[to] * pieces
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0 ** (1 - bits) * np.abs(want).max())


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("type", TYPES, ids=IDS)
def test_embedding(type: QType) -> None:
    rng, width = np.random.default_rng(5), {1: 33, 32: 96, 256: 512}[BLOCKS[type].elements]
    t, w = gpu_check.matrix(rng, type, 7, width)
    tokens, pos = [6, 0, 3], [4, 0, 2]
    positions = rng.standard_normal((5, width)).astype(np.float32)
    batch = gpu_check.batch(gpu_check.work(), tokens=tokens, pos=pos)
    table = k.place_rows(t)
    for learned in (positions, None):
        out = gpu.upload(np.full((3, width), np.nan, np.float32))
        k.embed(out, table, None if learned is None else gpu.upload(learned), batch)
        want = w[tokens] + (0 if learned is None else learned[pos])
        np.testing.assert_allclose(gpu.download(out), want, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [1, 31, 33, 300])
def test_norm(kind: str, width: int) -> None:
    check(gpu_check.plain_norm(np.random.default_rng(width), kind, width))


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("n", [1, 31, 1000])
def test_the_largest_logit(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """With equal ones and NaN among them; three blocks a row."""
    monkeypatch.setattr(k, "PICK_BLOCKS", 3)
    check(gpu_check.pick(np.random.default_rng(n), n))


@pytest.mark.usefixtures("card")
def test_logits_that_are_all_nan_give_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "PICK_BLOCKS", 2)
    out = gpu.upload(np.full(2, -1, np.int32))
    rows = np.full((2, 40), np.nan, np.float32)
    rows[1, 7] = -1e30
    k.argmax(out, gpu.upload(rows), gpu_check.batch(gpu_check.work()))
    found = gpu.download(out)
    assert 0 <= found[0] < 40
    assert found[1] == 7

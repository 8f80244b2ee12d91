"""The CUDA side without a GPU: kernels compile for every target, plans add up, what is missing is named."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import UnsupportedError
from ckptkit.quant.types import BLOCKS, QType, row_bytes
from ckptkit.runtime import cuda_compile, cuda_driver
from ckptkit.runtime.cuda_layout import LAYOUTS
from ckptkit.runtime.cuda_plan import (
    Attention,
    Ban,
    Bound,
    Decode,
    Deep,
    Embed,
    Finish,
    Flash,
    Flash16,
    Matvec,
    Nll,
    Norm,
    Pick,
    Sample,
    Split,
    StoreKV,
    cut,
)

TARGETS = ((7, 5), (8, 0), (9, 0), (10, 0))
HAS_COMPILER = bool(cuda_compile.version("numba-cuda") and cuda_compile.version("nvidia-nvvm"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="numba-cuda and nvidia-nvvm are not installed")


def plans(capability: tuple[int, int]) -> list[Any]:
    """Every kernel, with every branch that changes which instructions are used.

    For sm_90 in all combinations; other targets differ in the instructions only, which some of them have already.
    """
    dependent, every = capability >= (9, 0), capability == (9, 0)
    out: list[Any] = []
    acts = (("rms", "silu_gate", False, False), ("layer", "gelu_tanh", False, True), ("", "", True, False))
    for i, type in enumerate(LAYOUTS):
        for norm, act, add, picked in acts if every else acts[i % 3 : i % 3 + 1]:
            out.append(Matvec(type, 768, 16, 2, 3, 256, norm, act, add, picked, dependent, per_task=1 + (i % 2)))
        out.append(Embed(type, 768, QType.F32, dependent=dependent))
        if type != QType.F32:
            out.append(Decode(type, 768, QType.F16))
        if BLOCKS[type].elements > 1:
            out.append(Split(type))
    caches = ((1, False, True), (0, False, False), (2, True, True))
    for pairing, half_k, half_v in caches if every else caches[:1]:
        kind = (6, 2, 24, 32, pairing, half_k, half_v)
        out += [
            Attention(*kind, True, 256, dependent),
            *([Attention(*kind, False)] if every else []),
            StoreKV(*kind),
            Flash(*kind),
        ]
    out += [Norm("layer", 768, QType.F32), Norm("rms", 768, QType.BF16, 3), Norm("", 768, QType.F16, 2, True)]
    out += [Finish("silu_gate"), Finish(""), Finish("", True, True)]
    if capability >= (8, 0):  # its products need sm_80
        out += [Flash16(6, 2, 24, 32, 1, False, True), Flash16(6, 2, 64, 64, 2, True, True)]
        out += [
            Deep(6, 2, 24, 32, 1, False, True, 3, True, 2, 2, dependent),
            Deep(28, 4, 128, 128, 2, True, True, 7, False, 8, 3),
        ]
    out += [
        Decode(QType.Q4_K, 768, QType.BF16, 2),
        Decode(QType.Q8_0, 768, QType.F16, 2),
        Decode(QType.F16, 33, QType.BF16, 2),
    ]
    out += [Ban(dependent=dependent), Bound(128, dependent=dependent), Sample(1024, 128, dependent=dependent), Nll()]
    return [*out, Pick(True, dependent=dependent), Pick(False)]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
def test_every_kernel_compiles(capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_CACHE", str(tmp_path))
    wanted = plans(capability)
    said: list[tuple[int, int]] = []
    texts = cuda_compile.build(wanted, capability, lambda n, jobs: said.append((n, jobs)))
    assert set(texts) == set(wanted)
    assert said[0][0] == len(set(wanted))
    for text in texts.values():
        assert f".target sm_{capability[0]}{capability[1]}" in text
        assert cuda_compile.entry(text) in text
    cuda_compile.build(wanted, capability, lambda *_: pytest.fail("the second start must compile nothing"))
    assembler = ptxas()
    if assembler is None:
        return

    def assemble(numbered: tuple[int, Any]) -> None:
        number, plan = numbered
        path = tmp_path / f"{number}.ptx"
        path.write_text(texts[plan])
        args = [assembler, f"-arch=sm_{capability[0]}{capability[1]}", str(path), "-o", os.devnull]
        done = subprocess.run(args, capture_output=True, text=True)
        assert done.returncode == 0, (plan, done.stderr[-500:])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(assemble, enumerate(texts)))


def ptxas() -> str | None:
    """The assembler of the installed wheel, or one on the path; without it the PTX statements are not looked at."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "ptxas"
    return str(wheel) if wheel.is_file() else shutil.which("ptxas")


@needs_compiler
def test_a_kernel_that_fails_to_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedError, match="failed to compile") as e:
        cuda_compile.build([Finish("silu_gate", threads=256), Norm("rms", 64, QType.Q4_0)], (9, 0))
    assert "Norm" in e.value.at


def test_without_a_compiler_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_compile, "version", lambda _package: "")
    with pytest.raises(UnsupportedError, match="numba-cuda"):
        cuda_compile.build([Pick(False)], (9, 0))


@pytest.mark.skipif(cuda_driver.available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_names_what_is_missing() -> None:
    with pytest.raises(UnsupportedError) as e:
        cuda_driver.card()
    assert any(word in str(e.value) for word in ("cuda-bindings", "driver", "GPU"))


def test_both_kernel_modules_have_the_same_functions() -> None:
    cpu, cuda = (importlib.import_module(f"ckptkit.runtime.kernels_{m}") for m in ("cpu", "cuda"))
    names = [
        "embed", "norm", "norm_linear", "linear_add", "norm_ffn", "attention", "argmax", "place", "place_rows", "plain",
        "workspace", "describe", "check_fits", "load_bytes", "bucket", "write", "capture", "replay", "run", "sync",
        "nll", "ready", "own_steps",
    ]  # fmt: skip
    for name in names:
        ours, theirs = (list(inspect.signature(getattr(m, name)).parameters) for m in (cuda, cpu))
        assert ours == theirs, name
    for name in ("empty", "zeros", "upload", "download"):
        assert len(inspect.signature(getattr(cuda, name)).parameters) == len(
            inspect.signature(getattr(cpu, name)).parameters
        ), name
    assert cuda.NATIVE
    assert cuda.MAX_TOKENS >= cpu.MAX_TOKENS


@pytest.mark.parametrize("type", list(LAYOUTS))
def test_planes_hold_what_a_row_holds(type: QType) -> None:
    # 6-bit scales and minima of Q4_K and Q5_K are unpacked to bytes: 12 bytes of 144 become 16
    layout = LAYOUTS[type]
    stored, on_card = row_bytes(type, 768), sum(layout.pitch(k, 768) for k in range(len(layout.planes)))
    assert on_card == stored + (4 * 3 if type in (QType.Q4_K, QType.Q5_K) else 0)
    starts, total = layout.offsets(33, 768)
    assert all(s % 256 == 0 for s in starts)
    assert total >= 33 * on_card


@pytest.mark.parametrize("n_in", [32, 96, 896, 3584, 18944])
@pytest.mark.parametrize("units", [1, 31, 896, 152064])
@pytest.mark.parametrize("type", [QType.F32, QType.BF16, QType.Q8_0, QType.Q4_0])
def test_a_cut_covers_every_vector_and_fits(type: QType, n_in: int, units: int) -> None:
    for rows in (1, 2):
        how = cut(type, n_in, units, rows, 132)
        plan = Matvec(type, n_in, how.lanes, how.segments, how.unroll, how.threads, per_task=how.per_task)
        assert plan.chunks * how.unroll * how.lanes * how.segments >= LAYOUTS[type].vectors(n_in)
        assert how.threads % how.lanes == 0
        assert plan.shared_bytes(units * rows, min(units, 132 * how.per)) * how.per < 227 * 1024


def test_a_bucket_is_a_power_of_two_up_to_the_context() -> None:
    kernels = importlib.import_module("ckptkit.runtime.kernels_cuda")
    assert [kernels.bucket(n, 1000) for n in (1, 256, 257, 600, 1000)] == [256, 256, 512, 1000, 1000]
    assert kernels.bucket(5, 64) == 256


def test_buffers_slice_and_reshape_by_address() -> None:
    b = cuda_driver.Buffer(1024, (4, 6), np.dtype(np.float32))
    assert (b[1].address, b[1].shape) == (1024 + 24, (6,))
    assert (b[1:3].address, b[1:3].shape, b[1:3].nbytes) == (1024 + 24, (2, 6), 48)
    assert b.reshape((2, 12)).shape == b.reshape(2, 12).shape == (2, 12)

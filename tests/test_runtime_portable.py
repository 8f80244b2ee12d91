"""The same kernels on processors that lack AVX-512, AVX or FMA, and compiled for another kind of processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

AVX2 = "+avx,+avx2,+fma,+f16c,+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+sse,+popcnt,+cx16,+bmi,+bmi2"
SSE4 = "+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+sse,+popcnt,+cx16"
MACHINES = {  # name: NUMBA_CPU_FEATURES, note of the load report in fast
    "haswell": (AVX2, "single tokens: activations rounded"),
    "nehalem": (SSE4, "no dot product of bytes"),
    "generic": (None, "no dot product of bytes"),
}
SCRIPT = """
from dataclasses import replace
import numpy as np
from runtime_models import CONFIGS, checkpoint, random_blocks, truth
from ckptkit.quant.types import QType
from ckptkit.runtime import load, simd
assert not simd.has_avx512() and not simd.has_bf16_dot()
config = replace(CONFIGS["llama"], n_embd=256, n_ff=256, n_head=8, head_dim=32)
ids = np.arange(20)
for type in (QType.F32, QType.F16, QType.Q4_0, QType.Q6_K):
    encode = lambda name, x: random_blocks(type, x.shape, 1 / np.sqrt(x.shape[1]), len(name)) if x.ndim == 2 else None
    ck, values = checkpoint(config, encode=encode)
    expected = truth(config, values, ids)
    for precision, kv, bound in (("exact", "f32", 1e-4), ("exact", "f16", 2e-3), ("fast", "f32", 1e-3)):
        with load(ck, precision=precision, threads=2, type_k=kv, type_v=kv) as m:
            got, cache = m.forward(ids), m.new_cache()
            one_by_one = np.stack([m.forward([i], cache, logits="last") for i in ids])
            worst = max(np.abs(got - expected).max(), np.abs(one_by_one - expected).max())
            assert worst < bound * np.abs(expected).max(), (type, precision, kv, worst)
            assert precision == "exact" or any({note!r} in n for n in m.load_report.notes), m.load_report.notes
print("ok")
"""
FOREIGN = """
import re
import llvmlite.binding as llvm
from numba import types
from ckptkit.runtime import kernels_cpu_attention, kernels_cpu_matmat, kernels_cpu_matvec
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu="cortex-a72")
for kernel, literals in (
    (kernels_cpu_matvec.matvec, (0, 1, 0)), (kernels_cpu_matvec.matvec, (12, 14, 0)),
    (kernels_cpu_matmat.matmat, (2, 14, 0)),
    (kernels_cpu_attention.decode_attention, (1, 1, 1)), (kernels_cpu_attention.prompt_attention, (1, 0, 2)),
):
    sig = (*(types.literal(v) for v in literals), *(types.int64,) * 3)
    kernel.compile(sig)
    text = re.sub('target datalayout = ".*"', "", kernel.inspect_llvm(sig))
    text = re.sub('target triple = ".*"', 'target triple = "aarch64-unknown-linux-gnu"', text)
    module = llvm.parse_assembly(text)
    assert machine.emit_object(module)[18:20] == bytes([0xB7, 0])  # ELF machine AArch64
    called = set(re.findall(r"\\tbl\\t(\\S+)", machine.emit_assembly(module)))
    arithmetic = [f for f in called if not f.startswith(("_ZN", "cfunc.", "Py", "_Py", "numba_", "NRT_"))]
    assert not arithmetic, arithmetic  # no function in place of an instruction
print("ok")
"""


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])} | environment
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_lesser_processors_run_the_same_source(name: str, tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("names x86 processors")
    features, note = MACHINES[name]
    environment = {"NUMBA_CPU_NAME": name, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment |= {"NUMBA_CPU_FEATURES": features} if features else {}
    done = run(SCRIPT.replace("{note!r}", repr(note)), environment)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.slow
def test_kernels_compile_for_another_architecture(tmp_path: Path) -> None:
    """What no x86 feature steers is emitted as AArch64 code, without a call for any arithmetic."""
    done = run(FOREIGN, {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.stdout.strip() == "ok", done.stderr

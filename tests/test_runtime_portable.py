"""The same kernels on a processor without AVX-512, and where no cache directory can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

AVX2 = "+avx,+avx2,+fma,+f16c,+sse4.2,+sse4.1,+ssse3,+sse3,+sse2,+sse,+popcnt,+cx16,+bmi,+bmi2"
SCRIPT = """
from dataclasses import replace
import numpy as np
from runtime_models import CONFIGS, checkpoint, random_blocks, truth
from ckptkit.quant.types import QType
from ckptkit.runtime import load, simd
assert simd.has_avx512() == {wide} and simd.has_bf16_dot() == {wide}
config = replace(CONFIGS["llama"], n_embd=96)
for type in (QType.F32, QType.Q4_0):
    encode = lambda name, x: random_blocks(type, x.shape, 1 / np.sqrt(x.shape[1]), len(name)) if x.ndim == 2 else None
    ck, values = checkpoint(config, encode=encode)
    ids = np.arange(20)
    expected = truth(config, values, ids)
    with load(ck, precision="exact", threads=2) as m:
        if not {wide}:
            got, cache = m.forward(ids), m.new_cache()
            one_by_one = np.stack([m.forward([i], cache, logits="last") for i in ids])
            worst = max(np.abs(got - expected).max(), np.abs(one_by_one - expected).max())
            assert worst < 1e-4 * np.abs(expected).max(), worst
    with load(ck, precision="fast", threads=2) as m:
        assert {wide} or any("no bf16" in note for note in m.load_report.notes), m.load_report.notes
print("ok")
"""


def run(environment: dict[str, str], wide: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])} | environment
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{wide}", wide)], env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_avx2_runs_the_same_source(tmp_path):
    import platform

    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("names an x86 processor")
    environment = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = run(environment, "False")
    assert done.stdout.strip() == "ok", done.stderr

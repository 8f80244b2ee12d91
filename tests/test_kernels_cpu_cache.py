"""Where compiled kernels are kept, and what happens where they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "fixtures" / "trained" / "gpt2_tiny.bin"
ONE_TOKEN = ["generate", str(MODEL), "-p", "a", "-n", "1", "--temp", "0"]


def run(arguments: list[str], package: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(package)} | environment
    command = [sys.executable, "-m", "ckptkit", *arguments]
    return subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(ONE_TOKEN, NUMBA_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a")
    assert done.stderr.count("compiled kernels are not kept") == 1
    assert str(tmp_path / "file" / "cache") in done.stderr


@pytest.mark.slow
def test_a_changed_source_is_compiled_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    """simd.py holds no kernel, but all of them contain its code."""
    package = tmp_path / "package"
    shutil.copytree(ROOT / "ckptkit", package / "ckptkit", ignore=shutil.ignore_patterns("__pycache__"))
    first, second = (run(ONE_TOKEN, package, NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    assert "compiling matvec (kept for the next start)" in first.stderr, first.stderr
    assert "compiling" not in second.stderr
    with (package / "ckptkit" / "runtime" / "simd.py").open("a") as f:
        f.write("# another version\n")
    third = run(ONE_TOKEN, package, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert "compiling matvec" in third.stderr
    assert first.stdout == second.stdout == third.stdout

"""What a command imports: nothing that its input and output do not ask for, since every import is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = (
    "import os, sys; from ckptkit.cli import cli; cli(sys.argv[1:], standalone_mode=False); "
    "print(*sys.modules, *(f'{k}={v}' for k, v in os.environ.items() if k == 'OPENBLAS_NUM_THREADS'), file=sys.stderr)"
)
# slow to import, and needed by none of these commands
HEAVY = {"numba", "gguf", "safetensors", "tokenizers", "rich", "jinja2", "concurrent.futures", "logging", "_hashlib"}
FORMATS = {"gguf", "llmc", "llmc_llama3", "safetensors", "llama2c", "microgpt", "nanoeuler", "sidecar"}


def imported(*args: str | Path) -> set[str]:
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, args)],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("source", "target", "kind", "formats", "compiler"),
    [
        ("trained/nx_ours_qwen.gguf", "o.gguf", "q8_0", {"gguf"}, True),
        ("gguf/llama.gguf", "o.gguf", "", {"gguf"}, False),
        ("llmc/gpt2_v3.bin", "o.gguf", "f16", {"gguf", "llmc"}, True),
    ],
)
def test_a_conversion_imports_its_two_formats_and_only_the_compiler_it_uses(
    source: str, target: str, kind: str, formats: set[str], compiler: bool, fixtures_dir: Path, tmp_path: Path
) -> None:
    found = imported("convert", fixtures_dir / source, tmp_path / target, *(["--type", kind] if kind else []))
    assert {f for f in FORMATS if f"ckptkit.formats.{f}" in found} == formats
    assert not found & HEAVY
    assert ("llvmlite" in found) == compiler
    assert "OPENBLAS_NUM_THREADS=1" in found  # or numpy starts threads that spin while everything else is read


def test_inspect_needs_no_compiler(fixtures_dir: Path) -> None:
    found = imported("inspect", fixtures_dir / "gguf/llama.gguf")
    assert {f for f in FORMATS if f"ckptkit.formats.{f}" in found} == {"gguf"}
    assert not found & (HEAVY | {"llvmlite"})


def test_the_version_needs_no_arrays() -> None:
    assert "numpy" not in imported("--version")

"""Kernels to PTX: compiled by processes of their own, in parallel, and kept on disk, so that the second start
compiles nothing.

A kernel is a plan (cuda_plan.py) whose MODULE holds `kernel(plan)`, the function, and `ARGUMENTS`, its types. The
file name in the cache is a hash of the plan, the card's compute capability, the compiler's versions and the source of
every kernel module. Numba is imported only in the compiling processes, which need no GPU; the running process reads
text.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError

Capability = tuple[int, int]
SOURCES = ("cuda_ptx.py", "cuda_layout.py", "cuda_plan.py", "cuda_compile.py")


def cache_dir() -> Path:
    """Where compiled kernels are kept: CKPTKIT_CACHE, or ckptkit in the user's cache directory."""
    if given := os.environ.get("CKPTKIT_CACHE"):
        return Path(given) / "cuda"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptkit" / "cuda"


def version(package: str) -> str:
    """Installed version of a distribution; "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def toolchain(capability: Capability) -> bytes:
    """Hash of everything but the plan that a kernel's PTX depends on."""
    h = hashlib.sha256(repr(capability).encode())
    for package in ("numba-cuda", "numba", "nvidia-nvvm", "nvidia-cuda-nvrtc"):
        h.update(f"{package} {version(package)}".encode())
    here = Path(__file__).parent
    for path in [here / name for name in SOURCES] + sorted(here.glob("kernels_cuda_*.py")):
        h.update(path.read_bytes())
    return h.digest()


def key(plan: Any, tools: bytes) -> str:
    """File name of a plan's PTX in the cache."""
    return f"{type(plan).__name__.lower()}-{hashlib.sha256(tools + repr(plan).encode()).hexdigest()[:32]}.ptx"


def build(
    plans: Iterable[Any], capability: Capability, on_compile: Callable[[int, int], None] | None = None, jobs: int = 0
) -> dict[Any, str]:
    """PTX of every plan, compiling what the cache lacks in `jobs` processes (default: one per core, at most 16).

    `on_compile(missing, processes)` is called once before anything is compiled. Raises UnsupportedError naming the
    kernel that failed, or the package that is missing.
    """
    wanted, tools, folder = list(dict.fromkeys(plans)), toolchain(capability), cache_dir()
    paths = {plan: folder / key(plan, tools) for plan in wanted}
    missing = [plan for plan in wanted if not paths[plan].is_file()]
    if missing:
        if not version("numba-cuda"):
            raise UnsupportedError("package numba-cuda is missing", hint="pip install 'ckptkit[cuda]'")
        folder.mkdir(parents=True, exist_ok=True)
        jobs = min(jobs or len(os.sched_getaffinity(0)), 16, len(missing))
        if on_compile:
            on_compile(len(missing), jobs)
        compile_apart([(plan, str(paths[plan])) for plan in missing], capability, jobs)
    return {plan: path.read_text() for plan, path in paths.items()}


def compile_apart(work: Sequence[tuple[Any, str]], capability: Capability, jobs: int) -> None:
    """Compile (plan, file) pairs in `jobs` processes; all of them are ended if one fails or the user interrupts."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for k in range(jobs):
            share = base64.b64encode(pickle.dumps((list(work[k::jobs]), capability)))
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )  # fmt: skip
            assert process.stdin is not None
            process.stdin.write(share)
            process.stdin.close()
            running.append(process)
        for process in running:
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace").strip()
            if process.wait() != 0:
                lines = said.splitlines() or ["(nothing)"]
                raise UnsupportedError(
                    "a CUDA kernel failed to compile", at=lines[-1][:200], got="\n".join(lines[-12:]),
                    hint="numba-cuda 0.30 or later and a CUDA 13 toolkit (pip install 'ckptkit[cuda]') are needed",
                )  # fmt: skip
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()


def prepare(capability: Capability) -> None:
    """Make numba.cuda importable and able to compile without a GPU."""
    import numpy as np

    for old, new in (("row_stack", "vstack"), ("in1d", "isin"), ("trapz", "trapezoid")):
        if not hasattr(np, old):  # numba-cuda 0.30 still asks for names that numpy 2.5 dropped
            setattr(np, old, getattr(np, new))
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    # a kernel that calls device functions asks the driver for the card it is compiled for; here it may have none
    answer = type("Card", (), {"compute_capability": capability})()
    dispatcher.get_current_device = lambda: answer  # type: ignore[attr-defined]


def to_ptx(plan: Any, capability: Capability) -> str:
    """Compile one plan in this process (after `prepare`)."""
    cuda = importlib.import_module("numba.cuda")
    module = importlib.import_module(f"{__package__}.{plan.MODULE}")
    text, _ = cuda.compile(
        module.kernel(plan), module.ARGUMENTS, device=False, abi="numba", cc=capability,
        launch_bounds=(plan.threads, getattr(plan, "blocks_per_sm", 1)),
    )  # fmt: skip
    # the size of a prefetch is a hint that only sm_80 and later know
    return str(text) if capability >= (8, 0) else str(text).replace(".L2::256B", "")


def entry(text: str) -> str:
    """Name of the kernel in a PTX text."""
    found = re.search(r"\.entry\s+([\w$]+)", text)
    assert found is not None
    return found[1]


def worker() -> None:
    """Body of a compiling process: (plan, file) pairs on stdin; a file appears whole or not at all."""
    work, capability = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    prepare(capability)
    for plan, path in work:
        try:
            text = to_ptx(plan, capability)
        except Exception as e:
            sys.stderr.write(f"{e}\n{plan}\n")
            raise SystemExit(1) from None
        with tempfile.NamedTemporaryFile("w", dir=Path(path).parent, delete=False) as out:
            out.write(text)
        Path(out.name).replace(path)


if __name__ == "__main__":
    worker()

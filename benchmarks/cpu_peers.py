"""The peers that benchmarks/cpu.py times: a native llama-bench, or xllamacpp (llama.cpp from PyPI) in a child process.

python -m benchmarks.cpu_peers MODEL THREADS PROMPT TOKENS DEPTH REPEAT      prints xllamacpp's speeds as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean

import numpy as np

Speeds = dict[str, float]


def environment(libraries: Path | None = None) -> dict[str, str]:
    """A native peer's libraries; nothing that steers a BLAS on either side."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "OMP_", "MKL_", "GGML_"))}
    return kept | ({"LD_LIBRARY_PATH": str(libraries)} if libraries else {})


def names(prompt: int, tokens: int, depth: int) -> list[str]:
    """The tests as llama-bench names them."""
    return [f"pp{prompt}", f"tg{tokens}", f"tg{tokens} @ d{depth}"]


def native(folder: Path, path: Path, threads: int, prompt: int, tokens: int, depth: int, repeat: int) -> Speeds:
    """Tokens per second of llama-bench by test name."""
    out = subprocess.run(
        [str(folder / "llama-bench"), "-m", str(path), "-t", str(threads), "-p", str(prompt), "-n", str(tokens),
         "-d", f"0,{depth}", "-r", str(repeat), "-o", "json"],
        check=True, capture_output=True, text=True, env=environment(folder),
    ).stdout  # fmt: skip
    speeds: Speeds = {}
    for line in json.loads(out):
        name = f"pp{line['n_prompt']}" if line["n_prompt"] else f"tg{line['n_gen']}"
        speeds[name + (f" @ d{line['n_depth']}" if line["n_depth"] else "")] = line["avg_ts"]
    return speeds


def native_name(folder: Path) -> str:
    """What was measured, for the report."""
    done = subprocess.run(
        [str(folder / "llama-bench"), "--version"], capture_output=True, text=True, env=environment(folder), check=False
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return "native llama-bench" + (f", {said[0]}" if said else "")


def xllamacpp(path: Path, threads: int, prompt: int, tokens: int, depth: int, repeat: int) -> Speeds:
    """The same by llama.cpp's own timings in xllamacpp's server; a child process, since it can abort."""
    numbers = [str(n) for n in (threads, prompt, tokens, depth, repeat)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu_peers", str(path), *numbers],
        check=True, capture_output=True, text=True, env=environment(), cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    speeds: Speeds = json.loads(done.stdout.splitlines()[-1])
    return speeds


def choose(folder: Path | None) -> tuple[str, Callable[..., Speeds]]:
    """Name and timing function of the peer: llama-bench in `folder`, in its absence xllamacpp."""
    if folder is not None and (folder / "llama-bench").exists():
        where = folder
        return native_name(where), lambda *arguments: native(where, *arguments)
    return f"xllamacpp {version('xllamacpp')} (no native llama-bench was given)", xllamacpp


def _time_xllamacpp(path: str, threads: int, prompt: int, tokens: int, depth: int, repeat: int) -> Speeds:
    import xllamacpp as x

    p = x.CommonParams()
    p.model.path = path
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
    p.n_ctx, p.n_parallel, p.n_predict, p.cache_ram_mib = depth + prompt + tokens + 8, 1, tokens, 0
    p.n_gpu_layers = 0
    server = x.Server(p)
    rng = np.random.default_rng(0)

    def ask(n_prompt: int, n: int) -> dict[str, float]:
        ids = rng.integers(0, 250, n_prompt).tolist()
        how = {"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(how)
        timings: dict[str, float] = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        return timings

    ask(prompt, 4)  # to warm up
    runs = [(ask(prompt, 1), ask(1, tokens), ask(depth, tokens)) for _ in range(repeat)]
    keys = ("prompt_per_second", "predicted_per_second", "predicted_per_second")
    found = [mean(run[i][key] for run in runs) for i, key in enumerate(keys)]
    return dict(zip(names(prompt, tokens, depth), found, strict=True))


if __name__ == "__main__":
    print(json.dumps(_time_xllamacpp(sys.argv[1], *(int(n) for n in sys.argv[2:]))))

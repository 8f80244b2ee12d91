"""`ckptkit bench` and `llama-bench` on the same files, one after the other on the same card.

python -m benchmarks.gpu_peer --peer FOLDER [--models WORDS] [--rounds N]

FOLDER holds a llama-bench that was built with CUDA. Files are random, of true shapes and types, without a vocabulary;
both run with an f16 cache, a prompt of 2,048 tokens (GPT-2: 1,024) and 128 tokens one by one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from ckptkit import conversion, formats
from ckptkit.formats.options import WriteOptions
from ckptkit.quant.types import QType

from .cpu_peers import environment, native_name
from .gpu import machine
from .gpu_decode import GOALS
from .gpu_shapes import CONFIGS, random_model

NO_VOCABULARY = conversion.Options(write=WriteOptions(metadata={"tokenizer.ggml.model": "no_vocab"}))
MODELS = (*((shape, type) for shape, type, _ in GOALS), ("GPT-2 124M", QType.F16))
TOKENS = 128


def say(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def ours(path: Path, prompt: int, device: str) -> dict[str, float]:
    """Tokens per second of `ckptkit bench` by test name."""
    command = [sys.executable, "-m", "ckptkit", "bench", str(path), "--device", device, "-p", str(prompt),
               "-n", str(TOKENS), "-r", "3", "-ctk", "f16", "-ctv", "f16", "-o", "json"]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {r["test"]: r["tokens_per_second"] for r in json.loads(done.stdout)["results"]}


def theirs(folder: Path, path: Path, prompt: int) -> dict[str, float]:
    """The same of llama-bench."""
    command = [str(folder / "llama-bench"), "-m", str(path), "-p", str(prompt), "-n", str(TOKENS), "-r", "3",
               "-ngl", "99", "-fa", "1", "-o", "json"]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(folder))
    return {f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}": r["avg_ts"] for r in json.loads(done.stdout)}


def main() -> int:
    """Time every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder of llama-bench")
    parser.add_argument("--models", default="", help="only those that contain one of these words, comma-separated")
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for line in machine():
        say(line)
    say(native_name(options.peer))
    say("| model | type | prompt ours | theirs | ratio | token by token ours | theirs | ratio |")
    say("|---|---|---|---|---|---|---|---|")
    words = [w for w in options.models.split(",") if w]
    with tempfile.TemporaryDirectory() as folder:
        for shape, type in MODELS:
            if words and not any(w in f"{shape} {type.name}" for w in words):
                continue
            config = CONFIGS[shape]
            path, prompt = Path(folder) / "model.gguf", min(2048, config.context_length)
            conversion.write(random_model(config, type), formats.by_name("gguf"), path, NO_VOCABULARY)
            runs = [
                (ours(path, prompt, options.device), theirs(options.peer, path, prompt)) for _ in range(options.rounds)
            ]
            cells = []
            for test in (f"pp{prompt}", f"tg{TOKENS}"):
                a, b = (median(run[side][test] for run in runs) for side in (0, 1))
                cells += [f"{a:,.0f}", f"{b:,.0f}", f"{median(x[test] / y[test] for x, y in runs):.2f}"]
            say(f"| {shape} | {type.name} | " + " | ".join(cells) + " |")
            path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Quantising a GGUF beside llama-quantize: wall time of the whole process, two threads, alternating, warm page cache.

    python -m benchmarks.quantise --peer DIR_WITH_llama-quantize [--rounds 3] [--dir /tmp] [--types q8_0 q4_k_m]

Models: a random GPT-2 of 124 M parameters and a random llama of more than 2 GiB in F32 whose rows are multiples of 256.
Neither side syncs: ours is told not to, nor to begin to, by stand-ins, because llama-quantize does not.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ckptkit.arch import ARCHS
from ckptkit.checkpoint import Checkpoint, Config, Source
from ckptkit.formats import gguf
from ckptkit.formats.options import WriteOptions
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from ckptkit.tensor import Tensor
from ckptkit.tokenizer import ByteBPE, Strings

GPT2 = Config("gpt2", 1024, 50257, 12, 12, 12, 768, 3072, 64, tied_output=True)
LLAMA = Config("llama", 2048, 32000, 10, 16, 16, 2048, 5632, 128, rope_pairing="adjacent")
BLOCK = np.random.default_rng(1).standard_normal(1 << 22, np.float32) * np.float32(0.02)
OURS = """
import sys
from ckptkit import files
files.sync = files.begin_writeback = lambda *_: None
from ckptkit.cli import main
sys.argv[1:1] = ["convert"]
main()
"""


def tensor(shape: tuple[int, ...], seed: int) -> Tensor:
    """Seeded values that are made when they are read."""
    width = shape[-1] if len(shape) > 1 else 1

    def rows(lo: int, hi: int) -> np.ndarray:
        start = (seed * 7919 + lo * width) % len(BLOCK)
        values = np.resize(np.roll(BLOCK, -start)[: (hi - lo) * width], (hi - lo) * width)
        return values.view(np.uint8).reshape(hi - lo, 4 * width)

    return Tensor(shape, QType.F32, rows)


def write_model(path: Path, config: Config) -> None:
    """A GGUF of random weights with as many made-up tokens as the embedding has rows."""
    tensors = {
        name: tensor(shape, k)
        for k, (name, shape, must) in enumerate(ARCHS[config.arch].names(config))
        if must or (name == "output.weight" and not config.tied_output)
    }
    tokens = ByteBPE(Strings.of(f"t{i}".encode() for i in range(config.vocab_size)), Strings.of(()), pre="gpt-2")
    ck = Checkpoint(config, tensors, tokens, Source((path,), "benchmark"))
    gguf.write(ck, write_rows(gguf.LAYOUTS[config.arch], config, tensors), path, WriteOptions())


def timed(command: list[str]) -> float:
    # as installed: bytecode is kept, which some environments switch off
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--types", nargs="+", default=["q8_0", "q4_k_m"])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    print(f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores")
    print("| model | type | ckptkit s | llama-quantize s | ratio ours / theirs |\n|---|---|---:|---:|---:|")
    try:
        for name, config in (("GPT-2 124M", GPT2), ("llama 2 GiB", LLAMA)):
            source, out = folder / "model.gguf", folder / "out.gguf"
            write_model(source, config)
            for kind in args.types:
                ours = [sys.executable, "-c", OURS, str(source), str(out), "--type", kind, "--force"]
                theirs = [str(args.peer / "llama-quantize"), str(source), str(out), kind.upper(), "2"]
                rows: dict[str, list[float]] = {"ours": [], "theirs": []}
                timed(ours)  # compiles the encoders, once for all runs after it
                for _ in range(args.rounds):
                    for side, command in (("ours", ours), ("theirs", theirs)):
                        out.unlink(missing_ok=True)
                        rows[side].append(timed(command))
                a, b = statistics.median(rows["ours"]), statistics.median(rows["theirs"])
                size = f"{source.stat().st_size / 2**30:.2f} GiB"
                print(f"| {name} ({size}) | {kind} | {a:.2f} | {b:.2f} | {a / b:.2f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""GPU benchmarks and checks: python -m benchmarks.gpu --check, --forward, --decode, ... (see -h)."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import numpy as np

from ckptkit.runtime import cuda_compile
from ckptkit.runtime import cuda_driver as gpu

from . import gpu_check, gpu_decode, gpu_forward, gpu_parts, gpu_trained, gpu_tune


def machine() -> list[str]:
    """Card, driver and versions, for the head of a result."""
    card = gpu.card()
    free, total = gpu.free_bytes()
    packages = ("numba-cuda", "numba", "cuda-bindings", "nvidia-nvvm", "nvidia-cublas")
    versions = ", ".join(f"{p} {cuda_compile.version(p)}" for p in packages if cuda_compile.version(p))
    return [
        f"{card.name}, {card.processors} SMs, {total / 1e9:.0f} GB ({free / 1e9:.0f} free), "
        f"driver for CUDA {card.driver}",
        f"Python {platform.python_version()}, numpy {np.__version__}, {versions}",
    ]


def main() -> int:
    """Run what was asked for; exit code 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="every kernel against float64")
    parser.add_argument("--only", default="", help="one group of checks")
    parser.add_argument("--every", type=int, default=1, help="only every n-th check, for a slow tool around it")
    parser.add_argument("--forward", action="store_true", help="whole models against float64")
    parser.add_argument("--decode", action="store_true", help="decode speed of the table's models")
    parser.add_argument(
        "--sweep", action="store_true", help="decode speed with late and early launch of the next kernel"
    )
    parser.add_argument("--prompts", action="store_true", help="prompts of 2,048 tokens")
    parser.add_argument("--parts", action="store_true", help="the parts of a prompt, alone")
    parser.add_argument("--deep", action="store_true", help="decode after up to 32,000 positions")
    parser.add_argument("--fast", action="store_true", help="with --forward: the fast precision")
    parser.add_argument("--trained", default="", help="files and folders of trained models, comma-separated")
    parser.add_argument("--text", default="", help="MODEL.gguf,TEXT[,TYPE...] to score in both precisions")
    parser.add_argument("--tune", default="", help="time ways to cut products up: 7B,0.5B,GPT-2")
    parser.add_argument(
        "--models", default="", help="only shapes and types that contain one of these words, comma-separated"
    )
    args = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    for line in machine():
        say(line)
    good = gpu_check.run(say, args.only, args.every) if args.check else True
    if args.forward or (args.check and not args.only):
        good &= gpu_forward.run(say, "fast" if args.fast else "exact")
    words = [w for w in args.models.split(",") if w]
    goals = [g for g in gpu_decode.GOALS if not words or any(w in f"{g[0]} {g[1].name}" for w in words)]
    setting = gpu_decode.Setting
    if args.decode:
        gpu_decode.run(say, [setting()], goals)
    if args.sweep:
        gpu_decode.run(say, [setting(), setting(early=False)], goals)
    if args.prompts:
        chosen = [g for g in gpu_decode.PROMPTS if not words or any(w in f"{g[0]} {g[1].name}" for w in words)]
        gpu_decode.prompts(say, chosen)
    if args.parts:
        gpu_parts.run(say)
    if args.deep:
        for shape in ("Qwen2-7B", "Qwen2-0.5B"):
            if not words or any(w in shape for w in words):
                gpu_decode.deep(say, shape)
    if args.trained:
        good &= gpu_trained.same_tokens(say, [Path(p) for p in args.trained.split(",")])
    if args.text:
        path, text, *types = args.text.split(",")
        good &= gpu_trained.precisions(say, Path(path), Path(text), types or gpu_trained.TYPES)
    if args.tune:
        gpu_tune.run(say, args.tune.split(","), words)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

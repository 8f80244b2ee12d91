"""Speed of the encoders and decoders beside libgguf, which wraps llama.cpp's C (one thread: it has no other mode).

    python -m benchmarks.encode [--elements 16777216] [--repeat 5]

MB/s of float32, best of the repeats, peer and ours in turn; ours on one thread and through `encode_rows` on every core.
The bytes are compared before anything is timed. Compilation is left out of the timings and shown on its own.
"""

from __future__ import annotations

import argparse
import platform
import time

import libgguf
import numpy as np

from ckptkit.parallel import threads
from ckptkit.quant import encode
from ckptkit.quant.encode import KERNEL_TYPES, decode_rows, encode_rows
from ckptkit.quant.types import QType, row_bytes

HALVES = (QType.F16, QType.BF16)


def best(repeat, *tasks):
    """Shortest time of each task, run in turn."""
    times = [float("inf")] * len(tasks)
    for _ in range(repeat):
        for k, task in enumerate(tasks):
            start = time.perf_counter()
            task()
            times[k] = min(times[k], time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    rows = np.random.default_rng(0).standard_normal((args.elements // 4096, 4096), dtype=np.float32) * np.float32(0.02)
    cpu = platform.processor() or platform.machine()
    print(f"{cpu}, {threads()} threads, {rows.nbytes / 1e6:.0f} MB of float32")
    columns = f"{'libgguf':>8} {'ours, 1':>8}"
    print(f"{'':5} {'compile s':>9} | encode MB/s: {columns} {'ours':>8} | decode: {columns}")
    for type in KERNEL_TYPES:
        start = time.perf_counter()
        encode_rows(rows[:1], type)
        compiling = time.perf_counter() - start
        stored = encode_rows(rows, type)
        theirs = np.asarray(libgguf.quantize_rows(rows, int(type))).view(np.uint8).reshape(stored.shape)
        if not np.array_equal(stored, theirs):
            raise SystemExit(f"{type.name}: the bytes differ")
        out = np.empty((len(rows), row_bytes(type, 4096)), np.uint8)

        def one_thread(type=type, out=out):
            for lo in range(0, len(rows), 64):
                encode._encode_into(rows[lo : lo + 64], type, out[lo : lo + 64])

        times = best(
            args.repeat,
            lambda type=type: libgguf.quantize_rows(rows, int(type)),
            one_thread,
            lambda type=type: encode_rows(rows, type),
            *(
                []
                if type in HALVES
                else [lambda type=type, stored=stored: libgguf.dequantize_rows(stored, int(type), 4096)]
            ),
            lambda type=type, stored=stored: decode_rows(stored, type),
        )
        speeds = [f"{rows.nbytes / t / 1e6:8.0f}" for t in times]
        if type in HALVES:  # libgguf does not decode these
            speeds.insert(3, f"{'-':>8}")
        print(f"{type.name:5} {compiling:9.3f} | {'':12} {' '.join(speeds[:3])} | {'':7} {' '.join(speeds[3:])}")


if __name__ == "__main__":
    main()

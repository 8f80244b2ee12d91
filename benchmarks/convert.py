"""Converting a large llm.c file to an F32 GGUF, beside `cp` of the same file: wall time and peak resident memory.

    python -m benchmarks.convert [--gib 2] [--rounds 3] [--dir /tmp]

Writes a seeded file, warms the page cache, then alternates `cp` + fsync and the conversion (which fsyncs too).
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

CHANNELS, VOCAB, CONTEXT = 1280, 50257, 1024


def write_model(path: Path, gib: float) -> None:
    """An llm.c version 3 file of about `gib` GiB: d36's widths, as many layers as fit, seeded values."""
    padded = VOCAB + -VOCAB % 128
    per_layer = 12 * CHANNELS**2 + 13 * CHANNELS
    n_layer = max(int((gib * 2**28 - (padded + CONTEXT) * CHANNELS) // per_layer), 1)
    header = np.zeros(256, "<i4")
    header[:8] = 20240326, 3, CONTEXT, VOCAB, n_layer, 20, CHANNELS, padded
    rng = np.random.default_rng(1)
    block = rng.standard_normal(1 << 22, np.float32) * np.float32(0.02)
    left = VOCAB * CHANNELS
    with path.open("wb") as f:
        f.write(header.tobytes())
        while left:
            n = min(left, len(block))
            f.write(block[:n].data)
            left -= n
        f.write(bytes(4 * (padded - VOCAB) * CHANNELS))
        left = CONTEXT * CHANNELS + n_layer * per_layer + 2 * CHANNELS
        while left:
            n = min(left, len(block))
            f.write(block[:n].data)
            left -= n


def copy(source: Path, target: Path) -> None:
    """What `cp` does, and fsync, so that both ends are on disk."""
    subprocess.run(["cp", str(source), str(target)], check=True)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def convert(source: Path, target: Path) -> int:
    """The conversion in a process of its own; its peak resident memory in kB."""
    code = (
        "import resource, sys, ckptkit; ckptkit.convert(sys.argv[1], sys.argv[2]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(target)], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def timed(job, source: Path, target: Path) -> tuple[float, int | None]:
    target.unlink(missing_ok=True)
    begin = time.perf_counter()
    peak = job(source, target)
    return time.perf_counter() - begin, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        source = folder / "model.bin"
        write_model(source, args.gib)
        copy(source, folder / "warm")
        rows: dict[str, list[float]] = {"cp": [], "ckptkit": []}
        peak = 0
        for _ in range(args.rounds):
            seconds, _peak = timed(copy, source, folder / "copy")
            rows["cp"].append(seconds)
            seconds, found = timed(convert, source, folder / "out.gguf")
            rows["ckptkit"].append(seconds)
            peak = max(peak, found or 0)
        size = source.stat().st_size
        cp, ours = (statistics.median(rows[k]) for k in ("cp", "ckptkit"))
        print(
            f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores"
        )
        print(f"llm.c version 3, {size:,} bytes -> F32 GGUF, warm, fsync in both, median of {args.rounds}")
        print(f"cp       {cp:6.2f} s  {size / cp / 1e9:5.2f} GB/s  ({', '.join(f'{s:.2f}' for s in rows['cp'])})")
        print(
            f"ckptkit  {ours:6.2f} s  {size / ours / 1e9:5.2f} GB/s  ({', '.join(f'{s:.2f}' for s in rows['ckptkit'])})"
        )
        print(f"speed ckptkit / cp {cp / ours:.2f}, peak resident memory {peak / 1024:.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

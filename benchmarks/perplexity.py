"""ckptkit's perplexity beside llama-perplexity's, alternating in one run: same windows, wall time and value of each.

    python benchmarks/perplexity.py MODEL.gguf TEXT [--peer llama-perplexity] [-c 512] [--chunks 20] [-t 2] [-r 3]

Times are of whole processes, from start to the printed estimate; the value must agree within 2e-4 of the mean nll where
the weights are float32 (the peer rounds activations to 8 bits where they are quantised). Without a peer only ours is
timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = """
import json, sys
from pathlib import Path
import ckptkit
from ckptkit import score
model, text, n_ctx, chunks, threads, precision = sys.argv[1:7]
with ckptkit.load(model, threads=int(threads), precision=precision) as m:
    [r] = score.run(m, Path(text), score.PplOptions(n_ctx=int(n_ctx), chunks=int(chunks)))
print(json.dumps([r.ppl, r.stderr]))
"""


def timed(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{command[0]} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds, done.stdout + done.stderr


def ours(a: argparse.Namespace) -> tuple[float, float, float]:
    seconds, out = timed(
        [sys.executable, "-c", OURS, str(a.model), str(a.text), str(a.c), str(a.chunks), str(a.t), a.precision]
    )
    ppl, error = json.loads(out.strip().splitlines()[-1])
    return seconds, ppl, error


def theirs(a: argparse.Namespace) -> tuple[float, float, float]:
    exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"] if not a.peer_defaults else []
    seconds, out = timed(
        [
            *(a.peer, "-m", str(a.model), "-f", str(a.text), "-c", str(a.c), "-b", str(a.peer_batch or a.c)),
            *("-t", str(a.t), "--chunks", str(a.chunks), *exact),
        ]
    )
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", out)
    if not found:
        sys.exit(f"the peer printed no estimate:\n{out[-2000:]}")
    return seconds, float(found[1]), float(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--peer", default=shutil.which("llama-perplexity"), help="the llama-perplexity to run")
    parser.add_argument("--peer-batch", type=int, default=0, help="the peer's -b; default: the window")
    parser.add_argument(
        "--peer-defaults", action="store_true", help="let the peer use flash attention and an f16 cache"
    )
    parser.add_argument("--precision", default="exact", choices=["exact", "fast"])
    parser.add_argument("-c", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("-t", type=int, default=os.cpu_count())
    parser.add_argument(
        "-r", type=int, default=3, help="rounds; the first start of ours, which may compile, is not counted"
    )
    a = parser.parse_args()
    a.model, a.text = a.model.resolve(), a.text.resolve()

    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.2f}, python {platform.python_version()}")
    print(f"{a.model.name}, {a.text.name}, {a.chunks} windows of {a.c}, {a.t} threads, precision {a.precision}")
    ours(a)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    values: dict[str, tuple[float, float]] = {}
    sides = {"ours": ours, "theirs": theirs} if a.peer else {"ours": ours}
    for k in range(a.r):
        for name, run in sides.items():
            seconds, ppl, error = run(a)
            times[name].append(seconds)
            values[name] = ppl, error
            print(f"round {k + 1}  {name:6}  {seconds:7.2f} s  PPL {ppl:.4f} +/- {error:.5f}")
    for name in sides:
        t = times[name]
        spread = statistics.stdev(t) if len(t) > 1 else 0.0
        print(
            f"{name:6}  {statistics.mean(t):7.2f} s ± {spread:.2f}  {a.c * a.chunks / statistics.mean(t):,.0f} tokens/s"
        )
    if not a.peer:
        print("no peer: pass --peer PATH or put llama-perplexity on the path")
        return
    ratio = statistics.mean(times["theirs"]) / statistics.mean(times["ours"])
    difference = math.log(values["ours"][0]) - math.log(values["theirs"][0])
    print(f"speed ours/theirs {ratio:.2f}   difference of mean nll {difference:+.2e}")


if __name__ == "__main__":
    main()

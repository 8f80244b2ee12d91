"""The command line and the Python API on the card, end to end: python -m benchmarks.gpu_cli [--only WORDS] [--big].

Random models of true shapes are written to GGUF files with our own writer and run as a user would run them; every item
prints its figures, and one that fails its error, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ckptkit
from ckptkit import conversion, formats, runtime, score
from ckptkit.errors import CkptError
from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime.batch import generate_batch
from ckptkit.runtime.generate import GenerateOptions
from ckptkit.runtime.sampler import Sampler, Sampling

from .gpu import machine
from .gpu_decode import steps
from .gpu_shapes import CONFIGS, random_model

MODELS = (
    ("GPT-2 124M", QType.BF16), ("GPT-2 124M", QType.F32), ("Qwen2-0.5B", QType.BF16), ("Qwen2-0.5B", QType.Q8_0),
)  # fmt: skip
BIG = (("Qwen2-7B", QType.BF16), ("Qwen2-7B", QType.Q8_0), ("Qwen2-7B", QType.Q4_0))
TRAINED = Path(__file__).parent.parent / "fixtures" / "trained"
PROMPT = np.random.default_rng(1).integers(1, 50000, 128)
IDS = ",".join(map(str, PROMPT))


def say(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def cli(*args: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """ckptkit with these arguments, in a process of its own."""
    command = [sys.executable, "-m", "ckptkit", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **env}, check=False)


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a command printed; what it said instead, as an error, if it failed."""
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Exit code and message of a command that should fail."""
    return f"exit code {done.returncode}: " + done.stderr.strip().replace("\n", "\n    ")[:600]


def best(fn: Callable[[], Any], repeat: int = 5) -> float:
    """Least seconds that a call took."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return min(times)


class Files:
    """The models, written when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, shape: str, type: QType) -> Path:
        """A GGUF file of this shape and type."""
        path = self.folder / f"{shape.replace(' ', '-')}-{type.name}.gguf"
        if not path.exists():
            conversion.write(random_model(CONFIGS[shape], type), formats.by_name("gguf"), path, conversion.Options())
        return path

    def shard(self, n: int) -> Path:
        """Random ids as an llm.c shard."""
        path = self.folder / f"ids{n}.bin"
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, n
        ids = np.random.default_rng(2).integers(0, 50257, n).astype("<u2")
        path.write_bytes(header.tobytes() + ids.tobytes())
        return path


def starts(files: Files) -> None:
    """Seconds of a first start, which compiles every kernel, and of a second."""
    for shape, type in (MODELS[0], MODELS[3]):
        with tempfile.TemporaryDirectory() as cache:
            for which in ("first", "second"):
                begin = time.perf_counter()
                args = ("generate", files(shape, type), "--device", "cuda", "--ids", IDS, "-n", 2, "--json")
                done = cli(*args, CKPTKIT_CACHE=cache)
                took, t = time.perf_counter() - begin, answer(done)["timings"]
                told = [line for line in done.stderr.splitlines() if "compiling" in line]
                say(f"  {shape} {type.name} {which} start: {took:.2f} s, prompt {t['prompt_seconds']:.2f} s; {told}")


def generating(models: Any, n: int, files: Files) -> None:
    """Decode rates of the command and of the API, greedy and with the default sampling, beside the bare step."""
    for shape, type in models:
        path = files(shape, type)
        with ckptkit.load(path, device="cuda", context=1024) as model:
            device, host, _ = steps(model, len(PROMPT), n, max(512, len(PROMPT) + n))
            bare = 1 / device
            line = f"  {shape} {type.name}: bare step {bare:,.0f} tok/s, with tokens read {1 / host:,.0f}"
            api = {}
            for name, how in (("greedy", {"temp": 0.0}), ("sampled", {"seed": 1})):
                runs = [model.generate(PROMPT.tolist(), n_predict=n, **how) for _ in range(3)]
                api[name] = runs[0].ids
                rates = [r.timings.decode_rate for r in runs]
                whole = [n / (r.timings.decode_seconds + r.timings.prompt_seconds) for r in runs]
                line += f"; API {name} {max(rates):,.0f} ({max(rates) / bare:.3f}), with the prompt {max(whole):,.0f}"
        say(line)
        line = "    command:"
        for name, given in (("greedy", ("--temp", 0)), ("sampled", ("-s", 1))):
            args = ("generate", path, "--device", "cuda", "--ids", IDS, "-n", n, "-c", 1024, "--json")
            body = answer(cli(*args, *given))
            rate = body["timings"]["decode_rate"]
            same = "same ids as the API" if body["ids"] == api[name] else "OTHER IDS THAN THE API"
            verdict = "ok" if rate >= 0.9 * bare else "MISSED"
            line += f" {name} {rate:,.0f} tok/s ({rate / bare:.3f} of bare: {verdict}; {same});"
        say(line)


def sampled_ids(files: Files) -> None:
    """Tokens drawn on the card beside those that the host draws from its logits, and what the host's way costs."""
    from ckptkit.runtime import kernels_cuda

    for shape, type in (MODELS[0], MODELS[2]):
        with ckptkit.load(files(shape, type), device="cuda", context=1024) as model:
            own_steps = kernels_cuda.own_steps
            for how in (
                {"seed": 1},
                {"seed": 2, "top_k": 100, "temp": 1.5},
                {"seed": 3, "logit_bias": {5: float("-inf")}},
            ):
                own = model.generate(PROMPT.tolist(), n_predict=128, **how)
                kernels_cuda.own_steps = lambda *_args: None
                try:
                    host = model.generate(PROMPT.tolist(), n_predict=128, **how)
                finally:
                    kernels_cuda.own_steps = own_steps
                equal = sum(a == b for a, b in zip(own.ids, host.ids, strict=True))
                say(
                    f"  {shape} {type.name} {how}: {equal} of {len(own.ids)} equal; card "
                    f"{own.timings.decode_rate:,.0f} tok/s, host {host.timings.decode_rate:,.0f}"
                )


def perplexity(models: Any, files: Files) -> None:
    """100 windows of 512 ids, all scored, beside the rate of a prompt of 2,048; big models are not written out."""
    shard, options = files.shard(100 * 512 + 1), score.PplOptions(mode="full", n_ctx=512, chunks=100)
    for shape, type in models:
        fast, nll = 0.0, []
        for precision in ("fast", "exact"):
            with runtime.load(random_model(CONFIGS[shape], type), "cuda", precision, context=1024) as model:
                cache, ids = model.new_cache(4, 512), np.tile(np.arange(512), 4)
                rows = np.array([2047])
                once = partial(model.forward_batch, ids + 7, ids, np.repeat(np.arange(4), 512), cache, rows)
                prefill = 2048 / best(once)
                reports: list[Any] = []

                def run(model: Any = model, reports: list[Any] = reports) -> None:
                    reports.extend(score.run(model, shard, options))

                rate = 51200 / best(run, 3)
                nll.append(reports[0].nll)
            fast = fast or rate
            say(
                f"  {shape} {type.name} {precision}: {rate:,.0f} tok/s, {rate / prefill:.2f} of the prefill's "
                f"{prefill:,.0f} without its logits; {rate / fast:.2f} of fast; mean nll {nll[-1]:.6f}"
            )
        if (shape, type) in BIG:
            continue
        times = {}
        for chunks in (4, 100):
            args = ("ppl", files(shape, type), "--text", shard, "--device", "cuda", "--mode", "full", "-c", 512)
            begin = time.perf_counter()
            body = answer(cli(*args, "--chunks", chunks, "--precision", "fast", "--json"))
            times[chunks] = time.perf_counter() - begin
        rate = 96 * 512 / (times[100] - times[4])
        say(
            f"    command, fast: {times[100]:.2f} s for 100 windows, {times[4]:.2f} s for 4: {rate:,.0f} tok/s; "
            f"mean nll {body['nll']:.6f}; |difference fast, exact| {abs(nll[0] - nll[1]):.1e}"
        )


def bench(files: Files) -> None:
    """The command's own tables."""
    for (shape, type), depth in ((MODELS[0], 512), (MODELS[2], 2048), (MODELS[3], 2048)):
        args = ("-p", 512, "-n", 128, "-d", 0, "-d", depth, "-r", 3)
        done = cli("bench", files(shape, type), "--device", "cuda", *args)
        say("  " + (done.stdout.strip().replace("\n", "\n  ") if not done.returncode else said(done)))


def batches(files: Files) -> None:
    """Prompts side by side: each row equal to its single run, by the API on ids and by the command on texts."""
    rng = np.random.default_rng(4)
    for shape, type in (MODELS[2], MODELS[0]):
        with ckptkit.load(files(shape, type), device="cuda", context=512) as model:
            prompts = [rng.integers(1, 50000, n).tolist() for n in (5, 17, 33, 64, 100, 128, 9, 50)]
            for name, sampling in (("greedy", Sampling(temp=0)), ("sampled", Sampling(seed=5))):
                options = GenerateOptions(128, sampling=sampling)
                generate_batch(model, prompts, options, 8)
                begin = time.perf_counter()
                together = generate_batch(model, prompts, options, 8)
                took = time.perf_counter() - begin
                alone = [model.generate(p, n_predict=128, **vars(sampling)) for p in prompts]
                equal = sum(a.ids == b.ids for a, b in zip(together, alone, strict=True))
                took_alone = sum(a.timings.prompt_seconds + a.timings.decode_seconds for a in alone)
                tokens = sum(len(r.ids) for r in together)
                say(
                    f"  {shape} {type.name} {name}: {equal} of 8 rows equal; {tokens / took:,.0f} tok/s together, "
                    f"{tokens / took_alone:,.0f} one after another"
                )
    path = TRAINED / "gpt2_tiny.bin"
    lines = ["ROMEO:", "First", "JULIET: O", "the king", "What", "My lord", "a", "Speak"]
    texts = files.folder / "prompts.txt"
    texts.write_text("\n".join(lines) + "\n")
    common = ("--device", "cuda", "-n", 30, "--temp", 0, "--json")
    together = answer(cli("generate", path, "--prompts", texts, "-b", 8, *common))
    with ckptkit.load(path, device="cuda") as model:
        alone = [model.generate(line, n_predict=30, temp=0.0).ids for line in lines]
    say(f"  command, {path.name}: {sum(t['ids'] == a for t, a in zip(together, alone, strict=True))} of 8 rows equal")


def used() -> float:
    """Megabytes of the card's memory in use, by whomever."""
    free, total = gpu.free_bytes()
    return (total - free) / 1e6


@contextmanager
def running(*args: Any) -> Iterator[subprocess.Popen[str]]:
    """ckptkit in the background; ended if it is still there afterwards."""
    command = [sys.executable, "-m", "ckptkit", *map(str, args)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def interrupted(files: Files) -> None:
    """Ctrl-C while tokens are made: exit code, message, and the card's memory before, during and after."""
    path, before = files("Qwen2-0.5B", QType.BF16), used()
    for name, wait in (("while loading", 0.2), ("while generating", 3.0)):
        with running("generate", path, "--device", "cuda", "--ids", "1,2,3", "-n", 30000, "--temp", 0) as child:
            limit = time.monotonic() + 60
            while used() < before + 200 and child.poll() is None and time.monotonic() < limit:
                time.sleep(0.02)
            time.sleep(wait)
            during = used()
            child.send_signal(signal.SIGINT)
            begin = time.monotonic()
            _, err = child.communicate(timeout=30)
            took = time.monotonic() - begin
        say(
            f"  {name}: exit code {child.returncode} after {took:.2f} s, {err.strip()[-200:]!r}; memory {before:,.0f} "
            f"MB before, {during:,.0f} during, {used():,.0f} after"
        )
    for turn in range(2):
        model = ckptkit.load(path, device="cuda", context=4096)
        stream = iter(model.decode(model.new_cache(), 5, Sampler(Sampling()), [5]))
        next(stream)
        held = used()
        stream.close()
        model.close()
        say(f"  API, turn {turn}: {held:,.0f} MB while a generation is under way, {used():,.0f} after close()")


def refused(files: Files) -> None:
    """What is said where there is no card, too little memory, or no compiler."""
    path = files("Qwen2-0.5B", QType.BF16)
    one = ("generate", path, "--device", "cuda", "--ids", "1,2,3", "-n", 2)
    say("  no device: " + said(cli(*one, CUDA_VISIBLE_DEVICES="")))
    with ckptkit.load(path, device="cuda") as model:
        for n_seq in (1 << 10, 1 << 20):
            try:
                model.new_cache(n_seq)
                say(f"  a cache for {n_seq:,} sequences of 32,768: NOT REFUSED")
            except CkptError as e:
                say(f"  a cache for {n_seq:,} sequences of 32,768: {e}".replace("\n", "\n    "))
    many = ("generate", path, "--device", "cuda", "--ids", "1,2,3", "-n", -1, "-c", 120_000)
    for left, command, what in ((1400, one, "990 MB of weights"), (3500, many, "those and 2,950 MB of cache")):
        held = gpu.empty((gpu.free_bytes()[0] - (left << 20),), np.uint8)
        say(f"  {left:,} MiB left for the driver's own, some 500, and {what}: " + said(cli(*command)))
        del held
    with tempfile.TemporaryDirectory() as cache:
        broken = {"CKPTKIT_CACHE": cache, "CUDA_HOME": "/nonexistent", "CUDA_PATH": "/nonexistent"}
        say("  a compiler that is not where CUDA_HOME says: " + said(cli(*one, **broken)))


def main() -> int:
    """Run the items, each on its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="items whose names contain one of these words, comma-separated")
    parser.add_argument("--big", action="store_true", help="with Qwen2-7B (15 GB of disk)")
    parser.add_argument("--models", default="", help="only shapes and types that contain one of these words")
    parser.add_argument("-n", type=int, default=256, help="tokens to generate")
    args = parser.parse_args()
    for line in machine():
        say(line)
    chosen = [w for w in args.models.split(",") if w] or [""]
    models = [m for m in MODELS + (BIG if args.big else ()) if any(w in f"{m[0]} {m[1].name}" for w in chosen)]
    items: dict[str, Callable[[Files], None]] = {
        "starts": starts,
        "generating": partial(generating, models, args.n),
        "sampled_ids": sampled_ids,
        "perplexity": partial(perplexity, models),
        "bench": bench,
        "batches": batches,
        "interrupted": interrupted,
        "refused": refused,
    }
    words = [w for w in args.only.split(",") if w]
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        for name, item in items.items():
            if words and not any(w in name for w in words):
                continue
            begin = time.perf_counter()
            say(f"{name}:")
            try:
                item(files)
            except Exception:
                say("  FAILED " + traceback.format_exc().strip().replace("\n", "\n  "))
            say(f"  ({time.perf_counter() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

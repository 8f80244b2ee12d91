"""Tokens per second of a loaded model: prompts and single tokens, named as llama-bench names them.

pp512 is a prompt of 512 tokens, logits of the last; tg128 is 128 tokens one after another, each the likeliest after
the one before, as `generate` makes them; "@ d2048" means that as many tokens are in the cache before. Each is run once
to warm up and then `repeat` times. Bytes per second are what decoding must read for a token: weights once, and the
cache up to the middle of the run.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from statistics import mean, stdev
from typing import Any

import numpy as np

from .kv_cache import KVCache, cache_bytes
from .model import Model
from .sampler import Sampler, Sampling


@dataclass(frozen=True)
class Result:
    """One line: `tokens_per_second` is the mean of `samples`, `sd` their standard deviation (0 of one sample)."""

    test: str  # "pp512", "tg128", "tg128 @ d2048"
    tokens_per_second: float
    sd: float
    samples: tuple[float, ...]
    bytes_per_second: float | None = None  # tg only
    bandwidth_share: float | None = None  # of what the device's memory was measured to give; tg only


@dataclass(frozen=True)
class Report:
    """A bench run: what ran where, and its lines."""

    model: str
    types: str
    device: str
    cpu: str  # the processor that ran it: with device cuda the GPU
    threads: int
    precision: str
    cache_types: str
    weight_bytes: int
    parameters: int
    memory_bandwidth: float | None  # bytes per second: reads on the CPU, reads and writes of a copy on a GPU
    results: tuple[Result, ...]


def bench(
    model: Model,
    prompts: Sequence[int] = (512,),
    tokens: Sequence[int] = (128,),
    depths: Sequence[int] = (0,),
    repeat: int = 5,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Time `model` on prompts of every length of `prompts` and runs of every length of `tokens`, at every depth.

    The model's context must hold the deepest of them. `progress` is told each line before it runs.
    """
    longest = max(depths, default=0) + max([*prompts, *tokens], default=1)
    cache = model.new_cache(1, longest)  # refuses what does not fit
    bandwidth = model.kernels.memory_bandwidth(model.work) if hasattr(model.kernels, "memory_bandwidth") else None
    results = []
    for depth in depths:
        suffix = f" @ d{depth}" if depth else ""
        for kind, lengths, run in (("pp", prompts, _prompt), ("tg", tokens, _decode)):
            for n in lengths:
                if n < 1:
                    continue
                name = f"{kind}{n}{suffix}"
                if progress is not None:
                    progress(name)
                samples = _samples(model, cache, depth, repeat, partial(run, model, cache, n), n)
                results.append(_result(model, name, samples, depth + n // 2 if kind == "tg" else None, bandwidth))
    stored = model.load_report.as_stored | {k.split()[0]: v for k, v in model.load_report.copied.items()}
    return Report(
        model=model.checkpoint.source.paths[0].name,
        types=", ".join(sorted(stored, key=lambda k: -stored[k])),
        device=model.device,
        cpu=model.load_report.device_name or cpu_name(),
        threads=model.threads,
        precision=model.precision,
        cache_types=f"{model.type_k}/{model.type_v}",
        weight_bytes=weight_bytes(model),
        parameters=model.checkpoint.n_parameters,
        memory_bandwidth=bandwidth,
        results=tuple(results),
    )


def _samples(
    model: Model, cache: KVCache, depth: int, repeat: int, run: Callable[[], None], n: int
) -> tuple[float, ...]:
    samples = []
    for turn in range(repeat + 1):
        if depth and int(cache.length[0]) < depth:
            model.forward(_ids(model, depth), cache, logits="last")
        cache.truncate(depth)
        start = time.perf_counter()
        run()
        if turn:  # the first one warms up
            samples.append(n / (time.perf_counter() - start))
        cache.truncate(depth)
    return tuple(samples)


def _prompt(model: Model, cache: KVCache, n: int) -> None:
    model.forward(_ids(model, n), cache, logits="last")


def _decode(model: Model, cache: KVCache, n: int) -> None:
    token = int(_ids(model, 1)[0])
    with closing(model.decode(cache, token, Sampler(Sampling(temp=0)), [token])) as steps:
        for _ in islice(steps, n):
            pass


def _ids(model: Model, n: int) -> Any:
    return np.random.default_rng(n).integers(0, model.config.vocab_size, n)


def weight_bytes(model: Model) -> int:
    """Bytes of weights that one token reads: every matrix, the embedding only where it is the output too."""
    tensors, tied = model.checkpoint.tensors, "output.weight" not in model.checkpoint.tensors
    names = [n for n, t in tensors.items() if len(t.shape) == 2 and n.startswith(("blk.", "output."))]
    if tied:
        names.append("token_embd.weight")
    native = model.kernels.NATIVE
    return sum(tensors[n].nbytes if tensors[n].type in native else 4 * tensors[n].n_elements for n in names)


def _result(model: Model, name: str, samples: Iterable[float], depth: int | None, bandwidth: float | None) -> Result:
    samples = tuple(samples)
    average = mean(samples)
    sd = stdev(samples) if len(samples) > 1 else 0.0
    if depth is None:
        return Result(name, average, sd, samples)
    c = model.config
    read = weight_bytes(model)
    read += cache_bytes(c.n_layer, 1, c.n_kv_head, depth, c.head_dim, model.type_k, model.type_v)
    speed = average * read
    return Result(name, average, sd, samples, speed, speed / bandwidth if bandwidth else None)


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        with open("/proc/cpuinfo") as f:  # noqa: PTH123  a pseudo file
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def to_markdown(report: Report) -> str:
    """The table that llama-bench prints, and two columns more."""
    size, parameters = report.weight_bytes / 2**20, report.parameters / 1e6
    lines = [
        "| model | size | params | backend | threads | test | t/s | GB/s | of memory |",
        "| --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for r in report.results:
        speed = f"{r.bytes_per_second / 1e9:.1f}" if r.bytes_per_second else ""
        share = f"{r.bandwidth_share:.0%}" if r.bandwidth_share else ""
        lines.append(
            f"| {report.model} {report.types} | {size:.2f} MiB | {parameters:.2f} M | {report.device} {report.precision} "  # noqa: E501
            f"kv {report.cache_types} | {report.threads} | {r.test} | {r.tokens_per_second:.2f} ± {r.sd:.2f} | {speed} | {share} |"  # noqa: E501
        )
    if report.memory_bandwidth:
        speed = f"{report.memory_bandwidth / 1e9:,.1f} GB/s"
        how = f"read at {speed} by {report.threads} threads" if report.device == "cpu" else f"copied at {speed}"
        lines += ["", f"{report.cpu}; memory {how}"]
    return "\n".join(lines) + "\n"


def to_json(report: Report) -> str:
    """Every field, stable keys."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"


def to_csv(report: Report) -> str:
    """One line a test, the run's facts repeated on each."""
    facts = {k: v for k, v in asdict(report).items() if k != "results"}
    out = io.StringIO()
    lines = [facts | {k: v for k, v in asdict(r).items() if k != "samples"} for r in report.results]
    writer = csv.DictWriter(out, list(lines[0]) if lines else list(facts), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()

"""Decode speed on the card: a 128-token prompt, then greedy steps as replayed graphs, the token fed back on the
card."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit.checkpoint import Checkpoint
from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime import kernels_cuda as k
from ckptkit.runtime import model as m

from .gpu_shapes import CONFIGS, random_model, weight_bytes

COPY_RATE = 4230e9  # bytes/s of a device-to-device copy, read and written, on the H200s measured

GOALS = (
    ("Qwen2-7B", QType.BF16, 250.0), ("Qwen2-7B", QType.Q8_0, 380.0), ("Qwen2-7B", QType.Q4_0, 450.0),
    ("Qwen2-0.5B", QType.BF16, 1700.0), ("Qwen2-0.5B", QType.Q8_0, 1900.0), ("Qwen2-0.5B", QType.Q4_0, 1900.0),
    ("GPT-2 124M", QType.F32, 3000.0), ("GPT-2 124M", QType.BF16, 4300.0),
    ("Qwen2-7B", QType.Q4_K, 0.0), ("Qwen2-7B", QType.Q5_K, 0.0), ("Qwen2-7B", QType.Q6_K, 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What can be tuned without another algorithm."""

    dependent: bool = True
    early: bool = True


def open_model(ck: Checkpoint, context: int, setting: Setting, type_kv: str = "f32") -> m.Model:
    """A Model on the card without the public loader's checks of files."""
    model = m.Model(ck, k, "cuda", "exact", 1, context, type_kv, type_kv, None)
    tune(model, setting)
    return model


def tune(model: m.Model, setting: Setting) -> None:
    """Apply a setting to a loaded model."""
    model.work.early = setting.early
    model.work.dependent = setting.dependent and gpu.card().capability >= (9, 0)


def steps(model: m.Model, start: int, n: int, context: int) -> tuple[float, float, list[int]]:
    """(seconds a step on the card, host seconds a step with every token read, tokens) of n greedy steps from
    `start`."""
    cache = model.new_cache(1, context)
    b = model._batch(1, 1)
    log, log_address = gpu.pinned(4 * (context + 1))
    record = gpu.Buffer(log_address, (context + 1,), np.dtype(np.int32))
    model.work.reach = k.bucket(start + n, context)

    def step() -> None:
        m.forward(model, cache, b, model._head(0))
        k.advance(b, record)

    k.write(b.rows, [0])
    graph = k.capture(step, model.work)

    def reset() -> None:
        k.write(b.tokens, [11])
        k.write(b.pos, [start])
        k.write(b.seq, [0])

    reset()
    k.replay(graph, model.work)
    gpu.sync()
    reset()
    device = gpu.seconds(lambda: [k.replay(graph, model.work) for _ in range(n)], 1) / n
    reset()
    gpu.sync()
    tokens = log.view(np.int32)
    events = [gpu.event(), gpu.event()]
    out = []
    begin = time.perf_counter()
    for i in range(n):  # token i is read while step i + 1 runs
        k.replay(graph, model.work)
        gpu.record(events[i % 2])
        if i:
            gpu.wait(events[(i - 1) % 2])
            out.append(int(tokens[start + i]))
    gpu.sync()
    out.append(int(tokens[start + n]))
    host = (time.perf_counter() - begin) / n
    gpu.forget(graph)
    gpu.release_pinned(log_address)
    return device, host, out


def deep(
    say: Callable[[str], Any], shape: str, depths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32000)
) -> None:
    """BF16 weights after many positions, with float32 and float16 caches and either attention kernel."""
    n, ck = 32, random_model(CONFIGS[shape], QType.BF16)
    c = ck.config
    for type_kv, size in (("f32", 4), ("f16", 2)):
        model = open_model(ck, max(depths) + 2 * n, Setting(), type_kv)
        for depth in depths:
            cached = 2 * size * c.n_layer * c.n_kv_head * c.head_dim * depth
            roof = (weight_bytes(ck) + cached) / COPY_RATE
            for name, deep_from in (("deep", 0), ("short", 1 << 30)):
                model.work.deep_from = deep_from
                device, host, _ = steps(model, depth, n, depth + 2 * n)
                say(
                    f"{shape} BF16 after {depth:,} positions, {type_kv} cache, {name} kernel: "
                    f"{1 / host:,.1f} tok/s with tokens read, {1 / device:,.1f} bare, "
                    f"{roof / device:.3f} of roofline with {cached / 1e6:,.0f} MB of cache (goal 0.75 at 8,192)"
                )
        model.close()
        del model


PROMPTS = (
    ("Qwen2-7B", QType.BF16, 30000), ("Qwen2-7B", QType.Q8_0, 20000), ("Qwen2-7B", QType.Q4_0, 20000),
    ("Qwen2-0.5B", QType.BF16, 100000), ("GPT-2 124M", QType.BF16, 0),
)  # fmt: skip


def prompts(say: Callable[[str], Any], wanted: Any = PROMPTS) -> None:
    """Prompts of 2,048 tokens (1,024 for GPT-2), in both precisions; median of five after two."""
    rng = np.random.default_rng(3)
    for shape, type, goal in wanted:
        ck = random_model(CONFIGS[shape], type)
        n = min(ck.config.context_length, 2048)
        ids = rng.integers(0, ck.config.vocab_size, n)
        model = open_model(ck, n, Setting(), "f16")
        rates = []
        for fast in (True, False):
            model.work.fast = fast
            model.work.known.clear()
            cache = model.new_cache()
            times = []
            for _ in range(7):
                cache.truncate(0)
                begin = time.perf_counter()
                model.forward(ids, cache, logits="last")
                times.append(time.perf_counter() - begin)
            rates.append(n / sorted(times[2:])[2])
        say(
            f"{shape} {type.name}: prompt of {n:,}: {rates[0]:,.0f} tok/s fast (goal {goal:,}), "
            f"{rates[1]:,.0f} exact ({rates[1] / rates[0]:.2f})"
        )
        del model


def run(say: Callable[[str], Any], settings: list[Setting], goals: Any = GOALS, n: int = 128) -> None:
    """Time every goal under every setting."""
    for shape, type, goal in goals:
        begin = time.perf_counter()
        ck = random_model(CONFIGS[shape], type)
        model = open_model(ck, 512, settings[0])
        loaded = time.perf_counter() - begin
        roof = weight_bytes(ck) / COPY_RATE
        for setting in settings:
            tune(model, setting)
            begin = time.perf_counter()
            try:
                device, host, tokens = steps(model, 128, n, 512)
            except Exception as e:  # a setting that cannot run is a result
                say(f"{shape} {type.name} {setting}: {e}"[:400])
                continue
            took = time.perf_counter() - begin
            say(
                f"{shape} {type.name}: {1 / host:,.0f} tok/s with tokens read, {1 / device:,.0f} bare "
                f"({roof / device:.3f} of roofline), "
                f"goal {goal:,.0f}; {setting} load {loaded:.1f} s, took {took:.1f} s, tokens {tokens[:3]}"
            )
        model.close()
        del model

"""Matrix-vector products of the table's models, each under several cuts: what `cuda_plan.cut` is judged by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime.cuda_layout import LAYOUTS
from ckptkit.runtime.cuda_plan import Matvec

from .gpu_decode import COPY_RATE

# name, row length, outputs, norm, act, add
SHAPES = {
    "7B": (
        ("qkv", 3584, 4608, "rms", "", False),
        ("o", 3584, 3584, "", "", True),
        ("ffn", 3584, 18944, "rms", "silu_gate", False),
        ("down", 18944, 3584, "", "", True),
        ("head", 3584, 152064, "rms", "", False),
    ),
    "0.5B": (
        ("qkv", 896, 1152, "rms", "", False),
        ("o", 896, 896, "", "", True),
        ("ffn", 896, 4864, "rms", "silu_gate", False),
        ("down", 4864, 896, "", "", True),
        ("head", 896, 151936, "rms", "", False),
    ),
    "GPT-2": (
        ("qkv", 768, 2304, "layer", "", False),
        ("o", 768, 768, "", "", True),
        ("ffn", 768, 3072, "layer", "gelu_tanh", False),
        ("down", 3072, 768, "", "", True),
        ("head", 768, 50257, "layer", "", False),
    ),
}
TYPES = {
    "7B": (QType.BF16, QType.Q8_0, QType.Q4_0, QType.Q4_K, QType.Q6_K),
    "0.5B": (QType.BF16, QType.Q8_0, QType.Q4_0),
    "GPT-2": (QType.F32, QType.BF16),
}


def candidates(base: Matvec, units: int, processors: int) -> list[tuple[Matvec, int]]:
    """(plan, blocks): the best cuts by a plain count of loads, for each block size, number of blocks and rows of a
    task: three, or two where tasks may have two rows."""
    vectors = LAYOUTS[base.type].vectors(base.n_in)
    rows = 2 if base.act == "silu_gate" else 1
    out: list[tuple[Matvec, int]] = []
    registers = LAYOUTS[base.type].registers
    pairs = (1, 2) if LAYOUTS[base.type].values > 16 else (1,)
    for (threads, per, resident), per_task in product(((256, 1, 2), (256, 2, 2), (512, 1, 1), (128, 4, 4)), pairs):
        blocks = min(units, processors * per)
        found: dict[tuple[int, int], tuple[float, Matvec]] = {}
        for lanes in (32, 16, 8):
            for segments in (1, 2, 4, 8):
                for unroll in range(2, 40 // registers // per_task + 1):
                    plan = replace(
                        base, lanes=lanes, segments=segments, unroll=unroll, threads=threads,
                        blocks_per_sm=resident, per_task=per_task,
                    )  # fmt: skip
                    loads = plan.chunks * unroll
                    if lanes * segments * loads > 1.35 * vectors + lanes or threads // lanes < 1:
                        continue
                    tasks = -(-(-(-units // blocks) * rows) // per_task) * segments
                    cost = -(-tasks // (threads // lanes)) * (loads + 1.5) * (1 + 0.3 / unroll)
                    if (lanes, segments) not in found or cost < found[lanes, segments][0]:
                        found[lanes, segments] = (cost, plan)
        out += [(p, blocks) for _, p in sorted(found.values(), key=lambda f: f[0])[: 4 - len(pairs)]]
    return out


def run(say: Callable[[str], Any], models: list[str], words: list[str]) -> None:
    """Time every candidate in chains over weights that do not fit the L2 cache."""
    processors = gpu.card().processors
    jobs = []
    for model in models:
        for type in TYPES[model]:
            if words and not any(w in f"{model} {type.name}" for w in words):
                continue
            for name, n_in, units, norm, act, add in SHAPES[model]:
                base = Matvec(type, n_in, 32, 1, 1, 256, norm, act, add, False, gpu.card().capability >= (9, 0))
                for plan, blocks in candidates(base, units, processors):
                    jobs.append((model, name, type, units, plan, blocks))
    gpu.load([j[4] for j in jobs])
    pool = gpu.empty((3 << 30,), np.uint8)
    some = gpu.upload((np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(np.float32))
    for at in range(0, pool.nbytes, some.nbytes):
        gpu.copy(pool[at : at + some.nbytes], some)
    x = gpu.upload(np.ones(1 << 16, np.float32))
    y = gpu.zeros((1 << 20,), np.float32)
    best: dict[Any, list[tuple[float, str]]] = {}
    for model, name, type, units, plan, blocks in jobs:
        rows = 2 if plan.act == "silu_gate" else 1
        starts, nbytes = LAYOUTS[type].offsets(units * rows, plan.n_in)
        copies = max(min(pool.nbytes // nbytes, 60, max(10, int(4e8 // nbytes))), 2)

        def chain(
            plan: Matvec = plan,
            starts: list[int] = starts,
            nbytes: int = nbytes,
            copies: int = copies,
            units: int = units,
            blocks: int = blocks,
        ) -> None:
            for c in range(copies):
                planes = [gpu.Address(pool.address + c * nbytes + at) for at in starts]
                args = [
                    *planes,
                    *[None] * (4 - len(planes)),
                    None,
                    x,
                    x if plan.norm else None,
                    None,
                    y,
                    None,
                    units,
                    units,
                    1e-5,
                ]
                gpu.launch(plan, (1, blocks, 1), args, plan.shared_bytes(units, blocks))

        try:
            graph = gpu.capture(chain)
            gpu.replay(graph)
            took = gpu.seconds(lambda graph=graph: gpu.replay(graph), 3) / copies
            gpu.forget(graph)
        except Exception as e:
            say(f"{model} {name} {type.name} {plan}: {e}"[:300])
            continue
        text = f"{took * 1e6:.2f}us {plan.threads}x{blocks} l{plan.lanes} s{plan.segments} u{plan.unroll}"
        text += f" r{plan.per_task}" if plan.per_task > 1 else ""
        best.setdefault((model, name, type.name, nbytes), []).append((took, text))
    for (model, name, type_name, nbytes), found in best.items():
        found.sort()
        roof = nbytes / COPY_RATE
        say(
            f"{model} {name} {type_name}: roof {roof * 1e6:.2f}us ({roof / found[0][0]:.2f}) "
            + " | ".join(t for _, t in found)
        )

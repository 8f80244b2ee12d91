"""Greedy decoding without the host in the way: the card feeds itself, and the host reads token n while step n + 1
runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import cuda_driver as gpu
from . import kernels_cuda

k: Any = kernels_cuda


def greedy_steps(model: Any, cache: Any, token: int) -> Iterator[int]:
    """Feed `token`, yield the largest logit's token, and so on until the cache is full; then return.

    `cache.length` counts what the caller was given; the step that runs ahead is overwritten by whatever comes next.
    """
    from .model import forward

    batch = model._batch(1, 1)
    start, context = int(cache.length[0]), cache.context
    cache.require(0, start)
    tokens, address = gpu.pinned(4 * (context + 1))
    log = gpu.Buffer(address, (context + 1,), np.dtype(np.int32))
    picked = tokens.view(np.int32)
    graphs: dict[int, gpu.Graph] = {}
    marks = [gpu.event(), gpu.event()]

    def launch(position: int) -> None:
        reach = k.bucket(position + 1, context)
        if reach not in graphs:
            model.work.reach = reach

            def step() -> None:
                forward(model, cache, batch, model._head(0))
                k.advance(batch, log)

            gpu.sync()
            graphs[reach] = k.capture(step, model.work)
        k.replay(graphs[reach], model.work)
        gpu.record(marks[position % 2])

    try:
        k.write(batch.rows, [0])
        k.write(batch.seq, [0])
        k.write(batch.tokens, [token])
        k.write(batch.pos, [start])
        launch(start)
        for position in range(start, context):
            if position + 1 < context:
                launch(position + 1)
            gpu.wait(marks[position % 2])
            cache.length[0] = position + 1
            yield int(picked[position + 1])
    finally:
        gpu.sync()
        for graph in graphs.values():
            gpu.forget(graph)
        gpu.release_pinned(address)

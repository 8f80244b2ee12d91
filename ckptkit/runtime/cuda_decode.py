"""Decoding without the host in the way: the card feeds itself, greedy or sampled, and the host reads token n while
step n + 1 runs.

A step picks on the card what sampler.pick would pick from the same logits and the same random number: the numbers that
a sampler will draw are looked up ahead and lie on the card, one for each position. What the card does not do (see
`way_of`) is left to the host's loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from . import cuda_driver as gpu
from . import kernels_cuda

if TYPE_CHECKING:
    from .sampler import Sampler, Sampling

k: Any = kernels_cuda
AHEAD = 512  # positions for which the graphs are made before the first step
NOT_YET, FOR_THE_HOST = -2, -1  # in the log


@dataclass(frozen=True)
class Way:
    """How a step picks: the largest logit (top_k 0) or a draw from the `top_k` largest; never one of `banned`."""

    top_k: int
    banned: tuple[int, ...]


def way_of(s: Sampling) -> Way | None:
    """The card's way to pick, or None for samplings that only the host does: penalties, finite biases, typical, and a
    top-k that is off or beyond what a block ranks."""
    banned = tuple(sorted(t for t, bias in s.logit_bias.items() if bias == -np.inf))
    if s.repeat_penalty != 1 or len(banned) != len(s.logit_bias):
        return None
    if s.temp == 0:
        return Way(0, banned)
    return Way(s.top_k, banned) if 1 <= s.top_k <= k.SAMPLE_MOST and s.typical == 1 else None


class Steps:
    """What the steps of some rows of one cache need, kept with it: buffers, the log that the host reads, graphs."""

    def __init__(self, model: Any, n: int, context: int, way: Way) -> None:
        self.way, self.context = way, context
        self.batch = model._batch(n, n)
        self.graphs: dict[int, gpu.Graph] = {}
        self.marks = [gpu.event(), gpu.event()]
        self.numbers = gpu.empty((n, k.SAMPLE_SETTINGS + context + 1), np.float64) if way.top_k else None
        self.banned = gpu.upload(np.array(way.banned, np.int32)) if way.banned else None
        raw, self.address = gpu.pinned(4 * n * (context + 1))
        self.log = raw.view(np.int32).reshape(n, context + 1)
        self.log_buffer = gpu.Buffer(self.address, self.log.shape, self.log.dtype)

    def graph(self, model: Any, cache: Any, position: int) -> gpu.Graph:
        """The step at a position, recorded when it is first asked for."""
        from .model import forward

        reach = k.bucket(min(position + 1, self.context), self.context)
        if reach not in self.graphs:

            def step() -> None:
                forward(model, cache, self.batch, model._head(0))
                if self.banned is not None:
                    k.ban(self.batch, self.banned)
                if self.numbers is None:
                    k.advance(self.batch, self.log_buffer)
                else:
                    k.sample(self.batch, self.log_buffer, self.numbers, self.way.top_k)

            model.work.reach = reach
            key = ("steps", len(self.log), self.context, reach, self.way)
            if key not in model.work.known:
                k.prepare(step, model.work)
                model.work.known.add(key)
            gpu.sync()
            self.graphs[reach] = gpu.capture(step)
        return self.graphs[reach]

    def begin(
        self, sequences: Sequence[int], tokens: Sequence[int], starts: list[int], samplers: list[Sampler]
    ) -> None:
        """Put the rows where they stand."""
        b = self.batch
        for buffer, values in ((b.rows, range(len(tokens))), (b.seq, sequences), (b.tokens, tokens), (b.pos, starts)):
            k.write(buffer, list(values))
        self.log.fill(NOT_YET)
        if self.numbers is not None:
            numbers = np.zeros(self.numbers.shape)
            for row, sampler, start in zip(numbers, samplers, starts, strict=True):
                s = sampler.sampling
                row[: k.SAMPLE_SETTINGS] = s.temp, s.top_p, s.min_p
                row[k.SAMPLE_SETTINGS + start + 1 :] = sampler.ahead(self.context - start)
            gpu.copy_in(self.numbers, numbers)

    def close(self) -> None:
        """Free everything; nothing may run any more."""
        if self.address:
            address, self.address = self.address, 0
            for graph in self.graphs.values():
                gpu.forget(graph)
            self.graphs.clear()
            for mark in self.marks:
                gpu.forget_event(mark)
            gpu.release_pinned(address)

    def __del__(self) -> None:
        if getattr(self, "address", 0) and gpu.is_open():
            with suppress(UnsupportedError):
                self.close()


def steps_of(model: Any, cache: Any, n: int, way: Way) -> Steps:
    """The cache's steps for n rows."""
    key = ("steps", n, way)
    if key not in cache.graphs:
        cache.graphs[key] = Steps(model, n, cache.context, way)
    steps: Steps = cache.graphs[key]
    return steps


def ready(model: Any, cache: Any, samplers: Sequence[Sampler], start: int) -> None:
    """Record the graphs of the steps that will follow a prompt of `start` tokens, before their time is taken."""
    way = way_of(samplers[0].sampling)
    if way is not None and len(samplers) <= k.COLUMNS:
        steps = steps_of(model, cache, len(samplers), way)
        position, end = start, min(start + AHEAD, cache.context)
        while position < end:
            steps.graph(model, cache, position)
            position = k.bucket(position + 1, cache.context)


def own_steps(
    model: Any, cache: Any, sequences: Sequence[int], tokens: Sequence[int], samplers: list[Sampler],
    histories: Sequence[list[int]],
) -> Iterator[list[tuple[int, int]]] | None:  # fmt: skip
    """Feed each row's token, yield [(row, picked token)] of every step until the cache is full; None if the card does
    not pick in this way. `histories[row]`: the row's tokens so far, for those that the host has to pick after all.

    `cache.length` counts what the caller was given; the step that runs ahead is overwritten by whatever comes next.
    """
    way = way_of(samplers[0].sampling)
    if way is None or len(tokens) > k.COLUMNS:
        return None
    return _run(model, cache, sequences, tokens, samplers, histories, way)


def _run(
    model: Any, cache: Any, sequences: Sequence[int], tokens: Sequence[int], samplers: list[Sampler],
    histories: Sequence[list[int]], way: Way,
) -> Iterator[list[tuple[int, int]]]:  # fmt: skip
    starts, context = [int(cache.length[s]) for s in sequences], cache.context
    for s, start in zip(sequences, starts, strict=True):
        cache.require(s, start)
    steps = steps_of(model, cache, len(tokens), way)
    steps.begin(sequences, tokens, starts, samplers)
    launched = waited = 0
    places = [start + 1 for start in starts]  # where in the log a row's next token will be

    def launch() -> None:
        nonlocal launched
        k.replay(steps.graph(model, cache, max(starts) + launched), model.work)
        gpu.record(steps.marks[launched % 2])
        launched += 1

    try:
        launch()
        while any(place <= context for place in places):
            if waited == launched or any(place < context for place in places):
                launch()
            gpu.wait(steps.marks[waited % 2])
            waited += 1
            picked = []
            for row, place in enumerate(places):
                token = int(steps.log[row, place]) if place <= context else NOT_YET
                if token == NOT_YET:  # full, or a step behind the others
                    continue
                if token == FOR_THE_HOST:  # the step that runs ahead only repeats this one for the row
                    token = _pick_here(steps, row, place, samplers[row], histories[row])
                else:
                    samplers[row].skip()
                places[row] = place + 1
                cache.length[sequences[row]] = place
                picked.append((row, token))
            if picked:
                yield picked
    finally:
        gpu.sync()


def _pick_here(steps: Steps, row: int, place: int, sampler: Sampler, history: list[int]) -> int:
    """Pick a row's token on the host and let its next step begin with it."""
    gpu.sync()
    token = int(sampler.pick(gpu.download(steps.batch.logits[row]), history))
    k.write(steps.batch.tokens[row : row + 1], [token])
    k.write(steps.batch.pos[row : row + 1], [min(place, steps.context - 1)])
    return token

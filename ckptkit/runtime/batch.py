"""Many prompts continued side by side: one forward a step for all of them, each row as it would come out alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from .generate import Collector, GenerateOptions, Generation, check_prompt, without_eos
from .sampler import Sampler

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .model import Model


def generate_batch(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions, n_batch: int = 8
) -> list[Generation]:
    """Continue every prompt, `n_batch` at a time; every row has a random state of its own from the same seed."""
    checked = [check_prompt(model, prompt) for prompt in prompts]
    results: list[Generation] = []
    for lo in range(0, len(checked), n_batch):
        results += _group(model, checked[lo : lo + n_batch], options)
    return results


def _group(model: Model, prompts: list[list[int]], options: GenerateOptions) -> list[Generation]:
    """One group: prompts go in one after another, then a step takes a token of every row that still runs."""
    rows = [Collector(model, prompt, options) for prompt in prompts]
    samplers = [Sampler(without_eos(model, options)) for _ in prompts]
    longest = max(len(row.prompt) + row.limit for row in rows)
    cache = model.new_cache(n_seq=len(rows), context=min(model.context, max(longest, 1)))
    for s, row in enumerate(rows):
        n = len(row.prompt)
        logits = model.forward_batch(row.prompt, np.arange(n), np.full(n, s), cache, [n - 1])[0]
        if row.limit > 0:
            row.take(samplers[s].pick(logits, row.history))
    while running := [s for s, row in enumerate(rows) if not row.reason]:
        _steps(model, cache, running, rows, samplers)
    return [row.finish() for row in rows]


def _steps(model: Model, cache: KVCache, running: list[int], rows: list[Collector], samplers: list[Sampler]) -> None:
    """Decode rows together until half of them have ended, or one that has is full; the others go on without those."""
    left = len(running)
    chosen = [samplers[s] for s in running], [rows[s].history for s in running]
    with closing(model.decode_rows(cache, running, *chosen)) as steps:
        for picked in steps:
            for k, token in picked:
                row = rows[running[k]]
                if not row.reason:
                    row.take(token)
                    left -= bool(row.reason)
            full = any(rows[s].reason and cache.length[s] >= cache.context for s in running)
            if full or 2 * left <= len(running):
                return

"""Many prompts continued side by side: one forward a step for all of them, each row as it would come out alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .generate import Collector, GenerateOptions, Generation, check_prompt, without_eos
from .sampler import Sampler

if TYPE_CHECKING:
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
    logits = {}
    for s, row in enumerate(rows):
        n = len(row.prompt)
        logits[s] = model.forward_batch(row.prompt, np.arange(n), np.full(n, s), cache, [n - 1])[0]
    running = [s for s, row in enumerate(rows) if row.limit > 0]
    while running:
        for s in running:
            rows[s].take(samplers[s].pick(logits[s], rows[s].history))
        running = [s for s in running if not rows[s].reason]
        if running:
            tokens = [rows[s].history[-1] for s in running]
            positions = [len(rows[s].history) - 1 for s in running]
            found = model.forward_batch(tokens, positions, running, cache, np.arange(len(running)))
            logits = dict(zip(running, found, strict=True))
    return [row.finish() for row in rows]

"""Generation as nanoeuler's own program does it: the whole window every time, padded on the left with token 0.

The padding takes part: it is attended to, and positions count from the start of the window. So a short prompt gives
other text than a run that feeds the prompt alone, until the window is full.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from .sampler import Sampler

if TYPE_CHECKING:
    from .model import Model

PAD = 0


def windows(model: Model, prompt: Sequence[int], sampler: Sampler, n_predict: int) -> Generator[int, None, None]:
    """Picked ids, `n_predict` of them or, at -1, without end; every one costs a forward of the whole context."""
    history = list(prompt)
    context = model.config.context_length
    count = 0
    while n_predict < 0 or count < n_predict:
        window = history[-context:]
        ids = [PAD] * (context - len(window)) + window
        token = sampler.pick(model.forward(ids, logits="last"), history)
        history.append(token)
        count += 1
        yield token

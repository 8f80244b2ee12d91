"""-log p of chosen tokens from rows of float32 logits: float64 sums, no more scratch than a few rows a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..parallel import spread

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
BLOCK = 1 << 16  # logits worked on together: what stays in a core's own cache


def blocks(rows: int, n_vocab: int) -> Iterator[slice]:
    """Row ranges whose logits are about BLOCK values; where they are cut changes no row's result."""
    step = max(1, BLOCK // max(n_vocab, 1))
    return (slice(lo, min(lo + step, rows)) for lo in range(0, rows, step))


def over_blocks(work: Callable[[slice], None], rows: int, n_vocab: int, threads: int | None = None) -> None:
    """Call `work` for every block of rows, side by side: numpy lets other threads run while it computes."""
    spread(work, list(blocks(rows, n_vocab)), threads)


def log_sums(z: F32) -> tuple[F32, F64]:
    """Largest logit and log sum exp(logit - largest) of each row of z (rows, n_vocab).

    The exponentials are float32: those that make the sum come from exact differences. The sums are float64.
    """
    top = z.max(axis=1)
    e = z - top[:, None]
    np.exp(e, out=e)
    return top, np.log(e.sum(axis=1, dtype=np.float64))


def nll_rows(z: F32, targets: npt.NDArray[Any], threads: int | None = None) -> F64:
    """-log softmax(z)[row, targets[row]] for each row of z (rows, n_vocab). Not finite where the logits are not."""
    out = np.empty(len(z))

    def work(part: slice) -> None:
        rows = z[part]
        with np.errstate(all="ignore"):
            top, log_sum = log_sums(rows)
            picked = rows[np.arange(len(rows)), targets[part]].astype(np.float64)
            out[part] = log_sum - (picked - top)

    over_blocks(work, len(z), z.shape[1], threads)
    return out


def rank_rows(
    z: F32, targets: npt.NDArray[Any], threads: int | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], F64]:
    """Of each row: how many tokens were thought likelier than the target, plus one; the likeliest token; its nll."""
    rank, best, best_nll = np.empty(len(z), np.int32), np.empty(len(z), np.int32), np.empty(len(z))

    def work(part: slice) -> None:
        rows = z[part]
        with np.errstate(all="ignore"):
            picked = rows[np.arange(len(rows)), targets[part]]
            rank[part] = (rows > picked[:, None]).sum(axis=1) + 1
            best[part] = rows.argmax(axis=1)
            best_nll[part] = log_sums(rows)[1]

    over_blocks(work, len(z), z.shape[1], threads)
    return rank, best, best_nll

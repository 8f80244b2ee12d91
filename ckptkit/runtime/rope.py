"""Cosines and sines of rotary positions, computed once in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arch import rope_divisors
from ..checkpoint import Checkpoint
from ..errors import UnsupportedError


def factors(ck: Checkpoint) -> npt.NDArray[np.float64]:
    """`rope_divisors`, or UnsupportedError for a scaling that is not known."""
    found = rope_divisors(ck)
    if found is None:
        kind = ck.config.rope_scaling.type if ck.config.rope_scaling else ""
        raise UnsupportedError(
            f"rope scaling {kind} is not supported",
            path=ck.source.paths[0],
            expected="none, linear or llama3",
            got=kind,
        )
    if not ((found > 0) & np.isfinite(found)).all():
        raise UnsupportedError(
            "a rotary frequency has a divisor that cannot be", path=ck.source.paths[0], at="rope_freqs.weight",
            expected="positive numbers", got=f"{found.min():g} to {found.max():g}",
        )  # fmt: skip
    return found


def table(ck: Checkpoint, context: int) -> npt.NDArray[np.float32] | None:
    """float32 (context, 2, head_dim / 2): cosines, then sines, of every position; None without rotary positions."""
    c = ck.config
    if not c.rope_pairing:
        return None
    frequency = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim) / factors(ck)
    out = np.empty((context, 2, c.head_dim // 2), np.float32)
    for lo in range(0, context, 4096):  # float64 of one piece at a time
        angle = np.arange(lo, min(lo + 4096, context))[:, None] * frequency
        out[lo : lo + 4096, 0], out[lo : lo + 4096, 1] = np.cos(angle), np.sin(angle)
    return out

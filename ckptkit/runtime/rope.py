"""Cosines and sines of rotary positions, computed once in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..checkpoint import Checkpoint
from ..errors import UnsupportedError

SCALINGS = ("none", "", "linear", "llama3")


def factors(ck: Checkpoint) -> npt.NDArray[np.float64]:
    """Divisor of each rotary frequency (head_dim / 2,): the file's rope_freqs.weight, else by the config's scaling."""
    c = ck.config
    scaling = c.rope_scaling
    kind = scaling.type if scaling is not None else "none"
    if kind not in SCALINGS:
        raise UnsupportedError(
            f"rope scaling {kind} is not supported",
            path=ck.source.paths[0],
            expected="none, linear or llama3",
            got=kind,
        )
    stored = ck.tensors.get("rope_freqs.weight")
    out = np.ones(c.head_dim // 2)
    if scaling is not None and kind in ("linear", "llama3") and (stored is None or kind == "linear"):
        out = scaling.factors(c.head_dim, c.rope_theta).astype(np.float64)
    if stored is not None:
        out = out * stored.read().reshape(-1).view(np.float32)
    return out


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

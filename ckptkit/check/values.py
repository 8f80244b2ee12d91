"""What only the values show: NaN, infinities, and rows of zeros at the end of a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..quant.encode import decode_rows, decode_wide
from ..quant.types import QType
from ..tensor import Tensor
from .finding import Finding, finding

UNDECODED = (QType.Q8_1, QType.Q8_K, QType.Q1_0, QType.Q2_0)  # no decoder here; the first two run nowhere
STEP = 64  # rows of the embedding looked at in one go


def nonfinite(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """The first NaN or infinity of every tensor; reads everything."""
    for name, t in tensors.items():
        for lo, rows in t.chunks(1 << 20) if t.type not in UNDECODED else ():
            bad = ~np.isfinite(decode_wide(rows, t.type))
            if bad.any():
                row = lo + int(bad.any(axis=1).argmax())
                yield finding("nonfinite", f"tensor {name}, row {row:,}", "a value is NaN or infinite",
                              "llama.cpp loads it, and every answer that the value takes part in is NaN",
                              "take an earlier checkpoint")  # fmt: skip
                break


def zero_rows(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Rows of zeros at the end of the output matrix; reads from the end while they last."""
    name = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    t = tensors.get(name)
    if t is None or len(t.shape) != 2 or t.type in UNDECODED:
        return
    lo = t.n_rows
    while lo:
        step = max(lo - STEP, 0)
        filled = np.flatnonzero((decode_rows(t.rows(step, lo), t.type) != 0).any(axis=1))
        if len(filled):
            lo = step + int(filled[-1]) + 1
            break
        lo = step
    if n := t.n_rows - lo:
        yield finding("zero-rows", f"tensor {name}, row {lo:,}", f"the last {n:,} rows are zero",
                      "their logit is 0, which can beat every real token: they would be sampled",
                      "convert again from the source, which leaves padding out")  # fmt: skip

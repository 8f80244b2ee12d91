"""Which elements of a head rotate together, told from the weights: no key of a GGUF says it.

Training gives the two rows that share a frequency of RoPE similar lengths, and rows of distant frequencies different
ones. With rows in half pairing (j, j + h/2) the lengths of those two are alike; with rows in adjacent pairing
(2j, 2j + 1) they stand for distant frequencies, and only neighbours are alike. On SmolLM2-135M (adjacent, 4 layers)
the likeness is 0.82 between neighbours and -0.56 between halves; with its rows in half order, 0.79 and 0.82. Small
models have too few rows to tell, and are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ..arch import ARCHS
from ..formats.gguf import LAYOUTS
from ..formats.gguf_io import Value
from ..formats.gguf_keys import text
from ..quant.encode import decode_rows
from ..tensor import Tensor
from .finding import Finding, finding
from .sizes import Sizes
from .values import UNDECODED

LAYERS, HEADS = 4, 8  # looked at: inner layers (the first is unlike the others), the first heads of each matrix
ENOUGH = 512  # pairs: the likeness of unrelated lengths is then within 0.14 of 0, three standard errors
TOGETHER, APART = 0.4, 0.1


def check(keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Whether the weights speak clearly for another pairing than the arch means."""
    arch = text(keys, "general.architecture")
    sizes = Sizes.of(keys)
    if arch not in LAYOUTS or ARCHS[arch].position != "rope" or not sizes.layers or not sizes.key or sizes.key % 4:
        return
    lengths = [
        _lengths(t, sizes.key)
        for i in sorted({round(k) for k in np.linspace(0, sizes.layers - 1, LAYERS + 2)[1:-1]})
        for part in "qk"
        if (t := tensors.get(f"blk.{i}.attn_{part}.weight")) is not None
        and t.type not in UNDECODED
        and not t.n_rows % sizes.key
    ]
    if not lengths or sum(x.size for x in lengths) // 2 < ENOUGH:
        return
    rows = np.concatenate(lengths)
    half = _likeness(rows[:, : sizes.key // 2], rows[:, sizes.key // 2 :])
    adjacent = _likeness(rows[:, 0::2], rows[:, 1::2])
    found = "half" if half > TOGETHER else "adjacent" if adjacent > TOGETHER and half < APART else ""
    meant = LAYOUTS[arch].rope_pairing
    if found and found != meant:
        yield finding("rope-pairing", "tensor blk.0.attn_q.weight",
                      f"the rows of q and k look like {found} pairs (likeness of their lengths {half:.2f} between "
                      f"halves, {adjacent:.2f} between neighbours); {arch} means {meant} pairs",
                      "it loads and talks nonsense: other elements are rotated together",
                      "convert again from the source; `verify SOURCE FILE` tells for certain")  # fmt: skip


def _lengths(t: Tensor, head: int) -> npt.NDArray[np.float64]:
    """Logarithms of the row lengths of some heads, (heads, head size), less the mean of each head."""
    values = decode_rows(t.rows(0, min(t.n_rows, HEADS * head)), t.type).astype(np.float64)
    with np.errstate(divide="ignore"):
        logs = np.log(np.sqrt((values**2).sum(axis=-1))).reshape(-1, head)
    logs[~np.isfinite(logs)] = 0
    return np.asarray(logs - logs.mean(axis=1, keepdims=True))


def _likeness(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """How alike two sides are, 1 for equal: about the means of heads, so that sides at other levels are not alike."""
    spread = float((a**2).sum() + (b**2).sum())
    return 2 * float((a * b).sum()) / spread if spread else 0.0

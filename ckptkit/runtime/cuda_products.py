"""Products of many tokens: activations normalised and rounded once, weights decoded where they are blocks, then cuBLAS.

`exact`: activations keep their float32 bits. bf16 weights meet them as three bf16 pieces that add up to the value, so the tensor
cores are used all the same; other types are decoded to float32. `fast`: activations are rounded once, to bf16 beside bf16 weights
and f16 beside f16 and block types; float32 weights are multiplied as tf32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..quant.types import QType
from . import cuda_blas
from . import cuda_driver as gpu
from .cuda_driver import Address, Buffer
from .cuda_layout import LAYOUTS
from .cuda_plan import Decode, Finish, Norm
from .cuda_weights import Part, Weight

DECODED = 256 << 20  # bytes of a matrix that are decoded at a time


def scratch(work: Any, name: str, nbytes: int) -> Buffer:
    """A buffer of at least `nbytes` that the work keeps under a name; what it held is gone."""
    old: Buffer | None = work.kept.get(name)
    if old is None or old.nbytes < nbytes:
        work.kept[name] = None
        old = work.kept[name] = gpu.empty((nbytes,), np.uint8)
    return old


def many(
    launch: Any, work: Any, out: Buffer, x: Buffer, norm: Any, weight: Weight, act: str, add: bool, rows: Buffer | None
) -> None:
    """out (n, units) = act(W norm(x) + b), or += with `add`; see `_product` in kernels_cuda.py."""
    n, n_in = len(out), weight.n_in
    total = weight.n_rows
    to = scratch(work, "wide", n * total * 4) if act else out
    ready: dict[QType, Buffer] = {}
    first = 0
    for part in weight.parts:
        kind, pieces = rounding(part.type, work.fast)
        if kind not in ready:
            size = 4 if kind == QType.F32 else 2
            ready[kind] = scratch(work, f"rounded {kind.name}", n * n_in * pieces * size)
            plan = Norm(norm.kind if norm else "", n_in, kind, pieces)
            gain, bias, eps = (norm.gain, norm.bias, float(norm.eps)) if norm else (None, None, 0.0)
            launch(work, plan, (n, 1, 1), [ready[kind], x, gain, bias, rows, eps])
        multiply(launch, work, to, n, first, total, ready[kind], part, kind, pieces, add)
        first += part.n_rows
    if act or weight.bias is not None:
        units = out.shape[1]
        grid = (n, min(-(-units // 256), 64), 1)
        launch(work, Finish(act), grid, [out, to, weight.bias, total, units])


def rounding(type: QType, fast: bool) -> tuple[QType, int]:
    """(type that activations and weights are multiplied in, pieces of an activation)."""
    if type == QType.BF16:
        return QType.BF16, 1 if fast else 3
    if type == QType.F32 or not fast:
        return QType.F32, 1
    return QType.F16, 1


def multiply(
    launch: Any, work: Any, to: Buffer, n: int, first: int, stride: int, x: Buffer, part: Part, kind: QType, pieces: int,
    add: bool,
) -> None:  # fmt: skip
    """Columns first.. of `to` (n, stride) = or += x times the rows of a part."""
    n_in, size = part.n_in, 4 if kind == QType.F32 else 2
    pitch = LAYOUTS[part.type].pitch(0, n_in) // size if part.type == kind else n_in
    step = part.n_rows if part.type == kind else min(max(DECODED // (n_in * size), 1), part.n_rows)
    for lo in range(0, part.n_rows, step):
        hi = min(lo + step, part.n_rows)
        if part.type == kind:
            w = int(part.planes[0])
        else:
            buffer = scratch(work, "decoded", step * n_in * size)
            layout = LAYOUTS[part.type]
            planes = [
                Address(p + lo * layout.pitch(k, n_in)) if k < len(layout.planes) else Address(0)
                for k, p in enumerate(part.planes)
            ]
            launch(work, Decode(part.type, n_in, kind), (hi - lo, 1, 1), [buffer, *planes])
            w = buffer.address
        if work.plans is not None:
            continue
        for s in reversed(range(pieces)):  # the smallest piece first
            cuda_blas.product(
                to.address + (first + lo) * 4, stride, x.address + s * n_in * size, n_in * pieces, w, pitch,
                (n, hi - lo, n_in), kind, add or s < pieces - 1, kind == QType.F32 and work.fast,
            )  # fmt: skip

"""Products of many tokens: activations normalised and rounded once, weights decoded where they are blocks, then cuBLAS.

`exact`: activations keep their float32 bits, and the tensor cores are used all the same. Beside bf16 weights they are
three bf16 pieces that add up to the value. Beside f16 and block types they are two f16 pieces, 22 bits, of a row that
was brought into f16's range by a power of two; blocks are decoded to two f16 pieces too, and the product of both
second pieces, 2^-22 of the whole, is left out. (A block weight beyond f16's 65,504 becomes infinite.) float32 weights
are multiplied in float32. `fast`: activations are rounded once, to bf16 beside bf16 weights and f16 beside f16 and
block types; float32 weights are multiplied as tf32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..quant.types import QType
from . import cuda_blas
from . import cuda_driver as gpu
from .cuda_driver import Address, Buffer
from .cuda_layout import LAYOUTS
from .cuda_plan import PIECE, Decode, Finish, Norm
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
    scaled = any(rounding(part.type, work.fast)[:2] == (QType.F16, 2) for part in weight.parts)
    to = scratch(work, "wide", n * total * 4) if act or scaled else out
    factors = scratch(work, "factors", n * 4) if scaled else None
    ready: dict[QType, Buffer] = {}
    first = 0
    for part in weight.parts:
        kind, pieces, _ = rounding(part.type, work.fast)
        if kind not in ready:
            size = 4 if kind == QType.F32 else 2
            ready[kind] = scratch(work, f"rounded {kind.name}", n * n_in * pieces * size)
            plan = Norm(norm.kind if norm else "", n_in, kind, pieces, scaled)
            gain, bias, eps = (norm.gain, norm.bias, float(norm.eps)) if norm else (None, None, 0.0)
            launch(work, plan, (n, 1, 1), [ready[kind], x, gain, bias, rows, factors, eps])
        multiply(launch, work, to, n, first, total, ready[kind], part, kind, pieces, add and not scaled)
        first += part.n_rows
    if act or scaled or weight.bias is not None:
        units = out.shape[1]
        grid = (n, min(-(-units // 256), 64), 1)
        launch(work, Finish(act, scaled, add and scaled), grid, [out, to, weight.bias, factors, total, units])


def rounding(type: QType, fast: bool) -> tuple[QType, int, int]:
    """(type that activations and weights are multiplied in, pieces of an activation, pieces of a weight)."""
    if type == QType.F32:
        return QType.F32, 1, 1
    if type == QType.BF16:
        return QType.BF16, 1 if fast else 3, 1
    return QType.F16, 1 if fast else 2, 1 if fast or type == QType.F16 else 2


def multiply(
    launch: Any, work: Any, to: Buffer, n: int, first: int, stride: int, x: Buffer, part: Part,
    kind: QType, pieces: int, add: bool,
) -> None:  # fmt: skip
    """Columns first.. of `to` (n, stride) = or += x times the rows of a part."""
    n_in, size = part.n_in, 4 if kind == QType.F32 else 2
    plain = part.type == kind
    parted = rounding(part.type, work.fast)[2]
    pitch = LAYOUTS[part.type].pitch(0, n_in) // size if plain else n_in
    # whole 256s of rows, since results that are not aligned would cost the tensor cores
    step = part.n_rows if plain else min(max(DECODED // (n_in * size) // 256, 1) * 256, part.n_rows)
    # pairs of pieces that matter, the smallest products first
    pairs = sorted(((i, j) for i in range(pieces) for j in range(parted) if i * j == 0), key=sum, reverse=True)
    for lo in range(0, part.n_rows, step):
        hi = min(lo + step, part.n_rows)
        if plain:
            w, rest = int(part.planes[0]), 0
        else:
            buffer = scratch(work, "decoded", step * n_in * size * parted)
            w, rest = buffer.address, buffer.address + step * n_in * size
            layout = LAYOUTS[part.type]
            planes = [
                Address(p + lo * layout.pitch(k, n_in)) if k < len(layout.planes) else Address(0)
                for k, p in enumerate(part.planes)
            ]
            launch(work, Decode(part.type, n_in, kind, parted), (hi - lo, 1, 1), [buffer, Address(rest), *planes])
        if work.plans is not None:
            continue
        for number, (i, j) in enumerate(pairs):
            cuda_blas.product(
                to.address + (first + lo) * 4, stride, x.address + i * n_in * size, n_in * pieces,
                rest if j else w, pitch, (n, hi - lo, n_in), kind, add or number > 0, kind == QType.F32 and work.fast,
                PIECE ** -(i + j) if kind == QType.F16 else 1.0,
            )  # fmt: skip

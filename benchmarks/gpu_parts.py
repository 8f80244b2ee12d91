"""Where a prompt's time goes: decoding a matrix, the product, attention, each alone at a 7B model's sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_blas
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime.cuda_layout import LAYOUTS
from ckptkit.runtime.cuda_plan import Decode, Finish, Flash, Flash16, Norm


def run(say: Callable[[str], Any], n: int = 2048, n_in: int = 3584, rows: int = 18944) -> None:
    """Milliseconds of each part."""
    rng = np.random.default_rng(0)
    blocks = gpu.upload(rng.integers(0, 120, rows * n_in * 2, np.uint8))
    out = gpu.zeros((rows * n_in * 4,), np.uint8)
    x = gpu.upload(rng.standard_normal((n, n_in), np.float32))
    y = gpu.zeros((n * rows * 4,), np.uint8)

    def time(what: str, fn: Callable[[], Any]) -> None:
        fn()
        gpu.sync()
        say(f"{what}: {gpu.seconds(fn) * 1e3:.3f} ms")

    for type in (QType.Q4_0, QType.Q8_0):
        starts, _ = LAYOUTS[type].offsets(rows, n_in)
        planes = [gpu.Address(blocks.address + s) for s in starts] + [gpu.Address(0)] * (4 - len(starts))
        for to, pieces in ((QType.F16, 1), (QType.BF16, 2)):
            plan = Decode(type, n_in, to, pieces)
            args = [out, gpu.Address(out.address + rows * n_in * 2), *planes]
            time(f"decode {type.name} to {to.name} x{pieces}", lambda p=plan, a=args: gpu.launch(p, (rows, 1, 1), a))
    for to in (QType.F16, QType.BF16):
        time(
            f"round to {to.name}",
            lambda to=to: gpu.launch(Norm("rms", n_in, to), (n, 1, 1), [out, x, None, None, None, None, 1e-5]),
        )
        gpu.launch(Norm("", n_in, to), (n, 1, 1), [out, x, None, None, None, None, 1e-5])
        sizes = (n, rows, n_in)
        time(
            f"product {sizes} {to.name}",
            lambda to=to, s=sizes: cuda_blas.product(
                y.address, rows, out.address, n_in, blocks.address, n_in, s, to, False
            ),
        )
    time("finish silu", lambda: gpu.launch(Finish("silu_gate"), (n, 64, 1), [out, y, None, None, rows, rows // 2]))
    qkv, cache = gpu.zeros((n, 4608), np.float32), gpu.zeros((4 * n * 128,), np.float32)
    pos, seq = gpu.upload(np.arange(n, dtype=np.int32)), gpu.zeros((n,), np.int32)
    table = gpu.zeros((n, 2, 64), np.float32)
    for plan in (Flash(28, 4, 128, 128, 2, False, False), Flash16(28, 4, 128, 128, 2, False, False)):
        args = [out, qkv, table, cache, cache, pos, seq, n, n, 0.1]
        time(type_name(plan), lambda p=plan, a=args: gpu.launch(p, (28, n // 64, 1), a, p.shared_bytes))


def type_name(plan: Any) -> str:
    """The kernel's name."""
    return type(plan).__name__

"""What the threads of a warp do together. Each takes the values of lanes 0..31 and gives what each lane gets.

Layouts of fragments: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type", "... mma.m16n8k8", and
"Warp-level matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .access import region_of
from .memory import Fault
from .threads import Machine

Joint = Callable[[Machine, list[Any]], list[Any]]
LANE = np.arange(32)
GROUP, PLACE = LANE // 4, LANE % 4  # of a lane in a fragment
FULL = 0xFFFFFFFF


def shuffle(source: Callable[[int, int], int]) -> Joint:
    """shfl.sync: lane l gets the value of lane source(l, argument); its own where there is none."""

    def shuffled(_m: Machine, given: list[Any]) -> list[Any]:
        if any(mask != FULL for mask, _, _ in given):
            raise Fault("a shuffle of some lanes only")
        out = []
        for lane, (_, value, argument) in enumerate(given):
            other = source(lane, argument)
            out.append(given[other][1] if 0 <= other < 32 else value)
        return out

    return shuffled


shuffle_xor = shuffle(lambda lane, mask: lane ^ mask)
shuffle_down = shuffle(lambda lane, delta: lane + delta)
shuffle_up = shuffle(lambda lane, delta: lane - delta)
shuffle_index = shuffle(lambda _lane, source: source)


def ldmatrix(count: int, transposed: bool) -> Joint:
    """`count` matrices of 8 x 8 halves, whose rows are at the addresses of eight lanes each."""

    def load(m: Machine, given: list[Any]) -> list[Any]:
        rows = np.empty((8 * count, 8), np.uint16)
        for lane in range(8 * count):
            region, offset = region_of(m, given[lane][0], 16)
            m.tid, m.me = m.tid & ~31 | lane, m.me & ~31 | lane
            m.touch(region, offset >> 2, 4, False)
            rows[lane] = region.data.halves[offset // 2 : offset // 2 + 8]
        matrices = rows.reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        low, high = (matrices[:, GROUP, 2 * PLACE + k].astype(np.uint32) for k in (0, 1))
        return list(map(tuple, (low | high << np.uint32(16)).T.tolist()))

    return load


def halves(registers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Registers (..., 32) of two halves each as float32 (..., 32, 2), the low one first."""
    return np.ascontiguousarray(registers)[..., None].view(np.float16).astype(np.float32)


def mma(k: int, halved: bool) -> Joint:
    """mma.m16n8k16 of f16 or mma.m16n8k8 of tf32: D = A B + C, sums in float32."""
    per = 2 if halved else 1  # values of a register

    def multiply(_m: Machine, given: list[Any]) -> list[Any]:
        words = np.array([[int(x) for x in lane[:6]] for lane in given], np.uint32).T  # (register, lane)
        values = halves(words) if halved else (words & 0xFFFFE000).view(np.float32)[..., None]
        a, b, c = np.empty((16, k), np.float32), np.empty((k, 8), np.float32), np.empty((16, 8), np.float32)
        sums = np.array([lane[6:] for lane in given], np.float32).T
        for e in range(per):
            column = PLACE * per + e
            for r in range(4):  # rows of the upper and the lower half, then the columns on the right
                a[GROUP + 8 * (r % 2), column + k // 2 * (r // 2)] = values[r, :, e]
            for r in range(2):
                b[column + k // 2 * r, GROUP] = values[4 + r, :, e]
        for r in range(4):
            c[GROUP + 8 * (r // 2), 2 * PLACE + r % 2] = sums[r]
        d = a @ b + c
        return list(zip(*(d[GROUP + 8 * (r // 2), 2 * PLACE + r % 2] for r in range(4)), strict=True))

    return multiply

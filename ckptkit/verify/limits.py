"""How far a stored value may be from its source: derived from the step of the type it is stored in.

A block type stores whole steps between its smallest and largest value. The error is at most half a step, a whole one at
the end that a signed range lacks (Q4_0 has -8 but no +8), plus the rounding of the float16 scale. K-quants choose their
scales for the least squared error, and round those to a few bits, so one whole step of the super-block is allowed.

type                     block  error allowed, as a share of the block's largest magnitude
F16, BF16, F32               1  half a unit in the last place: 2^-11, 2^-8, 2^-24
Q8_0                        32  0.5 / 127
Q4_0, Q5_0                  32  1 / 8, 1 / 16: the missing end
Q4_1, Q5_1                  32  half of 2 / 15, of 2 / 31
Q2_K Q3_K Q4_K Q5_K Q6_K   256  2 / 3, 1 / 3, 1 / 6, 1 / 12, 1 / 31
others                     256  1: nothing is known of how they were chosen
"""

from __future__ import annotations

from dataclasses import dataclass

from ..quant.types import QType

HALF = 2.0**-11  # relative rounding of a float16 scale
TINY = 2.0**-25  # absolute rounding of a subnormal float16


@dataclass(frozen=True)
class Limit:
    """|error| <= relative x largest magnitude among `block` neighbours + floor."""

    block: int
    relative: float
    floor: float = 0.0

    def __str__(self) -> str:
        where = "each value" if self.block == 1 else f"the largest in each block of {self.block}"
        return f"{100 * self.relative:.2g}% of {where}"


LIMITS: dict[QType, Limit] = {
    QType.F64: Limit(1, 0.0),
    QType.F32: Limit(1, 2.0**-24, 2.0**-150),
    QType.F16: Limit(1, HALF, TINY),
    QType.BF16: Limit(1, 2.0**-8, 2.0**-134),
    QType.Q8_0: Limit(32, 0.5 / 127 + HALF, 127 * TINY),
    QType.Q4_0: Limit(32, 1 / 8 + HALF, 8 * TINY),
    QType.Q5_0: Limit(32, 1 / 16 + HALF, 16 * TINY),
    QType.Q4_1: Limit(32, 1 / 15 + 3 * HALF, 16 * TINY),
    QType.Q5_1: Limit(32, 1 / 31 + 3 * HALF, 32 * TINY),
    QType.Q2_K: Limit(256, 2 / 3, 64 * TINY),
    QType.Q3_K: Limit(256, 1 / 3, 128 * TINY),
    QType.Q4_K: Limit(256, 1 / 6, 1024 * TINY),
    QType.Q5_K: Limit(256, 1 / 12, 2048 * TINY),
    QType.Q6_K: Limit(256, 1 / 31, 4096 * TINY),
}
UNKNOWN = Limit(256, 1.0, 4096 * TINY)

# Mean KL divergence (nats a token) beyond which predictions count as changed, by the coarsest type in use.
KL_LIMITS: dict[QType, float] = {
    QType.F16: 1e-3, QType.BF16: 1e-2, QType.Q8_0: 1e-2, QType.Q6_K: 2e-2, QType.Q5_0: 5e-2, QType.Q5_1: 5e-2,
    QType.Q5_K: 5e-2, QType.Q4_0: 0.2, QType.Q4_1: 0.2, QType.Q4_K: 0.2, QType.Q3_K: 0.5, QType.Q2_K: 2.0,
}  # fmt: skip
COARSE_KL = 2.0
EXACT_LOGP = 2e-4  # |d log p| between two float32 computations of the same weights in another order


def limit_of(type: QType) -> Limit:
    """The limit of a type; for float64 sources the other side's rounding is the whole of it."""
    return LIMITS.get(type, UNKNOWN)

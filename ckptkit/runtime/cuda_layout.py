"""How each weight type lies on the card: planes of aligned vectors, split from the file's blocks at upload.

A stored block mixes scales and quants (34 bytes for Q8_0), so 16-byte loads of it would straddle blocks. On the card
the quants of a matrix form plane 0, read in 16-byte vectors, and the scales form planes of their own, read beside it.

| type      | weights per vector | plane 0        | plane 1                   | plane 2            | plane 3        |
|-----------|--------------------|----------------|---------------------------|--------------------|----------------|
| F32       | 4                  | as stored      |                           |                    |                |
| F16, BF16 | 8                  | as stored      |                           |                    |                |
| Q8_0      | 16                 | int8           | f16 scale per 32          |                    |                |
| Q4_0      | 32                 | nibbles        | f16 scale per 32          |                    |                |
| Q4_1      | 32                 | nibbles        | f16 scale, f16 min per 32 |                    |                |
| Q5_0      | 32                 | low nibbles    | f16 scale per 32          | high bits          |                |
| Q5_1      | 32                 | low nibbles    | f16 scale, f16 min per 32 | high bits          |                |
| Q4_K      | 32                 | nibbles        | u8 scale, u8 min per 32   | f16 d, dmin per 256 |               |
| Q5_K      | 32                 | low nibbles    | u8 scale, u8 min per 32   | f16 d, dmin per 256 | high bits     |
| Q6_K      | 32                 | low nibbles    | int8 scale per 16         | f16 d per 256      | high bits      |

Word q of a vector of nibbles holds weights 8q..8q+7, nibble e of weight e. What a weight has above its nibble, `high`
bits of it, lies in words of 32 / high weights: of weight e of the first eight at bits 4e + 4, where it belongs when the
word is laid over the nibbles, of the next eight `high` bits further up, and so on, all modulo 32.

A nibble is a number where it lies: bits 4e.. of a word whose other bits are masked away are the float32 u 2^(4e - 149),
subnormal and exact, which the card multiplies as fast as any other. SCALED activations are staged multiplied by what
makes products of all of them alike, 2^-64 of their value: 2^(85 - 4 (e % 4)) leaves room for activations up to 2^42.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..quant.types import QType


@dataclass(frozen=True)
class Plane:
    """`nbytes` for every `per` weights of a row."""

    nbytes: int
    per: int


@dataclass(frozen=True)
class Layout:
    """`values` weights in one 16-byte vector of plane 0, which comes first in `planes`.

    `registers` hold a vector and its scales, the words of `high` bits of each weight last. Activations meet it
    multiplied by factors[e % 4], which makes the product `scale` of its value; where that is not 1, the sum of every 16
    activations, in the same scale, is kept beside them.
    """

    values: int
    planes: tuple[Plane, ...]
    registers: int = 4
    factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    scale: float = 1.0
    high: int = 0

    def vectors(self, n_in: int) -> int:
        """16-byte vectors of a row; the last one is filled up with zeros."""
        return -(-n_in // self.values)

    def pitch(self, plane: int, n_in: int) -> int:
        """Bytes from a row to the next in a plane."""
        p = self.planes[plane]
        return 16 * self.vectors(n_in) if plane == 0 else n_in // p.per * p.nbytes

    def offsets(self, n_rows: int, n_in: int) -> tuple[list[int], int]:
        """Where each plane of a matrix begins (multiples of 256 bytes), and the bytes of all."""
        at, out = 0, []
        for k in range(len(self.planes)):
            out.append(at)
            at += -(-n_rows * self.pitch(k, n_in) // 256) * 256
        return out, at


SCALED = (2.0**85, 2.0**81, 2.0**77, 2.0**73), 2.0**-64
LAYOUTS: dict[QType, Layout] = {
    QType.F32: Layout(4, (Plane(16, 4),)),
    QType.F16: Layout(8, (Plane(16, 8),)),
    QType.BF16: Layout(8, (Plane(16, 8),)),
    QType.Q8_0: Layout(16, (Plane(16, 16), Plane(2, 32)), 5),
    QType.Q4_0: Layout(32, (Plane(16, 32), Plane(2, 32)), 5, *SCALED),
    QType.Q4_1: Layout(32, (Plane(16, 32), Plane(4, 32)), 5, *SCALED),
    QType.Q5_0: Layout(32, (Plane(16, 32), Plane(2, 32), Plane(4, 32)), 6, *SCALED, 1),
    QType.Q5_1: Layout(32, (Plane(16, 32), Plane(4, 32), Plane(4, 32)), 6, *SCALED, 1),
    QType.Q4_K: Layout(32, (Plane(16, 32), Plane(2, 32), Plane(4, 256)), 6, *SCALED),
    QType.Q5_K: Layout(32, (Plane(16, 32), Plane(2, 32), Plane(4, 256), Plane(4, 32)), 7, *SCALED, 1),
    QType.Q6_K: Layout(32, (Plane(16, 32), Plane(2, 32), Plane(2, 256), Plane(8, 32)), 8, *SCALED, 2),
}

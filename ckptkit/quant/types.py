"""ggml tensor types: one row per type (block layout: ggml-common.h of llama.cpp; FORMATS.md of the GGUF specification).

A tensor row is a whole number of blocks: `elements` consecutive values in `nbytes` bytes. The numbers are ggml's type
ids, judged against the `gguf` package by tests/test_types.py, and not imported from it because that import takes 0.4 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class QType(IntEnum):
    """ggml type ids. F32 is 0: test `is None`, never truth."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


@dataclass(frozen=True)
class Block:
    """Size of one block: `elements` values in `nbytes` bytes."""

    elements: int
    nbytes: int


BLOCKS: dict[QType, Block] = {
    QType.F32: Block(1, 4),
    QType.F16: Block(1, 2),
    QType.BF16: Block(1, 2),
    QType.F64: Block(1, 8),
    QType.I8: Block(1, 1),
    QType.I16: Block(1, 2),
    QType.I32: Block(1, 4),
    QType.I64: Block(1, 8),
    QType.Q4_0: Block(32, 18),
    QType.Q4_1: Block(32, 20),
    QType.Q5_0: Block(32, 22),
    QType.Q5_1: Block(32, 24),
    QType.Q8_0: Block(32, 34),
    QType.Q8_1: Block(32, 40),
    QType.Q2_K: Block(256, 84),
    QType.Q3_K: Block(256, 110),
    QType.Q4_K: Block(256, 144),
    QType.Q5_K: Block(256, 176),
    QType.Q6_K: Block(256, 210),
    QType.Q8_K: Block(256, 292),
    QType.IQ2_XXS: Block(256, 66),
    QType.IQ2_XS: Block(256, 74),
    QType.IQ3_XXS: Block(256, 98),
    QType.IQ1_S: Block(256, 50),
    QType.IQ4_NL: Block(32, 18),
    QType.IQ3_S: Block(256, 110),
    QType.IQ2_S: Block(256, 82),
    QType.IQ4_XS: Block(256, 136),
    QType.IQ1_M: Block(256, 56),
    QType.TQ1_0: Block(256, 54),
    QType.TQ2_0: Block(256, 66),
    QType.MXFP4: Block(32, 17),
    QType.NVFP4: Block(64, 36),
    QType.Q1_0: Block(128, 18),
    QType.Q2_0: Block(64, 18),
}

PLAIN = (QType.F32, QType.F16, QType.BF16, QType.F64)  # one element a block: transposable, padding is zero bytes


def row_bytes(type: QType, elements: int) -> int:
    """Bytes of a tensor row of `elements` values; `elements` must be a whole number of blocks."""
    block = BLOCKS[type]
    assert elements % block.elements == 0, (type, elements)
    return elements // block.elements * block.nbytes

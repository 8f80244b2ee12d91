"""The kernels' types. Integers are Python's, which hold what 64 bits would; a cast cuts them to size."""

from __future__ import annotations

from typing import Any

import numpy as np

f32, f64 = np.float32, np.float64


def i32(x: Any) -> int:
    """As a signed 32-bit integer, wrapped."""
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def u16(x: int) -> int:
    """The low 16 bits."""
    return x & 0xFFFF


def u32(x: int) -> int:
    """The low 32 bits."""
    return x & 0xFFFFFFFF


def u64(x: int) -> int:
    """The low 64 bits."""
    return x & 0xFFFFFFFFFFFFFFFF


_one = np.zeros(1, np.float32)
_bits, _half = _one.view(np.uint32), np.zeros(1, np.float16)
_half_bits = _half.view(np.uint16)
HALVES = list(np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32))


def to_float(bits: int) -> np.float32:
    """The float of 32 bits."""
    _bits[0] = bits
    return _one[0]


def to_bits(x: np.float32) -> int:
    """The 32 bits of a float."""
    _one[0] = x
    return _bits.item(0)


def to_half(x: np.float32) -> int:
    """The 16 bits of a float rounded to the nearest half, ties to even."""
    _half[0] = x
    return _half_bits.item(0)

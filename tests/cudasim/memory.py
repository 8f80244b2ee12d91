"""Memory of the simulated card, every access checked: inside an allocation, aligned, and ordered after the stores it
depends on.

What was never written is NaN (all bits set). A load that races with a store of another thread gives JUNK, so that a
kernel may load what it then ignores; a store that races with another one of a different value is a Fault, and so is
every race in shared memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SLACK = 256  # bytes behind every buffer that loads may reach: cuda_driver.empty allots them for clamped vector loads
JUNK = 0x7A007A00  # a large number of every type, so that it may be multiplied by zero but never used


class Fault(AssertionError):
    """What a kernel must not do."""


class Bytes:
    """Bytes seen as every type; `readable` and `writable` of them from the start on."""

    def __init__(self, raw: np.ndarray[Any, Any], readable: int, writable: int) -> None:
        self.raw, self.readable, self.writable = raw, readable, writable
        whole = memoryview(raw)[: raw.size // 16 * 16]
        self.floats, self.words = raw[: raw.size // 16 * 16].view(np.float32), whole.cast("I")
        self.doubles, self.quads = self.floats.view(np.float64), whole.cast("Q")
        self.signed, self.halves, self.octets = whole.cast("i"), whole.cast("H"), whole
        self.marks: dict[int, tuple[int, int, int, int, int]] = {}  # byte offset: who stored there last


def fresh(size: int) -> np.ndarray[Any, Any]:
    """Bytes that nothing was written to."""
    return np.full(-(-size // 16) * 16, 255, np.uint8)


class Memory:
    """Global memory: an allocation has the upper 32 bits of its addresses to itself, so no access out of one reaches
    another."""

    def __init__(self) -> None:
        self.spaces: dict[int, Bytes] = {}
        self.pinned: dict[int, Bytes] = {}  # host memory, at its own addresses
        self.next = 1 << 20  # above every host address

    def allocate(self, size: int) -> int:
        """Address of `size` bytes, the last SLACK of which are not for stores."""
        key, self.next = self.next, self.next + 1
        self.spaces[key] = Bytes(fresh(size), size, size - SLACK)
        return key << 32

    def free(self, address: int) -> None:
        """Give an allocation back; later accesses to it are faults."""
        del self.spaces[address >> 32]

    def look(self, address: int, size: int, store: bool = False) -> tuple[Bytes, int]:
        """(allocation, offset) of an access that must lie in one and be aligned."""
        space, offset = self.spaces.get(address >> 32), address & 0xFFFFFFFF
        for base, host in self.pinned.items():
            if base <= address < base + host.readable:
                space, offset = host, address - base
        if space is None:
            raise Fault(f"no allocation at address {address:#x}")
        if offset + size > (space.writable if store else space.readable):
            raise Fault(
                f"{'store' if store else 'load'} of {size} bytes at offset {offset:,} of an allocation of "
                f"{space.writable:,} (and {space.readable - space.writable} for loads)"
            )
        if offset % size and size <= 16:
            raise Fault(f"access of {size} bytes at offset {offset:,} is not aligned")
        return space, offset

    def span(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """`size` bytes that a copy works on."""
        key = self.spaces.get(address >> 32)
        assert key is not None, f"copy at {address:#x}"
        offset = address & 0xFFFFFFFF
        assert offset + size <= key.readable, (offset, size, key.readable)
        return key.raw[offset : offset + size]


class Region:
    """One array of a block's shared memory, with who touched each word last.

    A stamp is (barriers passed by blocks) << 31 | (barriers passed by the warp) << 11 | thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = Bytes(fresh(max(size, 16)), size, size)
        n = len(self.data.words)
        self.wrote, self.read = [-1] * n, [-1] * n

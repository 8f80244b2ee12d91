"""Loads and stores of one width, made for a machine: what ld, st, atom and cp.async become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .casts import to_float
from .memory import JUNK, Bytes, Fault, Region
from .threads import Machine

# PTX type: which view of the bytes, bytes of one, what a load gives that lost a race
TYPES: dict[str, tuple[str, int, Any]] = {
    "f64": ("doubles", 8, 1e300), "f32": ("floats", 4, to_float(JUNK)),
    "u32": ("words", 4, JUNK), "b32": ("words", 4, JUNK), "s32": ("signed", 4, JUNK),
    "u16": ("halves", 2, JUNK & 0xFFFF), "b16": ("halves", 2, JUNK & 0xFFFF), "u8": ("octets", 1, 0xFF),
}  # fmt: skip


def load_global(m: Machine, type: str, count: int) -> Callable[[int], Any]:
    """ld.global: a value, or a tuple of `count`."""
    view, each, junk = TYPES[type]
    size, spaces, look = each * count, m.memory.spaces, m.memory.look
    shift, loaded = each.bit_length() - 1, m.loaded

    def load(address: int) -> Any:
        address &= 0xFFFFFFFFFFFFFFFF
        space, offset = spaces.get(address >> 32), address & 0xFFFFFFFF
        if space is None or offset + size > space.readable or offset % size:
            space, offset = look(address, size)
        at = offset >> shift
        if count == 1:
            value = getattr(space, view)[at]
            return loaded(space, offset, size, [value], junk)[0] if space.marks else value
        values = list(getattr(space, view)[at : at + count])
        return loaded(space, offset, size, values, junk) if space.marks else values

    return load


def store_global(m: Machine, type: str, count: int) -> Callable[..., None]:
    """st.global of `count` values."""
    view, each, _ = TYPES[type]
    size, look, cut = each * count, m.memory.look, (1 << 8 * each) - 1
    shift, storing, bits = each.bit_length() - 1, m.storing, {8: "quads", 4: "words", 2: "halves", 1: "octets"}[each]

    def store(address: int, *values: Any) -> None:
        space, offset = look(address, size, True)
        array, raw = getattr(space, view), getattr(space, bits)
        for i in range(count):
            at, value = (offset >> shift) + i, values[i]
            before = raw[at]
            array[at] = value if view in ("floats", "doubles", "signed") else value & cut
            storing(space, offset + i * each, before == raw[at])

    return store


def atomic(m: Machine, change: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """atom.global on a word: the old value; blocks that use the same address meet there."""

    def op(address: int, value: int) -> int:
        space, offset = m.memory.look(address, 4, True)
        old: int = space.words[offset >> 2]
        space.words[offset >> 2] = change(old, value & 0xFFFFFFFF) & 0xFFFFFFFF
        m.meet_others(address)
        return old

    return op


def region_of(m: Machine, address: int, size: int) -> tuple[Region, int]:
    """(shared array, offset) of an address in the shared window."""
    k, offset = (address >> 24 & 255) - 1, address & 0xFFFFFF
    if not 0 <= k < len(m.regions) or offset + size > m.regions[k].size:
        have = m.regions[k].size if 0 <= k < len(m.regions) else 0
        raise Fault(f"access of {size} bytes at offset {offset:,} of {have:,} bytes of shared memory")
    if offset % min(size, 16):
        raise Fault(f"access of {size} bytes at offset {offset:,} of shared memory is not aligned")
    return m.regions[k], offset


def load_shared(m: Machine, type: str, count: int) -> Callable[[int], Any]:
    """ld.shared: a value, or a list of `count`."""
    view, each, _ = TYPES[type]
    size, shift = each * count, each.bit_length() - 1

    def load(address: int) -> Any:
        region, offset = region_of(m, address, size)
        m.touch(region, offset >> 2, max(size // 4, 1), False)
        array, at = getattr(region.data, view), offset >> shift
        return array[at] if count == 1 else list(array[at : at + count])

    return load


def store_shared(m: Machine, type: str, count: int) -> Callable[..., None]:
    """st.shared of `count` values."""
    view, each, _ = TYPES[type]
    size, shift, cut = each * count, each.bit_length() - 1, (1 << 8 * each) - 1

    def store(address: int, *values: Any) -> None:
        region, offset = region_of(m, address, size)
        m.touch(region, offset >> 2, max(size // 4, 1), True)
        array, at = getattr(region.data, view), offset >> shift
        for i in range(count):
            array[at + i] = values[i] if view in ("floats", "doubles", "signed") else values[i] & cut

    return store


def copy_async(m: Machine, size: int) -> Callable[..., None]:
    """cp.async: global to shared, done only when its thread waits for it; past `given` bytes come zeros."""

    def copy(to: int, source: int, given: int = size) -> None:
        region, offset = region_of(m, to, size)
        m.touch(region, offset >> 2, size // 4, True)
        space: Bytes | None = None
        if given:
            space, at = m.memory.look(source, size)
            words = m.loaded(space, at, size, list(space.words[at // 4 : at // 4 + size // 4]), JUNK)
        else:
            words = []
        words = words[: given // 4] + [0] * (size // 4 - given // 4)

        def done() -> None:
            m.touch(region, offset >> 2, size // 4, True)
            for i, word in enumerate(words):
                region.data.words[offset // 4 + i] = word

        m.copies[m.tid][-1].append(done)

    return copy


def commit_copies(m: Machine) -> None:
    """cp.async.commit_group."""
    m.copies[m.tid].append([])


def wait_copies(m: Machine, groups: int) -> None:
    """cp.async.wait_group: all but the last `groups` of committed copies are done."""
    mine = m.copies[m.tid]
    while len(mine) - 1 > groups:
        for done in mine.pop(0):
            done()


def wait_all_copies(m: Machine) -> None:
    """cp.async.wait_all."""
    commit_copies(m)
    wait_copies(m, 0)

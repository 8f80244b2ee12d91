"""Bad input: a reader either opens a file or raises one CkptError with its place, quickly and without much memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptError
from ckptkit.formats.options import ReadOptions

Reader = Callable[[Path, ReadOptions], Checkpoint]
HOSTILE = (-1, 0, 1, 2**31 - 1)
BUDGET = 8 << 20  # bytes that reading headers may take beyond four times the file


def error_of(
    read: Reader, path: Path, data: bytes | None = None, options: ReadOptions | None = None
) -> CkptError | None:
    """The error of reading `data` (or what lies at `path`), or None. Fails on other exceptions, slowness, greed."""
    if data is not None:
        path.write_bytes(data)
    size = path.stat().st_size
    open_files = _open_files()
    tracemalloc.start()
    began, error = time.perf_counter(), None
    try:
        read(path, options or ReadOptions()).close()
    except CkptError as e:
        error = e
    took, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < BUDGET + 4 * size, f"{peak:,} bytes for a file of {size:,}"
    assert took < 5, f"{took:.1f} s"  # a hang, on a machine of any speed
    assert _open_files() == open_files
    if error is not None:
        assert error.path is not None
        assert error.what
        assert error.expected is not None or error.got is not None
        assert str(error).isprintable() or "\n" in str(error)
    return error


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def accepted(read: Reader, path: Path, cases: Iterable[tuple[Any, bytes]], **how: Any) -> list[Any]:
    """The names of those cases that were read without an error."""
    return [name for name, data in cases if error_of(read, path, data, **how) is None]


def cuts(data: bytes, places: Iterable[int]) -> list[tuple[str, bytes]]:
    """The file cut at each place and one byte before, and with a byte added to or removed from its end."""
    ends = sorted({p - d for p in places for d in (0, 1) if 0 <= p - d < len(data)} | {len(data) - 1})
    return [(f"cut at {n}", data[:n]) for n in ends] + [("a byte more", data + b"\0")]


def int_changes(data: bytes, offsets: Iterable[int]) -> list[tuple[tuple[int, int], bytes]]:
    """((offset, value), data): the file with each int32 replaced by each hostile value that is not there already."""
    return [
        ((at, v), data[:at] + (v & 0xFFFFFFFF).to_bytes(4, "little") + data[at + 4 :])
        for at in offsets
        for v in HOSTILE
        if data[at : at + 4] != (v & 0xFFFFFFFF).to_bytes(4, "little")
    ]

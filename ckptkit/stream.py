"""Writing tensors: every core reads, encodes and writes pieces of its own, which are small enough for its cache.

Writeback begins while later pieces are encoded, so that the sync at the end has little left to wait for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, BinaryIO

from . import files
from .parallel import spread
from .tensor import Tensor

Piece = tuple[int, Callable[[], Any]]  # where it goes, and what gives its bytes


def write_tensors(out: BinaryIO, tensors: Iterable[Tensor], alignment: int = 1) -> None:
    """Append the tensors' bytes in order, each padded with zeros to `alignment`; a piece a core is held at a time."""
    out.flush()
    if not out.seekable():  # a pipe
        for _, read in _pieces(tensors, alignment, 0)[0]:
            out.write(memoryview(read()))
        return
    pieces, end = _pieces(tensors, alignment, out.tell())

    def write(piece: Piece) -> None:
        at, read = piece
        left = memoryview(read()).cast("B")
        start = at
        while left:
            done = os.pwrite(out.fileno(), left, at)
            at, left = at + done, left[done:]
        files.begin_writeback(out.fileno(), start, at)

    spread(write, pieces)
    out.seek(end)


def _pieces(tensors: Iterable[Tensor], alignment: int, at: int) -> tuple[list[Piece], int]:
    """All pieces from offset `at` on, and where they end."""
    pieces: list[Piece] = []
    for t in tensors:
        pieces += [(at + lo * t.row_bytes, partial(t.rows, lo, hi)) for lo, hi in t.pieces()]
        at += t.nbytes
        if padding := -t.nbytes % alignment:
            pieces.append((at, partial(bytes, padding)))
            at += padding
    return pieces, at

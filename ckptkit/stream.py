"""Writing tensors: rows are read and encoded in one thread while the rows before them are written in another.

Writeback begins as each piece is written, so that the fsync at the end has little left to wait for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from queue import Queue
from threading import Thread
from typing import BinaryIO

from .files import Bytes
from .tensor import Tensor

AHEAD = 2  # pieces that may wait to be written
BEGIN_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: start writing these pages, wait for nothing


def write_tensors(out: BinaryIO, tensors: Iterable[Tensor], alignment: int = 1) -> None:
    """Append the tensors' bytes in order, each padded with zeros to `alignment`; five chunks are held at most."""
    pieces: Queue[Bytes | bytes | None] = Queue(AHEAD)
    failed: list[BaseException] = []
    out.flush()
    start_writeback = _writeback(out)

    def write() -> None:
        while (piece := pieces.get()) is not None:
            if failed:
                continue  # the reader is told at its next piece; until then what it sends is let go
            try:
                out.write(piece if isinstance(piece, bytes) else piece.data)
                start_writeback(len(piece) if isinstance(piece, bytes) else piece.nbytes)
            except BaseException as e:
                failed.append(e)

    writer = Thread(target=write, name="write_tensors")
    writer.start()
    try:
        for t in tensors:
            for _, rows in t.chunks():
                if failed:
                    return
                pieces.put(rows)
            if t.nbytes % alignment:
                pieces.put(bytes(-t.nbytes % alignment))
    finally:
        pieces.put(None)
        writer.join()
        if failed and sys.exc_info()[0] is None:
            raise failed[0]


def _writeback(out: BinaryIO) -> Callable[[int], None]:
    """A function to call with the number of bytes just written; does nothing where the system has no such call."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return lambda _nbytes: None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    at = [out.tell()]

    def start(nbytes: int) -> None:
        call(out.fileno(), at[0], nbytes, BEGIN_WRITEBACK)
        at[0] += nbytes

    return start

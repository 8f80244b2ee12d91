"""Reading with pread, mapping on request, and writing that either completes or leaves nothing.

Reads go through pread, not a map: mapped pages count as resident memory, and a mapped file that shrinks kills the
process with SIGBUS, which Python cannot catch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import FormatError, OutputError, UnsupportedError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
BEGIN = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: start writing these pages, wait for nothing
WRITEBACK = 16 << 20  # bytes begun at a time; many small requests take the processor longer


class File:
    """An open input file: its descriptor and, once asked for, its map. Nothing holds either after `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is refused, not waited for
        except OSError as e:
            raise _unreadable(self.path, e) from e
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise UnsupportedError(
                "not a regular file",
                path=self.path,
                hint="checkpoints are read at many places; write it to a file first",
            )
        self.size = status.st_size
        self._map: mmap.mmap | None = None
        self.closed = False

    def read(self, offset: int, nbytes: int, at: str = "") -> Bytes:
        """`nbytes` from `offset` into a fresh buffer; a FormatError where the file ends before."""
        self.require(offset, nbytes, at)
        out = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            n = os.preadv(self._fd, [out[done:].data], offset + done)
            if n == 0:
                raise FormatError("the file shrank while it was read", path=self.path, offset=offset + done, at=at)
            done += n
        return out

    def ints(self, offset: int, count: int, dtype: str = "<i4", at: str = "") -> npt.NDArray[Any]:
        """`count` integers of little-endian `dtype` at `offset`."""
        return self.read(offset, count * np.dtype(dtype).itemsize, at).view(dtype)

    def require(self, offset: int, nbytes: int, at: str = "") -> None:
        """Check that `nbytes` at `offset` lie inside the file, before any memory is taken."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise FormatError(
                "the file ends early",
                path=self.path,
                offset=offset,
                at=at,
                expected=f"{nbytes:,} bytes",
                got=f"{max(self.size - offset, 0):,} bytes",
                hint="the file was cut, or its header is wrong; copy or export it again",
            )

    def map(self) -> Bytes:
        """The whole file as a read-only view; only the runtime asks for it."""
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Close the descriptor and the map; a map that arrays still look into is let go when they are."""
        if self.closed:
            return
        self.closed = True
        os.close(self._fd)
        self._fd = -1  # the number may soon be another file's
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                self._map = None


def is_file(path: Path) -> bool:
    """Whether a regular file lies there; nothing does at a name from a file that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def reading(path: Path, read: Callable[[File], T]) -> T:
    """What `read` makes of an open file, which stays open; where it raises, the file is closed."""
    file = File(path)
    try:
        return read(file)
    except BaseException:
        file.close()
        raise


def read_head(path: Path, nbytes: int = 4096) -> tuple[bytes, int]:
    """The first `nbytes` of a file and its size."""
    file = File(path)
    try:
        return file.read(0, min(nbytes, file.size)).tobytes(), file.size
    finally:
        file.close()


def _unreadable(path: Path, e: OSError) -> FormatError:
    hint = "check the path" if isinstance(e, FileNotFoundError) else ""
    return FormatError(f"cannot be opened: {os.strerror(e.errno or 0)}", path=path, hint=hint)


def check_output(path: Path, inputs: tuple[Path, ...], force: bool) -> None:
    """Refuse an output that is one of the inputs (by any name), that exists, or whose directory is missing."""
    if not path.parent.is_dir():
        raise OutputError(
            "its directory does not exist", path=path, expected=f"a directory {path.parent}", hint="create it first"
        )
    if not path.exists():
        return
    for source in inputs:
        if source.exists() and path.samefile(source):
            raise OutputError(
                "output and input are the same file",
                path=path,
                got=f"input {source}",
                hint="choose another output name",
            )
    if (path.is_file() or (path.is_dir() and any(path.iterdir()))) and not force:
        raise OutputError("exists already", path=path, hint="pass --force to replace it, or choose another name")


def check_outputs(paths: Sequence[Path], inputs: tuple[Path, ...], force: bool) -> None:
    """Refuse outputs of one command that `check_output` refuses, or of which two are the same file."""
    names = set()
    for path in paths:
        check_output(path, inputs, force)
        if path.resolve() in names:
            raise OutputError("two outputs are the same file", path=path, hint="give each a name of its own")
        names.add(path.resolve())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` when the block ends without error; on any error nothing is left.

    Temporary file beside `path`, fsync, rename. A device (such as /dev/full) is written to directly.
    """
    special = path.exists() and not path.is_file()
    try:
        if special:
            with path.open("wb") as f:
                yield f
            return
        fd, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
    except OSError as e:
        raise _unwritable(path, e) from e
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb", buffering=1 << 20) as f:
            yield f
            f.flush()
            os.fchmod(f.fileno(), 0o666 & ~_umask())
            sync(f.fileno())
        temporary.replace(path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise _unwritable(path, e) from e
        raise


def begin_writeback(fd: int, lo: int, hi: int) -> None:
    """After bytes lo..hi of a file: begin to put what lies before the last boundary in them on the disk.

    Waits for nothing, so that `sync` has little left to wait for. Does nothing where the system has no such call.
    """
    first, last = lo // WRITEBACK, hi // WRITEBACK
    if last > first and (call := _sync_file_range()):
        call(fd, first * WRITEBACK, (last - first) * WRITEBACK, BEGIN)


def sync(fd: int) -> None:
    """Wait until what was written is on the disk."""
    os.fsync(fd)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def _unwritable(path: Path, e: OSError) -> OutputError:
    return OutputError(
        f"cannot be written: {os.strerror(e.errno or 0)} (errno {e.errno})",
        path=path,
        hint="nothing was left at that name",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

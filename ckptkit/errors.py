"""Every error a user can cause: one family, one text shape, one exit code each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from os import PathLike
from reprlib import Repr
from typing import Any

SHOWN = 1000  # characters of each part of a message
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class CkptError(Exception):
    """What is wrong, where, what was expected, what was found and what to do.

    `path` is the file, `offset` the byte in it, `at` names the place there ("tensor blk.0.attn_q.weight").
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        path: str | PathLike[str] | None = None,
        offset: int | None = None,
        at: str = "",
        expected: Any = None,
        got: Any = None,
        hint: str = "",
    ) -> None:
        self.what, self.path, self.offset, self.at = what, path, offset, at
        self.expected, self.got, self.hint = expected, got, hint
        super().__init__(what)

    def __str__(self) -> str:
        """First line: file and what is wrong. Then place, expected, found, and a hint, where known."""
        what = printable(_cut(self.what))
        lines = [f"{printable(self.path)}: {what}" if self.path is not None else what]
        place = []
        if self.offset is not None:
            place.append(f"at byte {self.offset:,}" + (f" ({printable(_cut(self.at))})" if self.at else ""))
        elif self.at:
            place.append(f"at {printable(_cut(self.at))}")
        found = [f"expected {_cut(self.expected)}"] if self.expected is not None else []
        found += [f"got {_cut(self.got)}"] if self.got is not None else []
        detail = ": ".join(part for part in (" ".join(place), printable(", ".join(found))) if part)
        if detail:
            lines.append("  " + detail)
        if self.hint:
            lines.append("  hint: " + printable(self.hint))
        return "\n".join(lines)


class FormatError(CkptError):
    """The file is broken."""

    exit_code = 3


class UnsupportedError(CkptError):
    """The file is valid, but this cannot be done with it."""

    exit_code = 4


class LossyError(CkptError):
    """Doing this would lose information; an option says yes to it."""

    exit_code = 5


class OutputError(CkptError):
    """The output cannot be written: it exists, its directory is missing, the disk is full."""

    exit_code = 6


@contextmanager
def blaming(path: str | PathLike[str] | None) -> Iterator[None]:
    """Errors that come out of the block without a file, raised by what does not know it, are about `path`."""
    try:
        yield
    except CkptError as e:
        e.path = path if e.path is None else e.path
        raise


def brief(value: object) -> str:
    """A value from a file on one short line, however long or deeply nested it is."""
    return _REPR.repr(value)


def _cut(value: object) -> str:
    """What a message shows of a text that a file may have made megabytes long."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def some(names: Collection[str], most: int = 4) -> str:
    """The first `most` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(islice(names, most)) + (f" and {more:,} more" if more > 0 else "")


def printable(text: object) -> str:
    """Text safe to print: control characters and undecodable bytes escaped, so a file cannot steer a terminal."""
    return "".join(
        c if c.isprintable() or c == " " else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text)
    )

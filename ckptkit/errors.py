"""Every error a user can cause: one family, one text shape, one exit code each."""

from __future__ import annotations

from os import PathLike
from typing import Any


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
        lines = [f"{printable(self.path)}: {self.what}" if self.path is not None else self.what]
        place = []
        if self.offset is not None:
            place.append(f"at byte {self.offset:,}" + (f" ({printable(self.at)})" if self.at else ""))
        elif self.at:
            place.append(f"at {printable(self.at)}")
        found = [f"expected {self.expected}"] if self.expected is not None else []
        found += [f"got {self.got}"] if self.got is not None else []
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


def printable(text: object) -> str:
    """Text safe to print: control characters and undecodable bytes escaped, so a file cannot steer a terminal."""
    return "".join(
        c if c.isprintable() or c == " " else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text)
    )

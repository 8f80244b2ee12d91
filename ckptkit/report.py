"""Tables and lines for people out of plain data; no knowledge of models or formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import printable


def count(n: int) -> str:
    """A number of things, short: 41.2 M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}" if n < 10 * size else f"{n / size:.1f} {unit}"
    return f"{n}"


def size(nbytes: int) -> str:
    """A number of bytes, short: 164.8 MB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"


def number(value: Any) -> str:
    """A value for a table cell: thousands separated, floats to six digits, text without control characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " x ".join(f"{v:,}" if isinstance(v, int) else printable(v) for v in value)
    return printable(value)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table: text to the left, numbers to the right, two spaces between columns."""
    cells = [[number(v) for v in row] for row in rows]
    right = [bool(rows) and all(isinstance(r[k], int | float | None) for r in rows) for k in range(len(head))]
    widths = [max([len(h), *(len(r[k]) for r in cells)]) for k, h in enumerate(head)]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in (list(head), *cells)
    ]


def pairs(entries: Sequence[tuple[str, Any]], indent: int = 2) -> list[str]:
    """Lines of name and value, values under one another."""
    width = max((len(name) for name, _ in entries), default=0)
    return [
        " " * indent + f"{name.ljust(width)}  {value if isinstance(value, str) else number(value)}"
        for name, value in entries
    ]

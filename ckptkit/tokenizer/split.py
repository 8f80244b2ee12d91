r"""Cut text into words by the patterns of pre.py, with the stdlib's `re`, which has no \p{L}.

A text becomes one class byte for each code point, on which ordinary byte patterns run: ASCII stands for itself, another
code point is 0x80 | sets << 3 | category. The categories are llama.cpp's (Unicode 16) whatever Unicode Python knows.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .pre import SETS, THREES, Pre

SPACE, LETTER, NUMBER, MARK, PUNCTUATION, SYMBOL, OTHER = range(7)
CATEGORY = {"L": LETTER, "N": NUMBER, "M": MARK, "P": PUNCTUATION, "S": SYMBOL, "Z": OTHER, "C": OTHER}
WHITE_SPACE = (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
ASCII = {
    LETTER: "A-Za-z",
    NUMBER: "0-9",
    MARK: "",
    PUNCTUATION: r"!-#%-*,-/:-;?-@\[-\]_{}",
    SYMBOL: r"$+<->^`|~",
    SPACE: r"\t-\r ",
}
# Assigned after Unicode 14, which is what Python 3.11 knows; used only where Python says "unassigned".
NEWER = {
    LETTER: "1123f-11240 11f02 11f04-11f10 11f12-11f33 1342f 13441-13446 1b132 1b155 1df25-1df2a 1e030-1e06d "
    "1e4d0-1e4eb 2b739 2ebf0-2ee5d 31350-323af",
    NUMBER: "11f50-11f59 1d2c0-1d2d3 1e4f0-1e4f9",
    MARK: "cf3 ece 10efd-10eff 11241 11f00-11f01 11f03 11f34-11f3a 11f3e-11f42 13440 13447-13455 1e08f 1e4ec-1e4ef",
    PUNCTUATION: "11b00-11b09 11f43-11f4f",
    SYMBOL: "2ffc-2fff 31ef 1f6dc 1f774-1f776 1f77b-1f77f 1f7d9 1fa75-1fa77 1fa87-1fa88 1faad-1faaf 1fabb-1fabd 1fabf "
    "1face-1facf 1fada-1fadb 1fae8 1faf7-1faf8",
}
PAGE = 256  # code points whose classes are filled in together, when the first of them is met
WINDOW = 1 << 20  # code points classified at a time

_table: NDArray[np.uint8] = np.zeros(0x110000, np.uint8)
_filled: NDArray[np.bool_] = np.zeros(0x110000 // PAGE, np.bool_)


def ranges(text: str) -> list[tuple[int, int]]:
    """ "41-5a b5" -> [(0x41, 0x5a), (0xb5, 0xb5)]."""
    ends = [part.split("-") for part in text.split()]
    return [(int(e[0], 16), int(e[-1], 16)) for e in ends]


@lru_cache(1)
def _newer() -> dict[int, int]:
    return {c: kind for kind, text in NEWER.items() for lo, hi in ranges(text) for c in range(lo, hi + 1)}


def _fill(page: int) -> None:
    for c in range(page * PAGE, (page + 1) * PAGE):
        name = unicodedata.category(chr(c))
        _table[c] = c if c < 0x80 else 0x80 | (_newer().get(c, OTHER) if name == "Cn" else CATEGORY[name[0]])
    for c in WHITE_SPACE:
        if c // PAGE == page:
            _table[c] = 0x80 | SPACE
    _filled[page] = True


def classify(text: str, sets: tuple[str, ...]) -> bytes:
    """One class byte for each code point of `text`; `sets`: names of SETS whose members are to be told apart."""
    if text.isascii():
        return text.encode()
    return b"".join(_classes(text[i : i + WINDOW], sets) for i in range(0, len(text), WINDOW))


def _classes(text: str, sets: tuple[str, ...]) -> bytes:
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    pages = np.bincount(points // PAGE).nonzero()[0]
    for page in pages[~_filled[pages]]:
        _fill(int(page))
    classes = _table[points]
    for j, name in enumerate(sets):
        bounds = np.array(ranges(SETS[name]), np.uint32)
        k = np.searchsorted(bounds[:, 0], points, "right") - 1
        inside = (k >= 0) & (points <= bounds[k, 1]) & (classes != (0x80 | SPACE))
        classes[inside] |= 8 << j
    return classes.tobytes()


def _members(name: str, sets: tuple[str, ...]) -> str:
    r"""The inside of a byte character class for \p{name} or, with name "s", for \s."""
    if name in sets:
        bit = 8 << sets.index(name)
        return "".join(f"\\x{b:02x}" for b in range(0x80, 0x100) if b & bit)
    kinds = {"s": SPACE, "L": LETTER, "N": NUMBER, "M": MARK, "P": PUNCTUATION, "S": SYMBOL}
    kinds |= dict.fromkeys(("upper", "lower", "L-han"), LETTER)
    kind = kinds[name]
    ascii_part = {"upper": "A-Z", "lower": "a-z"}.get(name, ASCII[kind])
    without = 8 << sets.index("han") if name == "L-han" else 0
    return ascii_part + "".join(f"\\x{b:02x}" for b in range(0x80, 0x100) if b & 7 == kind and not b & without)


ITEM = re.compile(r"\\p\{([^}]+)\}|\\([sS])|\\.|[\[\]]|.", re.DOTALL)


def used_sets(pattern: str) -> list[str]:
    r"""Names of SETS that a pattern mentions."""
    return [name for name in re.findall(r"\\p\{([^}-]+)\}", pattern) if name in SETS]


def compile_pattern(pattern: str, sets: tuple[str, ...]) -> re.Pattern[bytes]:
    """A pattern of pre.py as a byte pattern over class bytes."""
    out, inside = [], False
    for m in ITEM.finditer(pattern):
        item = m.group()
        if m[1] or m[2] == "s":
            members = _members(m[1] or "s", sets)
            out.append(members if inside else f"[{members}]")
        elif m[2] == "S":
            out.append(f"[^{_members('s', sets)}]")
        else:
            inside = inside if item not in "[]" else item == "["
            out.append(item)
    return re.compile("".join(out).encode("ascii"))


Step = tuple[re.Pattern[bytes], str]  # and how numbers are cut into threes, "" where they are not


@lru_cache(64)
def _compiled(patterns: tuple[str, ...]) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    sets = tuple(dict.fromkeys(name for p in patterns for name in used_sets(p)))
    steps = []
    for p in patterns:
        how, _, run = p.removeprefix(THREES).partition(".") if p.startswith(THREES) else ("", "", p)
        steps.append((compile_pattern(run, sets), how))
    return tuple(steps), sets


def words(pre: Pre, text: str) -> Iterator[str]:
    """The words of a text, in order; joined they are the text."""
    steps, sets = _compiled(pre.patterns)
    classes = classify(text, sets)
    for lo, hi in _spans(steps, classes, 0, len(classes)):
        yield text[lo:hi]


def _spans(steps: tuple[Step, ...], classes: bytes, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    pattern, how = steps[0]
    pieces = _threes(pattern, how, classes, lo, hi) if how else _pieces(pattern, classes, lo, hi)
    if len(steps) == 1:
        yield from pieces
    else:
        for a, b in pieces:
            yield from _spans(steps[1:], classes, a, b)


def _pieces(pattern: re.Pattern[bytes], classes: bytes, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Matches and what lies between them. The end of the piece is an end for the pattern too."""
    for m in pattern.finditer(classes, lo, hi):
        a, b = m.span()
        if a > lo:
            yield lo, a
        yield a, b
        lo = b
    if lo < hi:
        yield lo, hi


def _threes(run: re.Pattern[bytes], how: str, classes: bytes, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """The pieces of a THREES pattern: each ends where a number of threes remains of its run, or at the end of a run."""
    for m in run.finditer(classes, lo, hi):
        a, b = m.span()
        ends = range(b - (b - a) // 3 * 3, b + (how == "behind"), 3)
        for end in ends:
            if end > lo and not (how == "behind" and end == a):
                yield lo, end
                lo = end
    if lo < hi:
        yield lo, hi

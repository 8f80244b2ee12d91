"""What makes a vocabulary malformed: the rules once, as a list of all faults for checks or as the error of the first.

A file may be read, inspected and mended with such a vocabulary, but no text is cut by it and no model converted with
it: two equal texts give one id for two tokens, an id that is nowhere ends no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from ..errors import FormatError

NO_ID = (-1, 0xFFFFFFFF)  # as real files say that there is no such token
SHOWN = 80  # characters of a text
MEND = "export the tokenizer again, or give the right one with --tokenizer FILE"


@dataclass(frozen=True)
class Kind:
    """How a fault is told, with its fields filled in: in a list as `said`, as an error by the others."""

    said: str
    what: str
    at: str
    expected: str
    got: str


KINDS: Mapping[str, Kind] = {
    "length": Kind(
        "{part} has {index:,} entries for {other:,} tokens",
        "{part} does not have one entry for each token", "", "{other:,}", "{index:,}",
    ),
    "id": Kind(
        "{part} {index:,} is outside the vocabulary",
        "a special id is outside the vocabulary", "", "an id below {other:,}", "{index:,}",
    ),
    "equal": Kind(
        "tokens {other:,} and {index:,} are both written {text!r}",
        "two tokens are written the same", "tokens {other:,} and {index:,}",
        "a different text for each token", "{text!r} twice",
    ),
    "empty": Kind(
        "token {index:,} is empty",
        "a token is empty", "token {index:,}", "a text for each token", "an empty string",
    ),
    "merge": Kind(
        "merge {index:,} is not two tokens: {text!r}",
        "a merge is not two tokens", "merge {index:,}", '"left right"', "{text!r}",
    ),
    "unknown": Kind(
        "merge {index:,} names {text!r}, which is no token",
        "a merge names a token that the vocabulary lacks", "merge {index:,}", "tokens", "{text!r}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """`kind`: of KINDS; `part`: "tokens", "merges", the array or the id that is wrong.

    `index`: of the token or merge, or the length or id found. `other`: the earlier equal, or the number of tokens.
    """

    kind: str
    part: str
    index: int
    text: str = ""
    other: int = -1

    def __str__(self) -> str:
        return KINDS[self.kind].said.format(**vars(self))


@dataclass(frozen=True)
class Vocabulary:
    """What the rules look at, as stored. `ids`: role -> id; `lengths`: array with an entry for each token -> entries.

    `c_strings`: a text ends at a NUL byte, as where llama.cpp reads it.
    """

    tokens: Sequence[bytes]
    merges: Iterable[bytes] | None = None
    ids: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    c_strings: bool = False


@dataclass(frozen=True)
class Origin:
    """Where a vocabulary was read: the file, what its parts are called there, and what mends a kind of fault."""

    path: Path | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    mends: Mapping[str, str] = field(default_factory=dict)
    c_strings: bool = False

    def error(self, fault: Fault) -> FormatError:
        """The one error that says everything about a fault."""
        kind, facts = KINDS[fault.kind], vars(fault)
        name = self.names.get(fault.part, fault.part)
        place = f"key {name}" if fault.part in self.names else name
        return FormatError(
            kind.what.format(**facts),
            path=self.path,
            at=", ".join(part for part in (place, kind.at.format(**facts)) if part),
            expected=kind.expected.format(**facts),
            got=kind.got.format(**facts),
            hint=self.mends.get(fault.kind, MEND).format(**facts, name=name),
        )


def refuse(vocabulary: Vocabulary, origin: Origin) -> None:
    """Raise FormatError for the first fault of a vocabulary."""
    for fault in faults(vocabulary):
        raise origin.error(fault)


def faults(vocabulary: Vocabulary) -> Iterator[Fault]:
    """Every fault, those of numbers first."""
    return chain(misfits(vocabulary), _texts(vocabulary))


def misfits(vocabulary: Vocabulary) -> Iterator[Fault]:
    """Arrays of another length than the tokens, and ids that no token has; no text is looked at."""
    n = len(vocabulary.tokens)
    for part, found in vocabulary.lengths.items():
        if found != n:
            yield Fault("length", part, found, other=n)
    for role, i in vocabulary.ids.items():
        if not 0 <= i < n and i not in NO_ID:
            yield Fault("id", f"{role}_token_id", i, other=n)


def empty_name(i: int) -> bytes:
    """The name that llama.cpp gives an empty token."""
    return b"[EMPTY_%d]" % i


def _texts(vocabulary: Vocabulary) -> Iterator[Fault]:
    """Equal and empty tokens, merges that are not two parts, merges of or into what is no token."""
    tokens = list(vocabulary.tokens)
    cut = _c_string if vocabulary.c_strings and b"\0" in b"".join(tokens) else bytes
    if cut is not bytes:
        tokens = list(map(cut, tokens))
    known = set(tokens)
    if len(known) < len(tokens) or b"" in known:
        seen: dict[bytes, int] = {}
        for i, token in enumerate(tokens):
            if not token:
                yield Fault("empty", "tokens", i)
            name = token or empty_name(i)
            if seen.setdefault(name, i) != i:
                yield Fault("equal", "tokens", i, _shown(name), seen[name])
        known = set(seen)
    merges = list(vocabulary.merges or ())
    if _all_sound(merges, known):
        return
    for k, merge in enumerate(merges):
        left, _, right = merge.partition(b" ")
        if not left or not right or b" " in right:
            yield Fault("merge", "merges", k, _shown(merge))
        elif lacking := [part for part in (left, right, left + right) if cut(part) not in known]:
            yield Fault("unknown", "merges", k, _shown(lacking[0]))


def _all_sound(merges: list[bytes], known: set[bytes]) -> bool:
    """Whether all merges are two tokens that make a third, by loops in C: there are hundreds of thousands of them."""
    parts = b" ".join(merges).split(b" ") if merges else []
    if len(parts) != 2 * len(merges) or not all(map(bytes.__contains__, merges, repeat(b" "))):
        return False
    left, right = parts[::2], parts[1::2]
    return all(map(known.issuperset, (left, right, map(bytes.__add__, left, right))))


def _c_string(text: bytes) -> bytes:
    return text.partition(b"\0")[0] if b"\0" in text else text


def _shown(text: bytes) -> str:
    return text[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]

"""What is wrong with a vocabulary, as data: for checks that want every fault and not the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .strings import Strings


@dataclass(frozen=True)
class Fault:
    """`kind`: "equal", "empty", "merge" or "unknown"; `index`: of the token or merge; `other`: the earlier equal."""

    kind: str
    index: int
    text: str
    other: int = -1

    def __str__(self) -> str:
        return {
            "equal": f"tokens {self.other:,} and {self.index:,} are both written {self.text!r}",
            "empty": f"token {self.index:,} is empty",
            "merge": f"merge {self.index:,} is not two tokens: {self.text!r}",
            "unknown": f"merge {self.index:,} names {self.text!r}, which is no token",
        }[self.kind]


def faults(tokens: Strings | Iterable[bytes], merges: Strings | Iterable[bytes] | None) -> Iterator[Fault]:
    """Equal and empty tokens, merges that are not two parts, merges of or into what is no token."""
    seen: dict[bytes, int] = {}
    for i, token in enumerate(tokens):
        name = token.partition(b"\0")[0]  # llama.cpp reads C strings
        if not name:
            yield Fault("empty", i, "")
            name = b"[EMPTY_%d]" % i  # its name for such a token
        if seen.setdefault(name, i) != i:
            yield Fault("equal", i, name.decode("utf-8", "replace"), seen[name])
    for k, merge in enumerate(merges or ()):
        left, _, right = merge.partition(b" ")
        if not left or not right or b" " in right:
            yield Fault("merge", k, merge.decode("utf-8", "replace"))
            continue
        for part in (left, right, left + right):
            if part.partition(b"\0")[0] not in seen:
                yield Fault("unknown", k, part.decode("utf-8", "replace"))
                break

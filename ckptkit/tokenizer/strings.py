"""Many byte strings in one buffer: a vocabulary of 150,000 tokens costs three arrays and not 150,000 objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError

LENGTH = {1: Struct("<B"), 4: Struct("<I"), 8: Struct("<Q")}


class Strings(Sequence[bytes]):
    """Byte strings: string i is the `lengths[i]` bytes of `buffer` (uint8) from `starts[i]`, cut out when asked for."""

    __slots__ = ("buffer", "lengths", "starts")

    def __init__(self, buffer: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self.buffer, self.starts, self.lengths = buffer, starts, lengths

    @classmethod
    def of(cls, items: Iterable[bytes]) -> Strings:
        """Pack byte strings one after the other."""
        parts = list(items)
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        return cls(np.frombuffer(b"".join(parts), np.uint8), np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def prefixed(cls, data: bytes, offset: int, count: int, width: int, gap: int = 0) -> tuple[Strings, int]:
        """Walk `count` strings that each follow their own length, `width` bytes wide; `gap` bytes stand before it.

        Returns the strings and the offset after the last. Raises FormatError (offset in `data`, no path) where a length
        points past the end; the count is checked against the bytes that are left before any memory is taken.
        """
        size, head = len(data), width + gap
        if count < 0 or count > (size - offset) // head:
            raise FormatError(
                "more strings than the file can hold",
                offset=offset,
                expected=f"at most {max(0, size - offset) // head:,} strings",
                got=f"{count:,}",
            )
        unpack = LENGTH[width].unpack_from
        starts, lengths = array("q"), array("q")
        at = offset
        for i in range(count):
            start = at + head
            if start > size:
                raise FormatError(f"string {i:,} is cut off", offset=at, expected=f"{head} bytes", got=f"{size - at}")
            n = unpack(data, at + gap)[0]
            at = start + n
            if at > size:
                raise FormatError(
                    f"string {i:,} is longer than what is left",
                    offset=start - width,
                    expected=f"at most {size - start:,} bytes",
                    got=f"{n:,}",
                )
            starts.append(start)
            lengths.append(n)
        return cls(np.frombuffer(data, np.uint8), np.array(starts, np.int64), np.array(lengths, np.int64)), at

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, i: int) -> bytes: ...
    @overload
    def __getitem__(self, i: slice) -> Strings: ...
    def __getitem__(self, i: int | slice) -> bytes | Strings:
        if isinstance(i, slice):
            return Strings(self.buffer, self.starts[i], self.lengths[i])
        start = self.starts[i]
        return self.buffer[start : start + self.lengths[i]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data = self.buffer.tobytes()
        return (data[a : a + n] for a, n in zip(self.starts.tolist(), self.lengths.tolist(), strict=True))

    def find(self, text: bytes) -> int:
        """Index of the first string equal to `text`, or -1; by numpy, without an index of all strings."""
        where = np.flatnonzero(self.lengths == len(text))
        for k in {0, len(text) - 1} if text else ():
            where = where[self.buffer[self.starts[where] + k] == text[k]]
        return next((int(i) for i in where if self[int(i)] == text), -1)

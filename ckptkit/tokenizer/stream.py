"""Text out of tokens, one at a time: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable


class Utf8Stream:
    """Bytes in, whole characters out. Bytes that can no longer become a character turn into U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The characters that are complete after `data`; the start of an unfinished one is kept back."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Text in, text out up to the first stop string; what could still become one is kept back."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(s for s in stops if s)
        self.found = ""  # the stop string that ended the text
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain. After a stop string was found nothing comes out any more.

        The stop string that is complete first counts; of those complete at the same character, the longest.
        """
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self.stops if (at := text.find(s)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, s) for s in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text kept back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0

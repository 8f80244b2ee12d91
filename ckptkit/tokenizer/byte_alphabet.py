"""The byte alphabet of GPT-2: a printable character for each of the 256 bytes (openai/gpt-2, encoder.py).

Bytes 33..126, 161..172 and 174..255 stand for themselves as code points; the other 68, in order, are U+0100 and up,
so a space is written U+0120. The order in which the alphabet is listed (the printable ones first) is also the order
of the byte tokens 0..255 in GPT-2's vocabulary.
"""

from __future__ import annotations

PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
ORDER = PRINTABLE + tuple(b for b in range(256) if b not in PRINTABLE)  # bytes in the order of GPT-2's tokens
TO_CHAR = {b: b if b in PRINTABLE else 256 + i - len(PRINTABLE) for i, b in enumerate(ORDER)}
TO_BYTE = {c: b for b, c in TO_CHAR.items()}
OUTSIDE = set(range(256)) - TO_BYTE.keys()  # code points below 256 that stand for no byte


def to_text(data: bytes) -> str:
    """Bytes written in the alphabet, one character for each."""
    return data.decode("latin-1").translate(TO_CHAR)


def to_bytes(text: str) -> bytes | None:
    """The bytes that an alphabet text stands for; None when a character is not in the alphabet."""
    if not OUTSIDE.isdisjoint(map(ord, text)):
        return None
    try:
        return text.translate(TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return None

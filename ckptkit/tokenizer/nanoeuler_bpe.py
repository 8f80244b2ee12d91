"""nanoeuler's tokenizer: ids 0..255 are bytes, id 256 + m is merge m of two earlier ids (nanoeuler_cuda.cu).

Words: whitespace is space, newline, tab and return. A word takes one whitespace character before it along and ends
after 4,096 bytes; whitespace before that, or at the end of the text, is a word of its own. Merging works on ids,
because two merges may spell the same bytes. There are no special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, brief
from .base import Tokenizer
from .byte_alphabet import to_text
from .faults import Vocabulary
from .merging import BLOCK, encode_blocks, merge
from .special import TokenType
from .strings import Strings

WORD_LIMIT = 4096
WORD = re.compile(
    rb"[ \n\t\r][^ \n\t\r]{1,%d}|[^ \n\t\r]{1,%d}|[ \n\t\r]+(?![^ \n\t\r])" % (WORD_LIMIT - 1, WORD_LIMIT)
)
TEXT_LIMIT = 1 << 26  # bytes of all tokens together
REMEMBERED = 1 << 18  # words
GGUF_PRE = "gpt-2"


class NanoeulerBPE(Tokenizer):
    """`left[m]`, `right[m]`: the ids that merge m joins. Raises FormatError for ids that do not exist yet."""

    kind = "nanoeuler-bpe"

    def __init__(self, left: Sequence[int] | NDArray[np.int32], right: Sequence[int] | NDArray[np.int32]) -> None:
        sides = np.asarray(left, np.int64), np.asarray(right, np.int64)
        for name, side in zip(("left", "right"), sides, strict=True):
            wrong = np.flatnonzero((side < 0) | (side >= 256 + np.arange(len(side))))
            if len(wrong):
                m = int(wrong[0])
                raise FormatError(
                    "a merge joins a token that does not exist yet",
                    at=f"merge {m:,} ({name})",
                    expected=f"0 to {255 + m}",
                    got=int(side[m]),
                )
        self.left, self.right = (side.astype(np.int32) for side in sides)
        lengths = [1] * 256
        for m, (a, b) in enumerate(zip(self.left.tolist(), self.right.tolist(), strict=True)):
            lengths.append(lengths[a] + lengths[b])
            if lengths[-1] > TEXT_LIMIT:
                raise FormatError(
                    "a token is too long",
                    at=f"merge {m:,}",
                    expected=f"at most {TEXT_LIMIT:,} bytes",
                    got=f"{lengths[-1]:,}",
                )
        if sum(lengths) > TEXT_LIMIT:
            raise FormatError(
                "the tokens are too long",
                at="merges",
                expected=f"at most {TEXT_LIMIT:,} bytes",
                got=f"{sum(lengths):,}",
            )
        self._lengths = lengths
        super().__init__(Strings.of(()))
        self._words: dict[bytes, list[int]] = {}
        self._clean: dict[tuple[int, int], bool] = {}

    @classmethod
    def from_flat(cls, ids: Sequence[int] | NDArray[np.int32]) -> NanoeulerBPE:
        """From the ids of both sides of each merge, in turn."""
        if len(ids) % 2 or not all(type(i) is int and 0 <= i < 2**31 for i in np.asarray(ids, object).tolist()):
            raise FormatError(
                "the merges are no pairs of ids", at="merges", expected="two ids for each", got=brief(ids)
            )
        return cls(ids[::2], ids[1::2])

    @property
    def vocab_size(self) -> int:
        """256 bytes and the merges."""
        return 256 + len(self.left)

    def vocabulary(self) -> Vocabulary:
        """Nothing to judge: its merges are ids, which were looked at, and two of them may spell the same."""
        return Vocabulary(())

    def merges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Left and right ids of the merges, as stored."""
        return self.left, self.right

    def type_of(self, id: int) -> TokenType:
        """Every token is an ordinary one, whatever it spells."""
        self.check(id)
        return TokenType.NORMAL

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """No token ends a generation; the chat model ends its answers with the text "</s>"."""
        return frozenset()

    @cached_property
    def _by_text(self) -> dict[int, TokenType]:
        return {}

    def _token_bytes(self, id: int) -> bytes:
        out = bytearray()
        todo = [id]
        while todo:
            i = todo.pop()
            if i < 256:
                out.append(i)
            else:
                todo += (int(self.right[i - 256]), int(self.left[i - 256]))
        return bytes(out)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(left, right) -> (rank, id), the rank being the id; of equal pairs the last counts, as in the original."""
        ids = range(256, self.vocab_size)
        return {(a, b): (i, i) for a, b, i in zip(self.left.tolist(), self.right.tolist(), ids, strict=True)}

    def byte_ids(self, data: bytes) -> list[int]:
        """Bytes are ids."""
        return list(data)

    def _encode_text(self, text: str, out: list[int]) -> None:
        self._encode_bytes(text.encode(), out)

    def _encode_bytes(self, data: bytes, out: list[int]) -> None:
        known = self._words
        for m in WORD.finditer(data):
            word = m.group()
            ids = known.get(word)
            if ids is None:
                ids = merge(list(word), self._pairs) if len(word) <= BLOCK else self._long(word)
                if len(word) <= 64 or (len(word) <= WORD_LIMIT and len(set(word)) == 1):
                    if len(known) >= REMEMBERED:
                        known.clear()
                    known[word] = ids
            out += ids

    def _long(self, word: bytes) -> list[int]:
        blocks: dict[bytes, list[int]] = {}

        def encode(lo: int, hi: int) -> list[int]:
            part = word[lo:hi]
            if part not in blocks:
                blocks.clear()
                blocks[part] = merge(list(part), self._pairs)
            return blocks[part]

        return encode_blocks(len(word), encode, self._lengths.__getitem__, self._stay_apart)

    def _stay_apart(self, a: int, b: int) -> bool:
        known = self._clean.get((a, b))
        if known is None:
            known = self._clean[a, b] = merge(list(self.token_bytes(a) + self.token_bytes(b)), self._pairs) == [a, b]
        return known


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file can hold of a nanoeuler tokenizer: texts in the byte alphabet, all different.

    `renamed`: ids whose text is not what they spell, because an earlier token spells the same. `pairs`: all merges as
    ids, left and right in turn, from which the tokenizer is read back unchanged.
    """

    tokens: Strings
    merges: Strings
    renamed: tuple[int, ...]
    pairs: NDArray[np.int32]
    pre: str
    notes: tuple[str, ...]


def gguf_vocabulary(tokenizer: NanoeulerBPE) -> GgufVocabulary:
    """Write the tokenizer for llama.cpp. A renamed token shows NUL bytes after what it spells."""
    spelled = [to_text(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    taken = set(spelled)
    texts: list[str] = []
    seen: set[str] = set()
    renamed = []
    for i, text in enumerate(spelled):
        if text in seen:
            renamed.append(i)
            while text in taken:
                text += to_text(b"\0")
            taken.add(text)
        seen.add(text)
        texts.append(text)
    pairs = list(zip(tokenizer.left.tolist(), tokenizer.right.tolist(), strict=True))
    merges = dict.fromkeys(f"{spelled[a]} {spelled[b]}" for a, b in pairs)
    notes = [
        f'llama.cpp cannot cut words as nanoeuler does: as "{GGUF_PRE}" it separates letters, digits and punctuation, '
        "so that text may become other ids there, never other bytes"
    ]
    if renamed:
        notes.append(f"{len(renamed)} tokens spell the same as an earlier one and are renamed: {renamed[:8]}")
    return GgufVocabulary(
        Strings.of(t.encode() for t in texts),
        Strings.of(m.encode() for m in merges),
        tuple(renamed),
        np.array(pairs, np.int32).reshape(-1),
        GGUF_PRE,
        tuple(notes),
    )

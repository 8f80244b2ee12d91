"""SentencePiece BPE as llama.cpp runs it (`tokenizer.ggml.model` "llama"): characters joined by the scores of tokens.

Spaces are written U+2581. Of all adjacent pairs whose text is a token, the one with the highest score is joined, the
leftmost of equals; what is no token in the end becomes byte tokens. The text is not cut into words, but where no token
holds two characters side by side a cut changes nothing: that is where it is cut here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .base import Tokenizer, as_bytes, ids_of_bytes, one_each
from .byte_bpe import byte_of
from .faults import Vocabulary
from .merging import BLOCK, encode_blocks, merge
from .special import SPECIAL, TokenType
from .strings import Strings

SPACE = "▁"  # U+2581
JOINABLE = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNDEFINED)  # types that characters may be joined into
REMEMBERED = 1 << 18  # words
DEFAULT_IDS = {"bos": 1, "eos": 2, "unk": 0}


class SPM(Tokenizer):
    """`scores`: one for each token; or `merges`, "left right" in order, where a file has them instead.

    `add_space_prefix`: a text, and what follows a special token, begins with a space.

    `remove_extra_whitespaces` is kept for files; like llama.cpp for this model, encoding does not use it.
    """

    kind = "spm"
    model = "llama"

    def __init__(
        self,
        tokens: Strings,
        scores: NDArray[np.float32] | None,
        *,
        merges: Strings | None = None,
        types: NDArray[np.int32] | None = None,
        ids: Mapping[str, int] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        add_space_prefix: bool = True,
        remove_extra_whitespaces: bool = False,
        chat_template: str | None = None,
        notes: Iterable[str] = (),
        stored: str = "",
    ) -> None:
        said = list(notes)
        self._merges = merges
        if merges is not None:
            scores = _scores(tokens, merges)
        if scores is None:
            said.append("no scores are stored: all are taken as 0, and pairs are joined from the left")
            scores = np.zeros(len(tokens), np.float32)
        self.scores = one_each(np.asarray(scores, np.float32), len(tokens), 0)
        self.add_space_prefix = add_space_prefix
        self.remove_extra_whitespaces = remove_extra_whitespaces
        defaults = {role: i for role, i in DEFAULT_IDS.items() if i < len(tokens)}
        super().__init__(
            tokens,
            types=types,
            ids=defaults | dict(ids or {}),
            add_bos=True if add_bos is None else add_bos,
            add_eos=bool(add_eos),
            chat_template=chat_template,
            notes=said,
            stored=stored,
            lengths={"scores": len(scores)},
        )
        self._pieces: dict[str, list[int]] = {}
        self._clean: dict[tuple[int, int], bool] = {}
        self._lengths: dict[int, int] = {}

    # -- tokens

    def _token_bytes(self, id: int) -> bytes:
        stored, kind = self.tokens[id], self.type_of(id)
        if kind == TokenType.BYTE:
            return byte_of(stored)
        return stored if kind in SPECIAL else stored.replace(SPACE.encode(), b" ")

    def vocabulary(self) -> Vocabulary:
        """Tokens, and the merges that stand in for scores."""
        return replace(super().vocabulary(), merges=self._merges)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of a sequence of ids, without the space that encoding puts before a text."""
        if not self.add_space_prefix:
            return super().decode_bytes(ids)
        parts, fresh = [], True
        for i in ids:
            data = self.token_bytes(i)
            special = self.type_of(i) in SPECIAL
            parts.append(data[1:] if fresh and not special and data[:1] == b" " else data)
            fresh = special
        return b"".join(parts)

    @cached_property
    def _texts(self) -> dict[str, int]:
        """Text -> id of the tokens that plain text can become."""
        kinds = self.types
        return {
            data.decode("utf-8", "surrogateescape"): i  # what is no UTF-8 is no part of a text
            for i, data in enumerate(self.tokens)
            if kinds is None or kinds[i] in JOINABLE
        }

    @cached_property
    def _byte_id(self) -> list[int]:
        """Id of the token of each byte, -1 where there is none."""
        ids = [self.tokens.find(f"<0x{b:02X}>".encode()) for b in range(256)]
        return [self._texts.get(chr(b), -1) if i < 0 and b < 128 else i for b, i in enumerate(ids)]

    def byte_ids(self, data: bytes) -> list[int]:
        """One id for each byte; UnsupportedError where the vocabulary has no token for one."""
        return ids_of_bytes(self._byte_id, data)

    # -- joining

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(left, right) -> (rank, id): every way to make a token of two tokens; equal scores have equal ranks."""
        texts = self._texts
        pairs = {}
        if self._merges is not None:
            for rank, line in enumerate(self._merges):
                a, _, b = line.decode("utf-8", "surrogateescape").partition(" ")
                if a in texts and b in texts and a + b in texts:  # others are of special tokens
                    pairs[texts[a], texts[b]] = (rank, texts[a + b])
            return pairs
        levels = {s: r for r, s in enumerate(sorted({float(s) for s in self.scores}, reverse=True))}
        for text, i in texts.items():
            rank = levels[float(self.scores[i])]
            for k in range(1, len(text)):
                left = texts.get(text[:k])
                if left is not None:
                    right = texts.get(text[k:])
                    if right is not None:
                        pairs[left, right] = (rank, i)
        return pairs

    def merge_texts(self) -> Strings:
        """The joins as "left right" merges, best first, for formats that have merges and no scores."""
        ordered = sorted(self._pairs.items(), key=lambda item: item[1])
        return Strings.of(self.tokens[a] + b" " + self.tokens[b] for (a, b), _ in ordered)

    @cached_property
    def _piece(self) -> re.Pattern[str]:
        """Pieces between which no token reaches: they begin at a space that no token holds after another character."""
        inside = {text[k - 1] for text in self._texts for k in range(1, len(text)) if text[k] == SPACE}
        before = re.escape("".join(sorted(inside - {SPACE})))
        # a piece goes on over a space when what stands before it may be joined with it
        go_on = f"(?:(?<=[{before}]){SPACE}+[^{SPACE}]*)*" if before else ""
        return re.compile(f"{SPACE}*[^{SPACE}]+{go_on}|{SPACE}+")

    @cached_property
    def _neighbours(self) -> frozenset[str]:
        """All two-character strings that some token holds."""
        return frozenset(text[k : k + 2] for text in self._texts for k in range(len(text) - 1))

    def _encode_text(self, text: str, out: list[int]) -> None:
        if SPACE in text:  # a space sign of the text itself is no space: its bytes keep it one
            for k, part in enumerate(text.split(SPACE)):
                if k:
                    out += self.byte_ids(SPACE.encode())
                if part:
                    self._encode_text(part, out)
            return
        text = text.replace(" ", SPACE)
        known = self._pieces
        for m in self._piece.finditer(text):
            piece = m.group()
            ids = known.get(piece)
            if ids is None:
                ids = self._encode_piece(piece)
                if len(piece) < 64:
                    if len(known) >= REMEMBERED:
                        known.clear()
                    known[piece] = ids
            out += ids

    def _encode_piece(self, piece: str) -> list[int]:
        """Cut further wherever two characters stand side by side in no token, then join."""
        out: list[int] = []
        neighbours, start = self._neighbours, 0
        for k in range(1, len(piece)):
            if piece[k - 1 : k + 1] not in neighbours:
                self._join(piece[start:k], out)
                start = k
        self._join(piece[start:], out)
        return out

    def _join(self, piece: str, out: list[int]) -> None:
        if len(piece) <= BLOCK:
            out += self._bytes_for(piece, merge(self._symbols(piece), self._pairs))
            return
        blocks: dict[str, list[int]] = {}

        def encode(lo: int, hi: int) -> list[int]:
            part = piece[lo:hi]
            if part not in blocks:
                blocks.clear()
                blocks[part] = merge(self._symbols(part), self._pairs)
            return blocks[part]

        ids = encode_blocks(len(piece), encode, self._length, self._stay_apart)
        out += self._bytes_for(piece, ids)

    def _symbols(self, piece: str) -> list[int]:
        texts = self._texts
        return [texts.get(c, -1) for c in piece]

    def _text(self, id: int) -> str:
        return self.tokens[id].decode("utf-8", "surrogateescape")

    def _length(self, id: int) -> int:
        """Characters of a token; one for a character without a token."""
        known = self._lengths.get(id)
        if known is None:
            known = self._lengths[id] = 1 if id < 0 else len(self._text(id))
        return known

    def _stay_apart(self, a: int, b: int) -> bool:
        if a < 0 or b < 0:
            return True
        known = self._clean.get((a, b))
        if known is None:
            known = merge(self._symbols(self._text(a) + self._text(b)), self._pairs) == [a, b]
            self._clean[a, b] = known
        return known

    def _bytes_for(self, piece: str, ids: list[int]) -> list[int]:
        """Replace characters without a token (negative ids) by the tokens of their bytes."""
        if -1 not in ids:
            return ids
        out: list[int] = []
        at = 0
        for i in ids:
            if i < 0:
                out += self.byte_ids(piece[at].encode())
                at += 1
            else:
                out.append(i)
                at += self._length(i)
        return out

    def encode(self, text: str | bytes, special: bool = False) -> list[int]:
        """Ids of a text, without BOS or EOS. `special`: control tokens written in the text become their ids."""
        self._check_for_text()
        out: list[int] = []
        fresh = True
        for part in self._partition(as_bytes(text), special):
            if isinstance(part, int):
                out.append(part)
                fresh = True
            else:
                self._encode_bytes(b" " + part if fresh and self.add_space_prefix else part, out)
                fresh = False
        return out


def _scores(tokens: Strings, merges: Strings) -> NDArray[np.float32]:
    """Scores that put tokens in the order of the first merge that makes them; what no merge makes comes last."""
    known = {t: i for i, t in enumerate(tokens)}
    scores = np.full(len(tokens), -1e9, np.float32)
    for k, line in enumerate(merges):
        i = known.get(line.replace(b" ", b""))
        if i is not None:  # else the merge is a fault, which is told when the vocabulary is used
            scores[i] = max(scores[i], -float(k))
    return scores

"""What every tokenizer can do: text is bytes at heart, ids are plain ints, nothing is built before it is asked for."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError, blaming
from .faults import Origin, Vocabulary, misfits, refuse
from .special import (
    ALWAYS_PARSED,
    BY_TEXT,
    END_IS_NOT_THE_END,
    END_ROLES,
    END_TEXTS,
    HIDDEN,
    S_IS_NOT_THE_END,
    SPECIAL,
    TokenType,
)
from .strings import Strings

Scalar = TypeVar("Scalar", np.int32, np.float32)
INVALID = re.compile("([\udc80-\udcff]+)")  # undecodable bytes, as surrogateescape writes them


class Tokenizer(ABC):
    """A vocabulary and the rule that cuts text into it.

    `tokens`: token texts as stored. `types`: one TokenType for each, or None when all are normal. `ids`: role
    ("bos", "unk", "fim_pre", ...) -> id. `notes`: what had to be assumed. `stored`: name and version of the tokenizer's
    own file, or "". `lstrip`, `rstrip`: ids of special tokens that swallow the whitespace before or after them.
    `origin`: where it was read. `lengths`: entries stored of the arrays that have one for each token. `strays`: ids
    outside the vocabulary.

    A malformed vocabulary (faults.py) is held as well as it can be, and refused when text is encoded.
    """

    kind: str = ""
    model: str = "gpt2"  # `tokenizer.ggml.model`
    pre: str = ""

    def __init__(
        self,
        tokens: Strings,
        *,
        types: NDArray[np.int32] | None = None,
        ids: Mapping[str, int] | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        chat_template: str | None = None,
        notes: Iterable[str] = (),
        stored: str = "",
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.types = None if types is None else one_each(types, len(tokens), TokenType.NORMAL)
        self.ids: dict[str, int] = {role: i for role, i in (ids or {}).items() if 0 <= i < len(tokens)}
        self.strays = {role: i for role, i in (ids or {}).items() if role not in self.ids}
        self.lengths = {**({} if types is None else {"token_type": len(types)}), **(lengths or {})}
        self.origin = Origin()
        self._sound = False
        bad = [f"as stored, {fault}" for fault in misfits(Vocabulary(tokens, ids=self.strays, lengths=self.lengths))]
        self.add_bos, self.add_eos = add_bos, add_eos
        self.chat_template, self.stored = chat_template, stored
        bad += ["BOS is to be added, but the vocabulary names none"] if add_bos and "bos" not in self.ids else []
        bad += ["EOS is to be added, but the vocabulary names none"] if add_eos and "eos" not in self.ids else []
        self.notes: tuple[str, ...] = (*notes, *bad)
        self.lstrip: frozenset[int] = frozenset()
        self.rstrip: frozenset[int] = frozenset()
        self._bytes: dict[int, bytes] = {}

    # -- facts

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text; None where the vocabulary has none."""
        return self.ids.get("bos")

    @property
    def eos(self) -> int | None:
        """Id of the token that ends a text; None where the vocabulary has none."""
        return self.ids.get("eos")

    def type_of(self, id: int) -> TokenType:
        """Type of a token after the corrections by text that llama.cpp makes."""
        self.check(id)
        if id in self._by_text:
            return self._by_text[id]
        stored = TokenType.NORMAL if self.types is None else int(self.types[id])
        return TokenType(stored) if 0 <= stored <= TokenType.BYTE else TokenType.UNDEFINED

    @cached_property
    def _roles(self) -> dict[str, int]:
        """`ids`, and for roles without a key the token that has one of the texts known for it."""
        found = dict(self.ids)
        for role, texts in BY_TEXT.items():
            if role not in found:
                hits = [i for i in map(self.find, texts) if i is not None]
                if hits:
                    found[role] = hits[0]
        return found

    @cached_property
    def _by_text(self) -> dict[int, TokenType]:
        """Types that the text of a token settles."""
        hits = {i for role, i in self._roles.items() if role in BY_TEXT and role not in self.ids}
        hits |= {i for i in map(self.find, END_TEXTS) if i is not None}
        types = dict.fromkeys(hits, TokenType.CONTROL)
        types |= {i: TokenType.USER_DEFINED for i in map(self.find, ALWAYS_PARSED) if i is not None}
        for text, others in (("<|end|>", END_IS_NOT_THE_END), ("</s>", tuple((t,) for t in S_IS_NOT_THE_END))):
            i = self.find(text)
            if i is not None and any(all(self.find(t) is not None for t in group) for group in others):
                types[i] = TokenType.USER_DEFINED if text == "<|end|>" else TokenType.NORMAL
        return types

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation: eos, and the tokens known by their text to do so."""
        ids = {self._roles[role] for role in END_ROLES if role in self._roles}
        ids |= {i for i in map(self.find, END_TEXTS) if i is not None and self._by_text[i] == TokenType.CONTROL}
        not_end = {
            i for i in map(self.find, ("<|end|>", "</s>")) if i is not None and self._by_text[i] != TokenType.CONTROL
        }
        return frozenset(ids - not_end)

    def find(self, text: str) -> int | None:
        """Id of the token stored as `text`, or None."""
        i = self.tokens.find(text.encode("utf-8", "surrogateescape"))
        return i if i >= 0 else None

    def check(self, id: int) -> None:
        """Raise UnsupportedError for an id outside the vocabulary."""
        if not 0 <= id < self.vocab_size:
            raise UnsupportedError("no such token", expected=f"an id from 0 to {self.vocab_size - 1:,}", got=id)

    # -- faults

    def vocabulary(self) -> Vocabulary:
        """What faults.py judges the tokenizer by."""
        ids = self.ids | self.strays
        return Vocabulary(self.tokens, ids=ids, lengths=self.lengths, c_strings=self.origin.c_strings)

    def check_vocabulary(self) -> None:
        """Raise FormatError for the first fault of the vocabulary."""
        if not self._sound:
            refuse(self.vocabulary(), self.origin)
            self._sound = True

    def _check_for_text(self) -> None:
        """As much of `check_vocabulary` as encoding does not do itself."""
        self.check_vocabulary()

    # -- ids to bytes

    @abstractmethod
    def _token_bytes(self, id: int) -> bytes:
        """The bytes of token `id`, which is in the vocabulary."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; a special token's are its text."""
        known = self._bytes.get(id)
        if known is None:
            self.check(id)
            with blaming(self.origin.path):
                known = self._bytes[id] = self._token_bytes(id)
        return known

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of a sequence of ids, special tokens as their text."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of a sequence of ids; undecodable bytes become U+FFFD, control tokens show only with `special`."""
        return self.decode_bytes(ids if special else self._visible(ids)).decode("utf-8", "replace")

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if self.type_of(i) not in HIDDEN]

    # -- text to ids

    @abstractmethod
    def _encode_text(self, text: str, out: list[int]) -> None:
        """Append the ids of valid text without special tokens."""

    @abstractmethod
    def byte_ids(self, data: bytes) -> list[int]:
        """One id for each byte, for bytes that are no UTF-8; UnsupportedError where the vocabulary lacks one."""

    def encode(self, text: str | bytes, special: bool = False) -> list[int]:
        """Ids of a text, without BOS or EOS. `special`: control tokens written in the text become their ids.

        Raises FormatError where the vocabulary is malformed.
        """
        self._check_for_text()
        out: list[int] = []
        with blaming(self.origin.path):
            for part in self._partition(as_bytes(text), special):
                if isinstance(part, int):
                    out.append(part)
                else:
                    self._encode_bytes(part, out)
        return out

    def encode_prompt(
        self, text: str | bytes, special: bool = False, warn: Callable[[str], object] | None = None
    ) -> list[int]:
        """Ids of a text with BOS and EOS where the vocabulary asks for them; a text that brings its own keeps one.

        `warn` is called with a sentence when that happened.
        """
        ids = self.encode(text, special)
        say = warn or (lambda _: None)
        if self.add_bos and self.bos is not None:
            if ids[:1] == [self.bos]:
                say("the prompt already begins with BOS; no second one was added")
            else:
                ids.insert(0, self.bos)
        if self.add_eos and self.eos is not None:
            if ids[-1:] == [self.eos]:
                say("the prompt already ends with EOS; no second one was added")
            else:
                ids.append(self.eos)
        return ids

    def _encode_bytes(self, data: bytes, out: list[int]) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            for k, part in enumerate(INVALID.split(data.decode("utf-8", "surrogateescape"))):
                if k % 2:
                    out += self.byte_ids(part.encode("utf-8", "surrogateescape"))
                elif part:
                    self._encode_text(part, out)
        else:
            self._encode_text(text, out)

    @cached_property
    def _specials(self) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
        """(text, id) of tokens that are always cut out, and of those that are when special tokens are parsed."""
        listed: Sequence[int] = (
            [] if self.types is None else np.flatnonzero(np.isin(self.types[: self.vocab_size], SPECIAL)).tolist()
        )
        always, parsed = [], []
        for i in sorted({*listed, *self._by_text}):
            kind, text = self.type_of(i), self.special_text(i)
            if text and kind in SPECIAL:
                parsed.append((text, i))
                if kind == TokenType.USER_DEFINED:
                    always.append((text, i))

        def shorter_later(entry: tuple[bytes, int]) -> int:
            return -len(entry[0])

        return sorted(always, key=shorter_later), sorted(parsed, key=shorter_later)

    @cached_property
    def _first_bytes(self) -> re.Pattern[bytes]:
        """What every special token begins with: without one of these a text holds none."""
        first = {re.escape(text[:1]) for text, _ in self._specials[True]}
        return re.compile(b"[" + b"".join(sorted(first)) + b"]")

    def special_text(self, id: int) -> bytes:
        """The text by which a special token is recognised."""
        return self.tokens[id]

    def _partition(self, data: bytes, special: bool) -> Iterable[bytes | int]:
        """Cut special tokens out: longer ones first, wherever they stand, as llama.cpp does."""
        parts: list[bytes | int] = [data] if data else []
        listed = self._specials[special]
        if not listed or not self._first_bytes.search(data):
            return parts
        for text, i in listed:
            if text in data:
                parts = [q for p in parts for q in (self._cut(p, text, i) if isinstance(p, bytes) else (p,))]
        return parts

    def _cut(self, data: bytes, text: bytes, id: int) -> Iterator[bytes | int]:
        pieces = data.split(text)
        for k, piece in enumerate(pieces):
            if k:
                yield id
                piece = piece.lstrip() if id in self.rstrip else piece
            piece = piece.rstrip() if id in self.lstrip and k < len(pieces) - 1 else piece
            if piece:
                yield piece


def ids_of_bytes(table: Sequence[int], data: bytes) -> list[int]:
    """The id of each byte by a table of 256, which has -1 where there is none: UnsupportedError at such a byte."""
    ids = [table[b] for b in data]
    if -1 in ids:
        raise UnsupportedError(
            "the vocabulary has no token for a byte of the text",
            expected="256 byte tokens",
            got=f"0x{data[ids.index(-1)]:02x}",
        )
    return ids


def one_each(values: NDArray[Scalar], n: int, fill: int) -> NDArray[Scalar]:
    """The first `n` values, and `fill` where there are fewer."""
    missing = np.full(max(n - len(values), 0), fill, values.dtype)
    return np.concatenate([values[:n], missing]) if len(values) != n else values


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8 of a text; bytes that came in as lone surrogates go out as they were."""
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")

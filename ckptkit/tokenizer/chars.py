"""One token for each character: microgpt's (the sorted characters, then BOS) and byte maps (byte i is token i)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import FormatError, UnsupportedError
from .base import Tokenizer
from .byte_alphabet import to_bytes, to_text
from .faults import Vocabulary
from .special import TokenType
from .strings import Strings

BOS_TEXT = "<bos>"


class CharTokenizer(Tokenizer):
    """`chars`: the bytes of each token. `bos`: id of a token without bytes that begins and ends a text, or None.

    Raises FormatError for two equal tokens. Characters outside the vocabulary are an UnsupportedError when encoded.
    """

    kind = "char"

    def __init__(self, chars: Sequence[bytes], bos: int | None = None) -> None:
        texts = list(chars)
        if bos is not None and not 0 <= bos < len(texts):
            raise FormatError("BOS is outside the vocabulary", at="bos", expected=f"0 to {len(texts) - 1}", got=bos)
        self._id: dict[bytes, int] = {}
        for i, c in enumerate(texts):
            if i == bos:
                continue
            if not c:
                raise FormatError("a token is empty", at=f"token {i}", expected="a character", got="nothing")
            if self._id.setdefault(c, i) != i:
                raise FormatError("two tokens are the same character", at=f"tokens {self._id[c]} and {i}", got=repr(c))
        types = np.full(len(texts), TokenType.NORMAL, np.int32)
        ids = {}
        if bos is not None:
            texts[bos] = BOS_TEXT.encode()
            types[bos] = TokenType.CONTROL
            ids = {"bos": bos, "eos": bos}
        super().__init__(Strings.of(texts), types=types, ids=ids, add_bos=bos is not None)

    @classmethod
    def from_chars(cls, chars: Sequence[str]) -> CharTokenizer:
        """microgpt's: the characters in order, then BOS, which also ends a document."""
        return cls([*(c.encode("utf-8", "surrogatepass") for c in chars), b""], len(chars))

    @classmethod
    def from_bytes(cls, data: bytes) -> CharTokenizer:
        """A byte map: byte i of `data` is the character of token i."""
        return cls([data[i : i + 1] for i in range(len(data))])

    @classmethod
    def from_alphabet(cls, tokens: Sequence[bytes], bos: int | None) -> CharTokenizer:
        """From texts in the byte alphabet, as `alphabet_texts` gives them."""
        chars = []
        for i, text in enumerate(tokens):
            data = b"" if i == bos else to_bytes(text.decode("utf-8", "replace"))
            if data is None:
                raise FormatError("a token is not in the byte alphabet", at=f"token {i:,}", got=repr(text))
            chars.append(data)
        return cls(chars, bos)

    @property
    def chars(self) -> list[str]:
        """The characters in order, without BOS."""
        return [t.decode("utf-8", "surrogateescape") for i, t in enumerate(self.tokens) if i != self.bos]

    def alphabet_texts(self) -> Strings:
        """Token texts as GGUF writes them: in the byte alphabet, BOS as it is."""
        return Strings.of(t if i == self.bos else to_text(t).encode() for i, t in enumerate(self.tokens))

    def vocabulary(self) -> Vocabulary:
        """Texts in the byte alphabet: a character may be a NUL byte."""
        return replace(super().vocabulary(), tokens=self.alphabet_texts())

    def _token_bytes(self, id: int) -> bytes:
        return self.tokens[id]

    def type_of(self, id: int) -> TokenType:
        """Control for BOS, normal for every character."""
        self.check(id)
        return TokenType.CONTROL if id == self.bos else TokenType.NORMAL

    def byte_ids(self, data: bytes) -> list[int]:
        """One id for each byte; UnsupportedError for a byte without a token."""
        return [self._lookup(data[k : k + 1]) for k in range(len(data))]

    def _lookup(self, char: bytes) -> int:
        if char not in self._id:
            known = b"".join(sorted(self._id))[:80]
            raise UnsupportedError(
                "a character is not in the vocabulary",
                expected=f"characters of {known.decode('utf-8', 'replace')!r}",
                got=repr(char.decode("utf-8", "backslashreplace")),
                hint="a character tokenizer knows only what it was trained on",
            )
        return self._id[char]

    def _encode_text(self, text: str, out: list[int]) -> None:
        known = self._id
        for c in text:
            data = c.encode()
            out += [known[data]] if data in known else self.byte_ids(data) if len(data) > 1 else [self._lookup(data)]

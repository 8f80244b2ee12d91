"""Byte-level BPE (`tokenizer.ggml.model` "gpt2"): words cut by a splitter, bytes merged by rank.

Words are merged by the `tokenizers` package, built on first use from the tokens and merges that the file carries, and
remembered; very long ones go in blocks. In GGUF and Hugging Face files tokens are written in the byte alphabet, in
llm.c files as raw bytes; both are held as stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from . import merges as merge_lists
from .base import Tokenizer, ids_of_bytes
from .byte_alphabet import TO_CHAR, to_bytes, to_text
from .faults import Vocabulary, refuse
from .merging import encode_blocks
from .pre import PRES, lookup
from .special import SPECIAL, TokenType
from .split import words
from .strings import Strings

LONG = 16384  # alphabet characters from which a word is encoded in blocks of this size
REMEMBERED = 1 << 18  # words
UNREACHED = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED, TokenType.BYTE)  # never the token of a plain word


class ByteBPE(Tokenizer):
    """Tokens in the byte alphabet, or as raw bytes with `raw`; `merges` as "left right" in the alphabet.

    Without merges they are rebuilt from the order of the ids, on first use. `pre` "" becomes "default" with a note, as
    llama.cpp does it; an unknown one is kept, and refused when text is encoded.
    """

    kind = "byte-bpe"
    model = "gpt2"

    def __init__(
        self,
        tokens: Strings,
        merges: Strings | None,
        *,
        pre: str,
        raw: bool = False,
        types: NDArray[np.int32] | None = None,
        ids: Mapping[str, int] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
        notes: Iterable[str] = (),
        stored: str = "",
    ) -> None:
        said = list(notes)
        if not pre:
            said.append('no pre-tokenizer is named: took "default", which cuts text differently from "gpt-2"')
        elif pre not in PRES:
            said.append(f"pre-tokenizer {pre!r} is not known: text cannot be encoded")
        if merges is None:
            said.append("no merges are stored: they are rebuilt from the order of the ids")
        self.pre = pre or "default"
        row = PRES.get(self.pre)
        self.ignore_merges = row is not None and row.ignore_merges
        self.raw = raw
        self._merges = merges
        self._looked_at = False
        super().__init__(
            tokens,
            types=types,
            ids=ids,
            add_bos=(row is not None and row.add_bos) if add_bos is None else add_bos,
            add_eos=bool(add_eos),
            chat_template=chat_template,
            notes=said,
            stored=stored,
        )
        self._words: dict[str, list[int]] = {}
        self._clean: dict[tuple[int, int], bool] = {}

    # -- tokens

    def _token_bytes(self, id: int) -> bytes:
        stored = self.tokens[id]
        kind = self.type_of(id)
        if self.raw or kind in SPECIAL:
            return stored
        if kind == TokenType.BYTE:
            return byte_of(stored)
        data = to_bytes(stored.decode("utf-8", "replace"))
        return stored if data is None else data

    def token_text(self, id: int) -> bytes:
        """How GGUF and Hugging Face write a token: special ones as they are, others in the byte alphabet."""
        stored = self.tokens[id]
        return to_text(stored).encode() if self.raw and self.type_of(id) not in SPECIAL else stored

    def token_texts(self) -> Strings:
        """`token_text` of every token."""
        return Strings.of(map(self.token_text, range(self.vocab_size))) if self.raw else self.tokens

    def vocabulary(self) -> Vocabulary:
        """Texts and merges as they are written in the byte alphabet."""
        return replace(super().vocabulary(), tokens=self.token_texts(), merges=self._merges)

    def _check_for_text(self) -> None:
        if not self._sound and not self._looked_at:  # the package looks at the merges, and faster
            refuse(replace(self.vocabulary(), merges=None), self.origin)
            self._looked_at = True

    # -- merges

    def merge_texts(self) -> Strings:
        """The merges, in order, as "left right" in the byte alphabet; rebuilt where the file has none."""
        if self._merges is None:
            texts = {i: self.token_text(i) for pair in self.merge_ids for i in pair}
            self._merges = Strings.of(texts[a] + b" " + texts[b] for a, b in self.merge_ids)
        return self._merges

    @cached_property
    def merge_ids(self) -> list[tuple[int, int]]:
        """The merges, in order, as pairs of ids. Raises FormatError where the vocabulary is malformed."""
        if self._merges is not None:
            self.check_vocabulary()
            return [(self._vocabulary[a], self._vocabulary[b]) for a, b in self._merge_pairs()]
        kinds = np.ones(self.vocab_size, np.int32) if self.types is None else self.types[: self.vocab_size]
        plain = np.flatnonzero(~np.isin(kinds, (*SPECIAL, TokenType.UNUSED, TokenType.BYTE))).tolist()
        return merge_lists.rebuild([self.token_bytes(i) for i in range(self.vocab_size)], plain)

    def _merge_pairs(self) -> list[tuple[str, str]]:
        pairs = []
        for line in self.merge_texts():
            left, _, right = line.decode("utf-8", "backslashreplace").partition(" ")
            pairs.append((left, right))
        return pairs

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Token text -> id; what is no UTF-8 gets another text, which no merge reaches."""
        return {t.decode("utf-8", "backslashreplace"): i for i, t in enumerate(self.token_texts())}

    # -- encoding

    @cached_property
    def _model(self) -> Any:
        from tokenizers.models import BPE

        pairs = self._merge_pairs()
        try:
            model = BPE(self._vocabulary, pairs, cache_capacity=0)
        except Exception as e:
            self.check_vocabulary()  # names the merge that is to blame
            raise FormatError("the merges do not fit the vocabulary", got=str(e)) from e
        self._sound = self._looked_at  # the merges were all that was left
        return model

    @cached_property
    def _byte_id(self) -> list[int]:
        """Id of the token of each byte, -1 where there is none."""
        vocabulary = self._vocabulary
        ids = [vocabulary.get(chr(TO_CHAR[b]), -1) for b in range(256)]
        return [vocabulary.get(f"<0x{b:02X}>", -1) if i < 0 else i for b, i in enumerate(ids)]

    @cached_property
    def _lacking(self) -> frozenset[str]:
        """Alphabet characters of the bytes that have no token."""
        return frozenset(chr(TO_CHAR[b]) for b in range(256) if chr(TO_CHAR[b]) not in self._vocabulary)

    def byte_ids(self, data: bytes) -> list[int]:
        """One id for each byte; UnsupportedError where the vocabulary has no token for one."""
        return ids_of_bytes(self._byte_id, data)

    def _encode_text(self, text: str, out: list[int]) -> None:
        known = self._words
        for word in words(lookup(self.pre), text):
            ids = known.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) < 64:
                    if len(known) >= REMEMBERED:
                        known.clear()
                    known[word] = ids
            out += ids

    def _encode_word(self, word: str) -> list[int]:
        text = to_text(word.encode())
        if self.ignore_merges:
            whole = self._vocabulary.get(text)
            if whole is not None and self.type_of(whole) not in UNREACHED:
                return [whole]
        if self._lacking and not self._lacking.isdisjoint(text):
            return self._encode_lacking(word.encode())
        if len(text) <= LONG:
            return self._merged(text)
        return encode_blocks(
            len(text),
            lambda lo, hi: self._merged(text[lo:hi]),
            lambda i: len(self.token_bytes(i)),
            self._stay_apart,
            LONG,
        )

    def _encode_lacking(self, data: bytes) -> list[int]:
        """A word with bytes that no merge can reach: they become byte tokens, and what is between them is merged."""
        out: list[int] = []
        start = 0
        for k, b in enumerate(data):
            if chr(TO_CHAR[b]) in self._lacking:
                out += self._merged(to_text(data[start:k])) + self.byte_ids(data[k : k + 1])
                start = k + 1
        return out + self._merged(to_text(data[start:]))

    def _merged(self, text: str) -> list[int]:
        return [t.id for t in self._model.tokenize(text)] if text else []

    def _stay_apart(self, a: int, b: int) -> bool:
        known = self._clean.get((a, b))
        if known is None:
            text = to_text(self.token_bytes(a) + self.token_bytes(b))
            known = self._clean[a, b] = self._merged(text) == [a, b]
        return known


def byte_of(text: bytes) -> bytes:
    """The byte that "<0x0A>" stands for. Raises FormatError for another text."""
    try:
        if len(text) == 6 and text[:3] == b"<0x" and text[5:] == b">":
            return bytes([int(text[3:5], 16)])
    except ValueError:
        pass
    raise FormatError("a byte token is not written as one", expected="<0x00> to <0xFF>", got=repr(text))

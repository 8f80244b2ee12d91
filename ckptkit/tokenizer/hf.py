"""A tokenizer.json that has no name here: run by the `tokenizers` package as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from .base import Tokenizer, ids_of_bytes
from .byte_alphabet import TO_CHAR, to_bytes
from .byte_bpe import byte_of
from .special import SPECIAL, TokenType
from .strings import Strings


@contextmanager
def _refusals() -> Iterator[None]:
    """The package's errors as ours; a panic of its Rust code is a BaseException of a class that it does not export."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise FormatError("the tokenizers package refuses tokenizer.json", got=str(e)[:200]) from e


class HFTokenizer(Tokenizer):
    """`json`: the text of tokenizer.json. `byte_level`: tokens are written in the byte alphabet."""

    kind = "hf"
    model = ""

    def __init__(
        self,
        tokens: Strings,
        json: str,
        *,
        byte_level: bool,
        types: NDArray[np.int32] | None = None,
        ids: Mapping[str, int] | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        chat_template: str | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(
            tokens, types=types, ids=ids, add_bos=add_bos, add_eos=add_eos, chat_template=chat_template, notes=notes
        )
        self.json, self.byte_level = json, byte_level

    @cached_property
    def _package(self) -> Any:
        from tokenizers import Tokenizer as Package

        with _refusals():
            return Package.from_str(self.json)

    def _token_bytes(self, id: int) -> bytes:
        stored = self.tokens[id]
        if self.type_of(id) not in SPECIAL:
            text = stored.decode("utf-8", "replace")
            if self.byte_level:
                data = to_bytes(text)
                return stored if data is None else data
            if self.type_of(id) == TokenType.BYTE:
                return byte_of(stored)
            return text.replace("▁", " ").encode()
        return stored

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of a sequence of ids, by the file's own decoder."""
        ids = list(ids)
        with _refusals():
            return str(self._package.decode(ids, skip_special_tokens=not special))

    @cached_property
    def _byte_id(self) -> list[int]:
        """Id of the token of each byte, -1 where there is none."""
        ids = (self.find(chr(TO_CHAR[b]) if self.byte_level else f"<0x{b:02X}>") for b in range(256))
        return [-1 if i is None else i for i in ids]

    def byte_ids(self, data: bytes) -> list[int]:
        """One id for each byte; UnsupportedError where the vocabulary has no token for one."""
        return ids_of_bytes(self._byte_id, data)

    def _encode_text(self, text: str, out: list[int]) -> None:
        with _refusals():
            out += self._package.encode(text, add_special_tokens=False).ids

    def type_of(self, id: int) -> TokenType:
        """Type of a token; the file's own list of special tokens is the only source."""
        self.check(id)
        return TokenType.NORMAL if self.types is None else TokenType(int(self.types[id]))

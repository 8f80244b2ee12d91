"""What scored tokens are as text, and what each of them got."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..tokenizer.special import TokenType
from .log_softmax import F32, F64, rank_rows
from .perplexity_windows import Ids, Window

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

SPACES = b" \t\n\r\v\f"
COLUMNS = ("window", "index", "position", "id", "nll", "rank", "best", "best_nll")
Columns = Mapping[str, npt.NDArray[Any]]


class TokenText:
    """Bytes and words that tokens stand for, looked up once for each id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        n = tokenizer.vocab_size + 1  # the last place stands for ids that the tokenizer does not have
        self._n_bytes = np.full(n, -1, np.int32)
        self._starts = np.zeros((2, n), np.int32)  # word starts in the token: after a word, after a space
        self._open = np.zeros(n, np.int8)  # 1: what follows begins a word

    def bytes_of(self, id: int) -> bytes:
        """The text bytes of a token: none for control tokens, and none for ids that the tokenizer does not have."""
        if id >= self.tokenizer.vocab_size or self.tokenizer.type_of(id) == TokenType.CONTROL:
            return b""
        return self.tokenizer.token_bytes(id)

    def count(self, before: int, ids: Ids) -> tuple[int, int]:
        """Bytes of `ids`, and words that begin in them; `before` is the id that stands before the first."""
        seen = np.minimum(np.concatenate(([before], ids)).astype(np.int64), self.tokenizer.vocab_size)
        for id in np.unique(seen[self._n_bytes[seen] < 0]).tolist():
            self._look_up(id)
        after, here = self._open[seen[:-1]], seen[1:]
        return int(self._n_bytes[here].sum()), int(self._starts[after, here].sum())

    def _look_up(self, id: int) -> None:
        text = self.bytes_of(id)
        space = [True, *(c in SPACES for c in text)]
        inside = sum(a and not b for a, b in pairwise(space[1:]))
        begins = bool(text) and not space[1]
        self._n_bytes[id] = len(text)
        self._starts[:, id] = inside, inside + begins
        self._open[id] = space[-1]


class PerToken:
    """A sink that keeps what every scored token got: arrays of one value a token."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []

    def take(self, number: int, window: Window, lo: int, logits: F32, nll: F64) -> None:
        """Keep one block's values."""
        n = len(nll)
        targets = window.targets[lo : lo + n]
        rank, best, best_nll = rank_rows(logits, targets, self.threads)
        position = np.arange(window.first + lo + 1, window.first + lo + 1 + n, dtype=np.int32)
        index = np.arange(window.start + lo, window.start + lo + n, dtype=np.int64)
        whole = np.full(n, number, np.int32)
        self._parts.append((whole, index, position, targets.copy(), nll.copy(), rank, best, best_nll))

    def columns(self) -> Columns:
        """window, index (in the source), position (in the window), id, nll, rank, best (the likeliest id), best_nll."""
        if not self._parts:
            return {name: np.empty(0) for name in COLUMNS}
        return {
            name: np.concatenate(parts) for name, parts in zip(COLUMNS, zip(*self._parts, strict=True), strict=True)
        }


def write_lines(out: BinaryIO, columns: Columns, tokenizer: Tokenizer | None, mode: str) -> None:
    """One JSON line for each scored token: its place, id, text, nll in nats, rank, and what was thought likeliest.

    `text` has U+FFFD where a token is no UTF-8 by itself; then `bytes` holds it in hex.
    """
    shown: dict[int, dict[str, Any]] = {}

    def text(id: int) -> dict[str, Any]:
        if id not in shown:
            shown[id] = _text(tokenizer, id)
        return shown[id]

    rows = zip(*(columns[name].tolist() for name in COLUMNS), strict=True)
    for window, index, position, id, nll, rank, best, best_nll in rows:
        line = {"mode": mode, "window": window, "index": index, "position": position, "id": id, **text(id)}
        line |= {"nll": nll, "rank": rank, "best": best, "best_text": text(best).get("text"), "best_nll": best_nll}
        out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _text(tokenizer: Tokenizer | None, id: int) -> dict[str, Any]:
    if tokenizer is None or id >= tokenizer.vocab_size:
        return {}
    raw = tokenizer.token_bytes(id)
    try:
        return {"text": raw.decode()}
    except UnicodeDecodeError:
        return {"text": raw.decode("utf-8", "replace"), "bytes": raw.hex()}

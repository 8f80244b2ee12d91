"""llama-perplexity's file of log-probabilities (--save-all-logits), written and read.

Source of truth: llama.cpp tools/perplexity/perplexity.cpp. Little-endian:

| bytes               | what                                                                          |
|---------------------|-------------------------------------------------------------------------------|
| 8                   | "_logits_"                                                                    |
| 4 4 4               | int32 n_ctx, n_vocab, n_chunk                                                 |
| 4 * n_chunk * n_ctx | int32 ids of the windows, as they are in the text (no BOS put over the first) |
| rows                | n_ctx - 1 - n_ctx / 2 of them for each chunk, in order; a row is:             |
| 4 4                 | float32 scale, float32 lowest log p                                           |
| 2 * nv              | uint16 q, log p = scale * q + lowest; nv is n_vocab rounded up to even        |

What lies more than 16 below the likeliest token's log p is stored as the lowest.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, UnsupportedError
from ..files import File
from .log_softmax import F32, F64, log_sums, over_blocks
from .perplexity_windows import Ids, IdSource, Window, ints

U16 = npt.NDArray[np.uint16]

MAGIC = b"_logits_"
HEADER = 20
RANGE = np.float32(16)  # nats below the likeliest token that are kept apart


def row_words(n_vocab: int) -> int:
    """uint16 words in a row."""
    return 2 * ((n_vocab + 1) // 2) + 4


def encode(z: F32, threads: int | None = None) -> U16:
    """Rows of the file from rows of logits (rows, n_vocab), in float32 throughout as the original computes them."""
    n_vocab = z.shape[1]
    out = np.zeros((len(z), row_words(n_vocab)), "<u2")

    def work(part: slice) -> None:
        rows = z[part]
        top, log_sum = log_sums(rows)
        low = np.maximum(rows.min(axis=1), top - RANGE)
        scale = (top - low) / np.float32(65535)
        head = np.stack([scale, low - top - log_sum.astype(np.float32)], axis=1).astype("<f4")
        out[part, :4] = head.view("<u2")
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        q = np.rint(inverse[:, None] * (rows - low[:, None]))  # to even, as the original rounds
        out[part, 4 : 4 + n_vocab] = np.where(rows > low[:, None], q, 0).astype("<u2")

    over_blocks(work, len(z), n_vocab, threads)
    return out


def decode(rows: U16, n_vocab: int) -> F32:
    """log p (rows, n_vocab) of rows of the file."""
    head = np.ascontiguousarray(rows[:, :4]).view("<f4")
    out: F32 = rows[:, 4 : 4 + n_vocab].astype(np.float32)
    out *= head[:, :1]
    out += head[:, 1:]
    return out


class LogitsWriter:
    """A sink that writes the file while windows of mode llama are scored."""

    def __init__(
        self, out: BinaryIO, ids: IdSource, n_ctx: int, n_vocab: int, n_chunk: int, threads: int | None = None
    ) -> None:
        self.out, self.threads = out, threads
        out.write(MAGIC)
        out.write(np.array([n_ctx, n_vocab, n_chunk], "<i4").tobytes())
        out.write(ints(ids[: n_chunk * n_ctx]).astype("<i4").tobytes())

    def take(self, number: int, window: Window, lo: int, logits: F32, nll: F64) -> None:  # noqa: ARG002
        """Write one block's rows."""
        self.out.write(encode(logits, self.threads).data)


class LogitsFile:
    """A file of log-probabilities, checked when it is opened; rows are read when asked for. A context manager."""

    def __init__(self, path: Path) -> None:
        self.file = File(path)
        try:
            self._read_header()
        except BaseException:
            self.file.close()
            raise

    def _read_header(self) -> None:
        file = self.file
        magic = file.read(0, min(8, file.size)).tobytes()
        if magic != MAGIC:
            raise FormatError(
                "not a file of log-probabilities", path=file.path, offset=0, expected=repr(MAGIC), got=repr(magic),
                hint="--save-all-logits writes one",
            )  # fmt: skip
        self.n_ctx, self.n_vocab, self.n_chunk = (int(v) for v in file.ints(8, 3, at="header"))
        for k, (name, least) in enumerate((("n_ctx", 3), ("n_vocab", 1), ("n_chunk", 1))):
            value = getattr(self, name)
            if value < least:
                raise FormatError(
                    f"{name} is out of range", path=file.path, offset=8 + 4 * k, expected=f"at least {least}", got=value
                )
        self.per_chunk = self.n_ctx - 1 - self.n_ctx // 2
        self.start = HEADER + 4 * self.n_chunk * self.n_ctx
        self.row_bytes = 2 * row_words(self.n_vocab)
        size = self.start + self.n_chunk * self.per_chunk * self.row_bytes
        if size != file.size:
            raise FormatError(
                "the header and the file's size disagree", path=file.path, offset=min(size, file.size),
                at=f"{self.n_chunk:,} chunks of {self.n_ctx:,} tokens, vocabulary {self.n_vocab:,}",
                expected=f"{size:,} bytes", got=f"{file.size:,}",
                hint="the run that wrote it was interrupted, or the file was cut",
            )  # fmt: skip
        self.ids: Ids = file.ints(HEADER, self.n_chunk * self.n_ctx, at="tokens").astype(np.int32)
        bad = np.flatnonzero((self.ids < 0) | (self.ids >= self.n_vocab))
        if len(bad):
            raise FormatError(
                "a token is not in the vocabulary", path=file.path, offset=HEADER + 4 * int(bad[0]), at="tokens",
                expected=f"an id below {self.n_vocab:,}", got=int(self.ids[bad[0]]),
            )  # fmt: skip

    def check(self, n_vocab: int, ids: Ids | None = None) -> None:
        """Refuse a model with another vocabulary, and a text (if one is given) whose ids are not the file's."""
        if n_vocab != self.n_vocab:
            raise UnsupportedError(
                "the log-probabilities are of another vocabulary", path=self.file.path,
                expected=f"{n_vocab:,} tokens, as the model", got=f"{self.n_vocab:,}",
            )  # fmt: skip
        if ids is None:
            return
        n = min(len(ids), len(self.ids))
        differ = np.flatnonzero(ids[:n] != self.ids[:n])
        if len(differ) or n < len(self.ids):
            at = int(differ[0]) if len(differ) else n
            raise UnsupportedError(
                "the log-probabilities are of another text", path=self.file.path, at=f"token {at:,}",
                expected=int(ids[at]) if at < len(ids) else "the end of the text", got=int(self.ids[at]),
                hint="the file holds the tokens it was made from: leave the text out to score those",
            )  # fmt: skip

    def rows(self, chunk: int, lo: int, hi: int) -> U16:
        """Rows lo .. hi of a chunk, as stored."""
        at = self.start + (chunk * self.per_chunk + lo) * self.row_bytes
        raw = self.file.read(at, (hi - lo) * self.row_bytes, f"chunk {chunk}")
        return raw.view("<u2").reshape(hi - lo, -1)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

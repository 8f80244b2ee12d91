"""llm.c's data files: token shards, and multiple-choice evaluation sets (HellaSwag, MMLU).

Source of truth: llm.c dev/data/data_common.py and llmc/dataloader.h. Both start with 256 int32:

| magic    | version | what                 | header                                   | then                        |
|----------|---------|----------------------|------------------------------------------|-----------------------------|
| 20240520 | 1       | shard of GPT-2 ids   | [2] tokens                               | uint16 ids                  |
| 20240801 | 7       | shard of Llama-3 ids | [2] tokens                               | uint32 ids                  |
| 20240522 | 1       | evaluation set       | [2] examples, [3] longest one, in bytes  | uint16 words, example after |
|          |         |                      |                                          | example                     |
| none     |         | shard of April 2024  |                                          | int32 ids, nothing else     |

An example: 65535, its bytes (these two words included), index, label, number of completions, length and ids of the
context, then length and ids of every completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from ..files import File

Ids = npt.NDArray[np.int32]

HEADER = 1024
SHARDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, type of an id
EVAL_MAGIC = 20240522
START = 65535  # first word of an example
MAX_VOCAB = 1 << 20  # no vocabulary is larger; text read as int32 is
STEP = 1 << 20  # ids looked at together


def _magic(head: bytes) -> int:
    return int.from_bytes(head[:4], "little") if len(head) >= 4 else 0


def is_shard(head: bytes) -> bool:
    """Whether a file that starts like this is a token shard with a header."""
    return _magic(head) in SHARDS


def is_eval(head: bytes) -> bool:
    """Whether a file that starts like this is an evaluation set."""
    return _magic(head) == EVAL_MAGIC


@dataclass(frozen=True)
class Tokens:
    """The ids of a shard, read when sliced: `tokens[lo:hi]` is a fresh int32 array. A context manager over its file."""

    file: File
    start: int  # byte of the first id
    count: int
    dtype: str

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice | int) -> Ids:
        """Ids of a slice (step 1), or one id as an array of no axes."""
        if isinstance(index, int):
            return self[range(self.count)[index] : range(self.count)[index] + 1][0]  # type: ignore[no-any-return]
        lo, hi, step = index.indices(self.count)
        width = np.dtype(self.dtype).itemsize
        ids = self.file.ints(self.start + lo * width, max(hi - lo, 0), self.dtype, "tokens")
        return ids.astype(np.int32)[::step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)

    def check(self, vocab_size: int) -> None:
        """Raise a FormatError that names the first id which the vocabulary does not have."""
        for lo in range(0, self.count, STEP):
            ids = self[lo : lo + STEP]
            bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if len(bad):
                at = lo + int(bad[0])
                raise FormatError(
                    f"token {at:,} is not in the vocabulary", path=self.file.path,
                    offset=self.start + at * np.dtype(self.dtype).itemsize, expected=f"an id below {vocab_size:,}",
                    got=int(ids[bad[0]]), hint="the shard was made with another tokenizer than the model's",
                )  # fmt: skip

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> Tokens:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_tokens(path: Path) -> Tokens:
    """The ids of a token shard; a file without a header counts as one only if all its int32 could be ids."""
    file = File(path)
    try:
        return _tokens(file)
    except BaseException:
        file.close()
        raise


def _tokens(file: File) -> Tokens:
    magic = _magic(file.read(0, min(file.size, 4)).tobytes())
    if magic not in SHARDS:
        return _headerless(file, magic)
    header = file.ints(0, 256, at="header")
    version, dtype = SHARDS[magic]
    if header[1] != version:
        raise FormatError(
            "unknown version of a token shard", path=file.path, offset=4, expected=version, got=int(header[1])
        )
    width = np.dtype(dtype).itemsize
    count = (file.size - HEADER) // width
    if header[2] != count or HEADER + count * width != file.size:
        raise FormatError(
            "the header's token count and the file's size disagree", path=file.path, offset=8, at="header, slot 2",
            expected=f"{count:,} tokens of {width} bytes in {file.size:,} bytes", got=f"{int(header[2]):,}",
            hint="the file was cut or is still being written",
        )  # fmt: skip
    return Tokens(file, HEADER, count, dtype)


def _headerless(file: File, magic: int) -> Tokens:
    tokens = Tokens(file, 0, file.size // 4, "<i4")
    expected = "a shard with magic " + " or ".join(str(m) for m in SHARDS) + ", or int32 ids alone"
    if file.size % 4 or not file.size:
        raise FormatError("not a token shard", path=file.path, offset=0, expected=expected, got=f"{file.size:,} bytes")
    if file.size >= HEADER and not tokens[3:256].any():
        raise FormatError(
            "not a token shard, though it starts like a header", path=file.path, offset=0, expected=expected,
            got=f"magic {magic}", hint="the file's first bytes are damaged",
        )  # fmt: skip
    try:
        tokens.check(MAX_VOCAB)
    except FormatError as e:
        raise FormatError(
            "not a token shard", path=file.path, offset=e.offset, expected=expected, got=f"magic {magic}, id {e.got}",
            hint="text is scored with --file",
        ) from None  # fmt: skip
    return tokens


@dataclass(frozen=True)
class Example:
    """One multiple-choice question as ids: the right answer is `completions[label]`."""

    index: int
    label: int
    context: Ids
    completions: tuple[Ids, ...]


def read_eval(path: Path) -> tuple[Example, ...]:
    """All examples of an evaluation set."""
    file = File(path)
    try:
        header = file.ints(0, 256, at="header")
        if header[0] != EVAL_MAGIC or header[1] != 1:
            raise FormatError(
                "not an evaluation set", path=path, offset=0, expected=f"magic {EVAL_MAGIC}, version 1",
                got=f"magic {header[0]}, version {header[1]}",
            )  # fmt: skip
        if file.size % 2:
            raise FormatError("an odd number of bytes", path=path, offset=file.size - 1, expected="16-bit words")
        words = file.ints(HEADER, (file.size - HEADER) // 2, "<u2", "examples")
    finally:
        file.close()
    examples: list[Example] = []
    at, longest = 0, 0
    while at < len(words):
        example, n = _example(path, words, at)
        examples.append(example)
        at, longest = at + n, max(longest, 2 * n)
    for slot, name, found in ((2, "examples", len(examples)), (3, "bytes in the longest example", longest)):
        if header[slot] != found:
            raise FormatError(
                f"the header's number of {name} is wrong", path=path, offset=4 * slot, expected=int(header[slot]),
                got=f"{found:,} in the file", hint="the file was cut or is still being written",
            )  # fmt: skip
    return tuple(examples)


def _example(path: Path, words: npt.NDArray[np.uint16], at: int) -> tuple[Example, int]:
    """The example that starts at word `at`, and its length in words."""

    def wrong(what: str, word: int, expected: Any, got: Any) -> FormatError:
        return FormatError(what, path=path, offset=HEADER + 2 * word, at="example", expected=expected, got=got)

    head = [int(w) for w in words[at : at + 6]]
    if len(head) < 6 or head[0] != START:
        raise wrong("an example does not start here", at, f"{START} and five more words", head)
    _, n_bytes, index, label, n_completions = head[:5]
    end = at + n_bytes // 2
    if n_bytes % 2 or end > len(words):
        raise wrong("the example's size is wrong", at + 1, f"at most {2 * (len(words) - at):,} bytes, even", n_bytes)
    if label >= n_completions:
        raise wrong("the label is none of the completions", at + 3, f"below {n_completions}", label)
    parts, place = [], at + 5
    for _ in range(1 + n_completions):
        n = int(words[place]) if place < end else 0
        if not 1 <= n <= end - place - 1:
            raise wrong("a list of ids is empty or too long", place, f"1 to {max(end - place - 1, 0)} ids", n)
        parts.append(words[place + 1 : place + 1 + n].astype(np.int32))
        place += 1 + n
    if place != end:
        raise wrong("words remain after the last completion", place, f"{2 * (place - at)} bytes", n_bytes)
    return Example(index, label, parts[0], tuple(parts[1:])), end - at

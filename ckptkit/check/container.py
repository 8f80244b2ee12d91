"""The container of a GGUF: read as far as it goes, with the reader's own error as a finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import CkptError, printable
from ..files import File
from ..formats.gguf import SPLIT_NAME
from ..formats.gguf_io import ALIGNMENT, Header
from ..formats.gguf_keys import number
from ..quant.types import row_bytes
from .finding import Finding, finding


def unreadable(e: CkptError) -> Finding:
    """What a reader refused, as a finding."""
    place = f"byte {e.offset:,}" if e.offset is not None else e.at
    detail = ", ".join(f"{k} {v}" for k, v in (("expected", e.expected), ("got", e.got)) if v is not None)
    what = printable(e.what + (f" ({detail})" if detail else ""))
    return finding("unreadable", printable(place), what, "it cannot be loaded", printable(e.hint))


def no_tensors() -> Finding:
    """For a file that names none."""
    return finding("no-tensors", "tensors", "the file has no tensors, only keys",
                   "llama.cpp refuses it as a model; as a vocabulary alone it loads",
                   "convert a file that holds the weights")  # fmt: skip


def shards(path: Path, headers: Sequence[Header]) -> Iterator[Finding]:
    """What llama.cpp asks of a split file beyond its parts: the first one is given, and all tensors are there."""
    if len(headers) < 2:
        return
    named = SPLIT_NAME.fullmatch(path.name)
    if named and int(named[2]) != 1:
        first = f"{named[1]}-00001-of-{named[3]}.gguf"
        yield finding("shard-first", f"file {path.name}", f"this is shard {int(named[2])} of {len(headers)}",
                      "llama.cpp refuses: a model must be loaded with the first shard", f"give it {first}")  # fmt: skip
    counted, there = number(headers[0].keys.get("split.tensors.count")), sum(len(h.infos) for h in headers)
    if counted != there:
        yield finding("shard-count", "key split.tensors.count", f"{counted} tensors were counted, {there} are there",
                      "llama.cpp refuses: corrupted model", "write the shards again", True)  # fmt: skip


def check(header: Header, file: File) -> Iterator[Finding]:
    """llama.cpp wants each tensor where the one before it, padded, ends; gaps and another order are refused."""
    offset = end = 0
    told = False
    astray = [i for i in header.infos if (header.data_start + i.offset) % ALIGNMENT]
    if astray:
        yield finding("alignment", f"tensor {astray[0].name}",
                      f"{len(astray)} tensors lie on no multiple of {ALIGNMENT}",
                      "llama.cpp stops the process: buffer pointer must be aligned",
                      f"store it again with an alignment of {ALIGNMENT}", True)  # fmt: skip
    for info in header.infos:
        if info.offset != offset and not told:
            told = True
            yield finding("offsets", f"tensor {info.name}",
                          f"it lies at {info.offset:,} and not at {offset:,}, where the one before ends",
                          "llama.cpp refuses: invalid offset", "write the tensors one after another", True)  # fmt: skip
        n = info.shape[-1]
        rows = 1
        for d in info.shape[:-1]:
            rows *= d
        size = rows * row_bytes(info.type, n)
        end = max(end, info.offset + size)
        offset = info.offset + -(-size // header.alignment) * header.alignment
    padded = header.data_start + -(-end // header.alignment) * header.alignment
    if header.infos and file.size > padded:
        yield finding("trailing", f"byte {padded:,}", f"{file.size - padded:,} bytes follow the last tensor",
                      "no engine reads them; they may hide something", "leave them out", True)  # fmt: skip

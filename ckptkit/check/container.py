"""The container of a GGUF: read as far as it goes, with the reader's own error as a finding."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CkptError, printable
from ..files import File
from ..formats.gguf_io import Header
from ..quant.types import row_bytes
from .finding import ERROR, WARNING, Finding


def unreadable(e: CkptError) -> Finding:
    """What a reader refused, as a finding."""
    place = f"byte {e.offset:,}" if e.offset is not None else e.at
    detail = ", ".join(f"{k} {v}" for k, v in (("expected", e.expected), ("got", e.got)) if v is not None)
    what = printable(e.what + (f" ({detail})" if detail else ""))
    return Finding(ERROR, "unreadable", printable(place), what, "it cannot be loaded", printable(e.hint))


def check(header: Header, file: File) -> Iterator[Finding]:
    """llama.cpp wants each tensor where the one before it, padded, ends; gaps and another order are refused."""
    offset = end = 0
    told = False
    for info in header.infos:
        if info.offset != offset and not told:
            told = True
            yield Finding(ERROR, "offsets", f"tensor {info.name}",
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
        yield Finding(WARNING, "trailing", f"byte {padded:,}", f"{file.size - padded:,} bytes follow the last tensor",
                      "no engine reads them; they may hide something", "leave them out", True)  # fmt: skip

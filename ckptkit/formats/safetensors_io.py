"""The safetensors container: named tensors and string metadata, whatever they mean.

Source of truth: the README and validation rules of the safetensors package, which judges both directions in the tests.

| bytes | what                                                                                        |
|-------|---------------------------------------------------------------------------------------------|
| 8     | u64 N, length of the header, at most 100,000,000 (the package's own limit)                  |
| N     | JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [lo, hi]}, ...} |
| rest  | the tensors, C order, little-endian, without gaps or overlaps; offsets count from here      |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from ..errors import FormatError, UnsupportedError, brief, printable
from ..files import File, replacing
from ..quant.types import PLAIN, QType
from ..stream import write_tensors
from ..tensor import Tensor, from_file

MAX_HEADER = 100_000_000
MAX_AXES = 64
METADATA = "__metadata__"

# In the package's order: a file's tensors are sorted by dtype, last of this table first, then by name. Types that ggml
# lacks are carried as bytes under an integer type of their width, with the real dtype in the origin.
DTYPES: dict[str, QType] = {
    "BOOL": QType.I8,
    "U8": QType.I8,
    "I8": QType.I8,
    "F8_E5M2": QType.I8,
    "F8_E4M3": QType.I8,
    "I16": QType.I16,
    "U16": QType.I16,
    "F16": QType.F16,
    "BF16": QType.BF16,
    "I32": QType.I32,
    "U32": QType.I32,
    "F32": QType.F32,
    "F64": QType.F64,
    "I64": QType.I64,
    "U64": QType.I64,
}
RANK = {dtype: i for i, dtype in enumerate(DTYPES)}
WIDTHS = {
    QType.I8: 1, QType.I16: 2, QType.F16: 2, QType.BF16: 2, QType.I32: 4, QType.F32: 4, QType.F64: 8, QType.I64: 8,
}  # fmt: skip


def detect(head: bytes, size: int) -> bool:
    """Whether the first bytes are a header length that fits the file and the start of a JSON object."""
    n = int.from_bytes(head[:8], "little")
    return len(head) >= 10 and 2 <= n <= min(size - 8, MAX_HEADER) and head[8:9] == b"{" and head[9:10] in b'"} '


def read_header(file: File) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors in file order; no data is read.

    Raises FormatError unless the tensors cover the data exactly and every size agrees with its shape and dtype.
    """
    n = int(file.ints(0, 1, "<u8", "length of the header")[0])
    if n > MAX_HEADER:
        raise FormatError(
            "the header is too long", path=file.path, offset=0, expected=f"at most {MAX_HEADER:,} bytes",
            got=f"{n:,}", hint="not a safetensors file, or its first 8 bytes are damaged",
        )  # fmt: skip
    entries = _parse(file, file.read(8, n, "header").tobytes())
    metadata = _metadata(file, entries.pop(METADATA, {}))
    found = [(name, *_entry(file, name, entry)) for name, entry in entries.items()]
    found.sort(key=lambda item: item[3:])
    start, at = 8 + n, 0
    tensors = {}
    for name, dtype, shape, lo, hi in found:
        if lo != at:
            what = "overlaps the one before it" if lo < at else "leaves a gap before it"
            raise FormatError(
                f"tensor {_short(name)} {what}", path=file.path, offset=start + lo, at=f"tensor {name}",
                expected=f"data offset {at:,}", got=f"{lo:,}",
            )  # fmt: skip
        t = from_file(file, start + lo, shape, DTYPES[dtype], f"tensor {name}")
        tensors[name] = replace(t, origin=t.origin | {"type": dtype})
        at = hi
    if start + at != file.size:
        raise FormatError(
            "bytes remain after the last tensor", path=file.path, offset=start + at,
            expected=f"{start + at:,} bytes in all", got=f"{file.size:,}",
        )  # fmt: skip
    return metadata, tensors


def dtype_of(t: Tensor) -> str:
    """The dtype a tensor is stored as: what it was read as where ggml has no such type, else its own type."""
    read_as = t.origin.get("type", "") if t.origin.get("op") == "bytes" else ""
    if DTYPES.get(read_as) == t.type:
        return str(read_as)
    if t.type.name not in DTYPES:
        raise UnsupportedError(
            f"safetensors cannot hold {t.type.name}", expected=", ".join(q.name for q in PLAIN), got=t.type.name,
            hint="convert with --type f32, f16 or bf16",
        )  # fmt: skip
    return t.type.name


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one file, in the package's order of tensors and the given order of metadata."""
    dtypes = {name: dtype_of(t) for name, t in tensors.items()}
    order = sorted(tensors, key=lambda name: (-RANK[dtypes[name]], name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        t = tensors[name]
        header[name] = {"dtype": dtypes[name], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UnsupportedError(
            "the header would be too long", path=path, expected=f"at most {MAX_HEADER:,} bytes", got=f"{len(text):,}"
        )
    with replacing(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        write_tensors(f, (tensors[name] for name in order))


def _short(name: str) -> str:
    return printable(name if len(name) < 80 else name[:80] + "...")


class _Broken(ValueError):
    """Raised inside the JSON parser for what JSON allows and a header does not."""


def _parse(file: File, raw: bytes) -> dict[str, Any]:
    try:
        if raw[:1] != b"{":
            raise _Broken("it does not start with {")
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise _header_error(file, f"it is not UTF-8 ({e.reason})", 8 + e.start) from e
    except json.JSONDecodeError as e:
        raise _header_error(file, e.msg, 8 + len(e.doc[: e.pos].encode())) from e
    except RecursionError as e:
        raise _header_error(file, "it is nested too deeply", 8) from e
    except ValueError as e:  # ours, and integers of thousands of digits
        raise _header_error(file, str(e), 8) from e
    assert isinstance(value, dict)
    return value


def _header_error(file: File, why: str, offset: int) -> FormatError:
    return FormatError(
        "the header is not valid", path=file.path, offset=offset, at="header", got=why,
        expected="a JSON object of tensors", hint="the file is damaged, or not safetensors",
    )  # fmt: skip


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _Broken(f"the key {twice!r} occurs twice")
    return out


def _no_constant(text: str) -> NoReturn:
    raise _Broken(f"{text} is not JSON")


def _metadata(file: File, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise FormatError(
            "the metadata is not a table of strings", path=file.path, offset=8, at=METADATA,
            expected="an object with string values", got=brief(value),
        )  # fmt: skip
    return value


def _entry(file: File, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, lo, hi) of a tensor's entry, checked in itself and against the file's size."""

    def wrong(what: str, expected: str, got: Any) -> FormatError:
        return FormatError(
            f"tensor {_short(name)}: {what}", path=file.path, offset=8, at="header", expected=expected,
            got=brief(got),
        )  # fmt: skip

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise wrong("incomplete entry", "dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong("unknown dtype", ", ".join(DTYPES), dtype)
    if not _naturals(shape) or len(shape) > MAX_AXES:
        raise wrong("bad shape", f"a list of at most {MAX_AXES} sizes, none negative", shape)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("bad data_offsets", "[lo, hi] with lo <= hi", offsets)
    nbytes = prod(shape) * WIDTHS[DTYPES[dtype]]
    if nbytes != offsets[1] - offsets[0]:
        raise wrong("size and offsets disagree", f"{nbytes:,} bytes for {dtype} {shape}", offsets)
    return dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)

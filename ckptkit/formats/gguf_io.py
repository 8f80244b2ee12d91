"""The GGUF container: keys with typed values, tensor infos, data (docs/gguf.md of ggml; versions 2 and 3).

"GGUF" | u32 version | u64 n_tensors | u64 n_keys | keys | tensor infos | padding to the alignment | data
key:    string name, u32 value type, value; an array is u32 element type, u64 count, elements
string: u64 length in bytes, UTF-8
info:   string name, u32 n_dims, u64 dims (fastest first: ours reversed), u32 ggml type, u64 offset in the data

Every length is checked against what is left of the file before memory is taken. Arrays of strings are walked once and
kept as one buffer and the places in it: a vocabulary of 150,000 tokens opens in a few hundredths of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from struct import Struct, pack
from struct import error as struct_error
from typing import Any

import numpy as np

from ..errors import FormatError, UnsupportedError
from ..files import File
from ..quant.types import BLOCKS, QType
from ..tensor import Tensor, from_file
from ..tokenizer.strings import Strings

MAGIC = b"GGUF"
ALIGNMENT = 32
HEADER_LIMIT = 1 << 30  # bytes of keys and tensor infos; the largest known headers take 20 MB


class Kind(IntEnum):
    """Value types of keys."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


DTYPES = {
    Kind.U8: "<u1",
    Kind.I8: "<i1",
    Kind.U16: "<u2",
    Kind.I16: "<i2",
    Kind.U32: "<u4",
    Kind.I32: "<i4",
    Kind.F32: "<f4",
    Kind.BOOL: "|b1",
    Kind.U64: "<u8",
    Kind.I64: "<i8",
    Kind.F64: "<f8",
}


@dataclass(frozen=True)
class Value:
    """A key's value with its stored type. Arrays: `element` is set and `value` is a numpy array or Strings."""

    kind: Kind
    value: Any
    element: Kind | None = None


@dataclass(frozen=True)
class Info:
    """A tensor's entry: numpy shape, type, offset relative to the data."""

    name: str
    shape: tuple[int, ...]
    type: QType
    offset: int


@dataclass(frozen=True)
class Header:
    """All that stands before the data of one file."""

    version: int
    keys: dict[str, Value]
    infos: list[Info]
    alignment: int
    data_start: int


class Cursor:
    """Reads forward through a header, fetching more of the file as it goes."""

    def __init__(self, file: File) -> None:
        self.file, self.at = file, 0
        self.buffer = bytearray()
        self.fetch(min(file.size, 1 << 16))

    def fetch(self, nbytes: int) -> None:
        """Have at least `nbytes` from the start in the buffer, or raise."""
        if nbytes > self.file.size:
            raise FormatError(
                "the header runs past the end of the file",
                path=self.file.path,
                offset=self.at,
                expected=f"{nbytes - self.at:,} more bytes",
                got=f"{self.file.size - self.at:,} bytes",
                hint="the file was cut, or a length in it is wrong",
            )
        if nbytes > HEADER_LIMIT:
            raise UnsupportedError(
                "the header is too large", path=self.file.path, offset=self.at, got=f"{nbytes:,} bytes"
            )
        have = len(self.buffer)
        if nbytes > have:
            want = min(max(nbytes, 4 * have), self.file.size, HEADER_LIMIT)
            self.buffer += self.file.read(have, want - have).data

    def take(self, nbytes: int) -> int:
        """Step over `nbytes`; gives the offset where they begin."""
        start = self.at
        self.fetch(start + nbytes)
        self.at = start + nbytes
        return start

    def number(self, kind: Kind) -> Any:
        """One scalar."""
        start = self.take(np.dtype(DTYPES[kind]).itemsize)
        if kind == Kind.BOOL:
            return self.buffer[start] != 0  # as llama.cpp reads it
        return np.frombuffer(self.buffer, DTYPES[kind], 1, start)[0].item()

    def count(self, what: str, at_least: int) -> int:
        """A u64 count of things that take at least `at_least` bytes each; more than fit the file is an error."""
        start = self.at
        n = int(self.number(Kind.U64))
        left = self.file.size - self.at
        if n * at_least > left:
            raise FormatError(
                f"the {what} cannot be",
                path=self.file.path,
                offset=start,
                expected=f"at most {left // at_least:,} in the rest of the file",
                got=f"{n:,}",
                hint="the file was cut or is not little-endian",
            )
        return n

    def string(self, what: str) -> str:
        """A string; bytes that are not UTF-8 survive as surrogates."""
        n = self.count(f"length of {what}", 1)
        start = self.take(n)
        return self.buffer[start : start + n].decode("utf-8", "surrogateescape")

    def strings(self, count: int, what: str) -> Strings:
        """An array of strings, walked without making an object of any."""
        starts = np.empty(count, np.int64)
        lengths = np.empty(count, np.int64)
        length_at = Struct("<Q").unpack_from
        at, k = self.at, 0
        found: list[int] = []
        while k < count:
            try:
                buffer = self.buffer
                while k < count:
                    found.append(at)
                    at += 8 + length_at(buffer, at)[0]
                    k += 1
            except (struct_error, OverflowError):
                found.pop()
                self._inside(at, found, what)
                self.fetch(at + 8)
        self._inside(at, found, what)
        self.at = at
        self.fetch(at)
        starts[:] = found
        starts += 8
        lengths[:-1] = starts[1:] - 8 - starts[:-1]
        if count:
            lengths[-1] = at - starts[-1]
        base = int(starts[0]) if count else at
        return Strings(np.frombuffer(bytes(self.buffer[base:at]), np.uint8), starts - base, lengths)

    def _inside(self, end: int, found: list[int], what: str) -> None:
        """Check that the last of the strings found so far ends inside the file; `end` is where it does."""
        if end > self.file.size:
            raise FormatError(
                f"string {len(found) - 1:,} of {what} runs past the end of the file",
                path=self.file.path,
                offset=found[-1],
                expected=f"at most {self.file.size - found[-1] - 8:,} bytes",
                got=f"{end - found[-1] - 8:,}",
                hint="the file was cut, or a length in it is wrong",
            )

    def kind(self, what: str) -> Kind:
        """A value type."""
        start = self.at
        number = self.number(Kind.U32)
        if number not in Kind._value2member_map_:
            raise FormatError(
                f"{what} has an unknown type", path=self.file.path, offset=start, expected="0 to 12", got=number
            )
        return Kind(number)

    def value(self, key: str) -> Value:
        """A typed value."""
        kind = self.kind(f"key {key}")
        if kind == Kind.STRING:
            return Value(kind, self.string(f"key {key}"))
        if kind != Kind.ARRAY:
            return Value(kind, self.number(kind))
        element = self.kind(f"the array of key {key}")
        if element == Kind.ARRAY:
            raise FormatError(
                "arrays of arrays are not allowed", path=self.file.path, offset=self.at - 4, at=f"key {key}"
            )
        width = 8 if element == Kind.STRING else np.dtype(DTYPES[element]).itemsize
        count = self.count(f"count of array {key}", width)
        if element == Kind.STRING:
            return Value(kind, self.strings(count, f"key {key}"), element)
        start = self.take(count * width)
        array = np.frombuffer(self.buffer, DTYPES[element], count, start).copy()
        if element == Kind.BOOL:
            array = array.view(np.uint8) != 0
        return Value(kind, array, element)


def read_header(file: File) -> Header:
    """Keys and tensor infos of one file, all checked but for the bounds of the data."""
    if file.size < 4 or file.read(0, 4).tobytes() != MAGIC:
        raise FormatError(
            "not a GGUF file",
            path=file.path,
            offset=0,
            expected="GGUF",
            got=repr(file.read(0, min(4, file.size)).tobytes()),
        )
    c = Cursor(file)
    c.take(4)
    version = c.number(Kind.U32)
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        raise UnsupportedError(
            "a big-endian GGUF" if swapped in (1, 2, 3) else "this version of GGUF is not known",
            path=file.path,
            offset=4,
            expected="little-endian version 2 or 3",
            got=f"big-endian version {swapped}" if swapped in (1, 2, 3) else version,
            hint="gguf-convert-endian FILE little rewrites it"
            if swapped in (1, 2, 3)
            else "re-export the file with a current tool",
        )
    n_tensors = c.count("number of tensors", 8 + 4 + 8 + 4 + 8)
    n_keys = c.count("number of keys", 8 + 4 + 1)
    keys: dict[str, Value] = {}
    for _ in range(n_keys):
        start = c.at
        name = c.string("a key's name")
        if not name or name in keys:
            what = "is empty" if not name else "stands twice"
            raise FormatError(f"a key's name {what}", path=file.path, offset=start, got=name[:80])
        keys[name] = c.value(name)
    alignment = _alignment(keys.get("general.alignment"), file)
    infos: list[Info] = []
    seen: set[str] = set()
    for _ in range(n_tensors):
        info = _info(c)
        if info.name in seen:
            raise FormatError("a tensor's name stands twice", path=file.path, offset=c.at, got=info.name)
        seen.add(info.name)
        infos.append(info)
    return Header(version, keys, infos, alignment, -(-c.at // alignment) * alignment)


def _alignment(value: Value | None, file: File) -> int:
    if value is None:
        return ALIGNMENT
    n = value.value
    if value.kind != Kind.U32 or n < 8 or n & (n - 1):
        raise FormatError(
            "general.alignment cannot be",
            path=file.path,
            at="key general.alignment",
            expected="u32, a power of two, at least 8",
            got=f"{value.kind.name.lower()} {n}",
        )
    return int(n)


def _info(c: Cursor) -> Info:
    path, start = c.file.path, c.at
    name = c.string("a tensor's name")
    n_dims = c.number(Kind.U32)
    if n_dims > 4:
        raise FormatError(
            f"tensor {name[:80]} has too many axes", path=path, offset=c.at - 4, expected="at most 4", got=n_dims
        )
    dims = [int(c.number(Kind.U64)) for _ in range(n_dims)]
    number = c.number(Kind.U32)
    if number not in QType._value2member_map_:
        raise UnsupportedError(
            f"tensor {name[:80]} has an unknown type", path=path, offset=c.at - 4, expected="a ggml type", got=number
        )
    kind = QType(number)
    shape = tuple(reversed(dims)) or (1,)
    if not all(0 < d < 2**63 for d in shape) or prod(shape) >= 2**63:
        raise FormatError(f"tensor {name[:80]} has an impossible shape", path=path, offset=start, got=shape)
    if shape[-1] % BLOCKS[kind].elements:
        raise FormatError(
            f"tensor {name[:80]} has rows that are no whole number of blocks",
            path=path,
            offset=start,
            expected=f"a multiple of {BLOCKS[kind].elements} for {kind.name}",
            got=shape[-1],
        )
    return Info(name, shape, kind, int(c.number(Kind.U64)))


def tensors(header: Header, file: File) -> dict[str, Tensor]:
    """The tensors of one file; each must lie inside it, on the alignment, and on bytes of its own."""
    found: dict[str, Tensor] = {}
    end, last = header.data_start, "the header"
    for info in sorted(header.infos, key=lambda i: i.offset):
        offset = header.data_start + info.offset
        if info.offset % header.alignment or offset < end:
            what = f"overlaps {last}" if offset < end else f"is not on a multiple of {header.alignment}"
            raise FormatError(
                f"tensor {info.name} {what}",
                path=file.path,
                offset=offset,
                expected=f"at least {end:,}",
                got=f"{offset:,}",
            )
        found[info.name] = from_file(file, offset, info.shape, info.type, at=f"tensor {info.name}")
        end, last = offset + found[info.name].nbytes, f"tensor {info.name}"
    return {info.name: found[info.name] for info in header.infos}


def encode_string(text: str | bytes) -> bytes:
    """u64 length and the bytes."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return pack("<Q", len(raw)) + raw


def encode_strings(strings: Sequence[bytes | str]) -> bytes:
    """Strings one after another; those that were read from a GGUF are written as they lie in the buffer."""
    if isinstance(strings, Strings) and len(strings) > 1:
        starts, lengths = strings.starts, strings.lengths
        if np.array_equal(starts[1:], starts[:-1] + lengths[:-1] + 8):
            numbers = np.ndarray((len(strings.buffer) - 7,), "<u8", strings.buffer, strides=(1,))  # one at every byte
            if np.array_equal(numbers[starts[1:] - 8], lengths[1:].astype(np.uint64)):
                return pack("<Q", lengths[0]) + strings.buffer[starts[0] : starts[-1] + lengths[-1]].tobytes()
    return b"".join(map(encode_string, strings))


def encode_value(value: Value) -> bytes:
    """Type and value as stored."""
    if value.kind == Kind.STRING:
        return pack("<I", value.kind) + encode_string(value.value)
    if value.kind != Kind.ARRAY:
        return pack("<I", value.kind) + np.array(value.value, DTYPES[value.kind]).tobytes()
    assert value.element is not None
    head = pack("<IIQ", value.kind, value.element, len(value.value))
    if value.element == Kind.STRING:
        return head + encode_strings(value.value)
    return head + np.asarray(value.value, DTYPES[value.element]).tobytes()


def header_bytes(keys: Mapping[str, Value], stored: Mapping[str, Tensor]) -> bytes:
    """Everything before the data, padded; tensors lie in the order given, without gaps, as llama.cpp demands."""
    parts = [MAGIC, pack("<IQQ", 3, len(stored), len(keys))]
    parts += [encode_string(name) + encode_value(value) for name, value in keys.items()]
    offset = 0
    for name, t in stored.items():
        if len(name.encode()) > 63:
            raise UnsupportedError(
                f"tensor name {name[:80]} is too long for GGUF", expected="at most 63 bytes", got=len(name.encode())
            )
        parts.append(encode_string(name) + pack("<I", len(t.shape)) + pack(f"<{len(t.shape)}Q", *reversed(t.shape)))
        parts.append(pack("<IQ", t.type, offset))
        offset += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    head = b"".join(parts)
    return head + bytes(-len(head) % ALIGNMENT)


def shard_path(path: Path, index: int, count: int) -> Path:
    """NAME-00001-of-00003.gguf, as llama.cpp looks for them; one file keeps its name."""
    return path if count == 1 else path.with_name(f"{path.stem}-{index + 1:05d}-of-{count:05d}{path.suffix}")

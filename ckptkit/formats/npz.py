"""numpy's .npz: a zip of .npy files, read without numpy.load, so that nothing is unpickled and nothing is read early.

Source of truth: numpy/lib/format.py. A member is "\\x93NUMPY" | u8 major | u8 minor | length of the header (u16, from
version 2 on u32) | header, a Python literal {"descr", "fortran_order", "shape"} | the array. Members that were stored
are read where they lie in the file; compressed ones are held in memory, up to a limit.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from math import prod

import numpy as np

from ..errors import FormatError, UnsupportedError, printable
from ..files import File
from ..quant.types import QType
from ..tensor import Tensor, from_array, from_file, transpose

DTYPES = {
    "<f2": QType.F16, "<f4": QType.F32, "<f8": QType.F64, "<i4": QType.I32, "<i8": QType.I64, "<i2": QType.I16,
    "|i1": QType.I8,
}  # fmt: skip
LIMIT = 256 << 20  # bytes of all compressed members, unpacked
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # numpy's; the others take memory as the file asks
MAX_HEADER = 10_000  # bytes; numpy's own limit
BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError, ValueError, TypeError, OverflowError)
MAGIC = b"\x93NUMPY"
HEADER = re.compile(
    r"\{'descr': '(?P<descr>[^']{1,9})', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>(\d{1,18}(, ?|(?=\))))*)\),? ?\}[ \n]*"
)  # as numpy writes it; evaluating a literal instead would be at the mercy of the parser
LOCAL = 30  # bytes of a zip's local header before name and extra field


def detect(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zip whose first member is a .npy."""
    n = int.from_bytes(head[26:28], "little")
    return head[:4] == b"PK\x03\x04" and head[LOCAL : LOCAL + n].endswith(b".npy")


def read(file: File) -> dict[str, Tensor]:
    """The arrays of an .npz by name, in its order."""
    tensors: dict[str, Tensor] = {}
    unpacked = 0
    try:
        with file.path.open("rb") as f, zipfile.ZipFile(f) as z:
            for info in z.infolist():
                name = info.filename.removesuffix(".npy")
                if info.compress_type != zipfile.ZIP_STORED:
                    unpacked += info.file_size
                if info.compress_type not in METHODS:
                    raise _wrong(file, name, info.header_offset, "stored or deflated", f"method {info.compress_type}")
                if name in tensors or unpacked > LIMIT or info.flag_bits & 1:
                    raise _wrong(file, name, info.header_offset, "a name once, no encryption, little when unpacked")
                if info.compress_type == zipfile.ZIP_STORED:
                    tensors[name] = _stored(file, info, name)
                else:
                    tensors[name] = _unpacked(file, info, z.read(info), name)
    except BROKEN as e:
        raise FormatError(
            "not a sound .npz", path=file.path, offset=0, expected="a zip of .npy files", got=printable(e),
            hint="the file was cut or damaged; save it again with numpy.savez",
        ) from e  # fmt: skip
    return tensors


def _wrong(file: File, name: str, offset: int, expected: str, got: str = "") -> FormatError:
    return FormatError(
        f"array {printable(name)[:60]} cannot be read", path=file.path, offset=offset, at="member", expected=expected,
        got=got or None,
    )  # fmt: skip


def _stored(file: File, info: zipfile.ZipInfo, name: str) -> Tensor:
    local = file.read(info.header_offset, LOCAL, "zip header")
    sizes = local[26:30].view("<u2")
    start = info.header_offset + LOCAL + int(sizes[0]) + int(sizes[1])
    if local[:4].tobytes() != b"PK\x03\x04":
        raise _wrong(file, name, info.header_offset, "a zip header")
    file.require(start, info.file_size, f"array {name}")
    head = file.read(start, min(info.file_size, MAX_HEADER + 12), f"header of {name}").tobytes()
    length, shape, type, fortran = _header(file, name, start, head)
    _check_size(file, name, start, info.file_size - length, shape, type)
    t = from_file(file, start + length, shape[::-1] if fortran else shape, type, f"array {printable(name)[:60]}")
    return transpose(t) if fortran and len(shape) == 2 else t


def _unpacked(file: File, info: zipfile.ZipInfo, raw: bytes, name: str) -> Tensor:
    length, shape, type, fortran = _header(file, name, info.header_offset, raw[: MAX_HEADER + 12])
    _check_size(file, name, info.header_offset, len(raw) - length, shape, type)
    data = np.frombuffer(raw, np.uint8, offset=length)
    t = from_array(data, type, shape[::-1] if fortran else shape)
    t.origin.update(op="npz", file=file.path.name, member=info.filename, type=type.name, shape=list(t.shape))
    return transpose(t) if fortran and len(shape) == 2 else t


def _header(file: File, name: str, offset: int, head: bytes) -> tuple[int, tuple[int, ...], QType, bool]:
    """(its length, shape, type, whether columns come first) from the start of a .npy."""
    version, wide = head[6:8], head[6:7] != b"\x01"
    if head[:6] != MAGIC or version not in (b"\x01\0", b"\x02\0"):
        raise _wrong(file, name, offset, "version 1 or 2 of .npy", repr(head[:8]))
    start = 12 if wide else 10
    end = start + int.from_bytes(head[8:start], "little")
    found = HEADER.fullmatch(head[start:end].decode("latin-1"))
    if end > len(head) or found is None:
        raise _wrong(file, name, offset, "a header of descr, fortran_order and shape", repr(head[start:][:100]))
    shape = tuple(int(n) for n in found["shape"].split(",") if n.strip())
    fortran = found["fortran"] == "True"
    if found["descr"] not in DTYPES:
        raise UnsupportedError(
            f"array {printable(name)[:60]} has a dtype that holds no weights", path=file.path, offset=offset,
            expected=", ".join(DTYPES), got=found["descr"],
        )  # fmt: skip
    if len(shape) > 2 and fortran:
        raise UnsupportedError("arrays of more than two axes must be in C order", path=file.path, got=str(shape))
    return end, shape, DTYPES[found["descr"]], fortran and len(shape) > 1


def _check_size(file: File, name: str, offset: int, nbytes: int, shape: tuple[int, ...], type: QType) -> None:
    width = np.dtype(next(k for k, v in DTYPES.items() if v == type)).itemsize
    if prod(shape) * width != nbytes:
        raise _wrong(file, name, offset, f"{prod(shape) * width:,} bytes for {shape}", f"{nbytes:,} bytes")

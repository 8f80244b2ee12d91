"""Types of stored values changed row by row: float32 to any type that can be written, any type to float32.

Halves, 32-element blocks and K-quants go through our own kernels, bit-identical with the reference quantisers of ggml;
the other plain types through numpy, and the rarer block types are decoded by the `gguf` package. A tensor is changed
lazily, chunk by chunk, on every core; values that the new type cannot hold are found on the way, and errors measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from math import sqrt
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LossyError, UnsupportedError
from ..parallel import spread
from ..tensor import CHUNK, PIECE, Tensor
from .types import BLOCKS, PLAIN, QType, row_bytes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

NUMPY: dict[QType, type[np.generic]] = {
    QType.F32: np.float32,
    QType.F16: np.float16,
    QType.F64: np.float64,
    QType.I8: np.int8,
    QType.I16: np.int16,
    QType.I32: np.int32,
    QType.I64: np.int64,
}
LEGACY = (QType.Q8_0, QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1)
K_QUANTS = (QType.Q2_K, QType.Q3_K, QType.Q4_K, QType.Q5_K, QType.Q6_K)
LLVM_TYPES = (QType.F16, QType.BF16, *LEGACY)
KERNEL_TYPES = (*LLVM_TYPES, *K_QUANTS)
WRITABLE = (QType.F32, QType.F64, *KERNEL_TYPES)

# From this magnitude on values are looked at one by one. In a block type the scales are halves, which may overflow too.
TOO_LARGE = {QType.F16: np.float32(65520), QType.BF16: np.float32(3.3961776e38)} | dict.fromkeys(
    (QType.F32, QType.F64), np.float32(np.inf)
)
HALF_MAX = np.float32(65504)


@dataclass
class ErrorStats:
    """How far the stored values of a tensor are from their source, gathered while its rows are read, each once."""

    max_error: float = 0.0
    sum_squares: float = 0.0
    count: int = 0
    underflows: int = 0  # values other than 0 that were stored as 0
    _lock: Any = field(default_factory=Lock, repr=False, compare=False)

    @property
    def rms(self) -> float:
        """Root of the mean square error; 0 before anything was read."""
        return sqrt(self.sum_squares / self.count) if self.count else 0.0

    def add(self, record: Bytes, count: int) -> None:
        """Take over what a kernel recorded of `count` values (lanes.record)."""
        squares, worst, zeroed = (
            record[:128].view(np.float64),
            record[128:192].view(np.float32),
            record[192:].view(np.int32),
        )
        with self._lock:
            self.max_error = float(np.maximum(self.max_error, worst.max()))
            self.sum_squares += float(squares.sum())
            self.underflows += int(zeroed.sum())
            self.count += count


def encode_rows(rows: Floats, type: QType) -> Bytes:
    """Encode float32 (n, elements) as uint8 (n, row bytes); `elements` must be whole blocks of `type`."""
    _require_writable(type, rows.shape[1])
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((len(rows), row_bytes(type, rows.shape[1])), np.uint8)
    step = max(PIECE // max(rows.shape[1], 1), 1)
    spread(lambda lo: _encode_into(rows[lo : lo + step], type, out[lo : lo + step]), range(0, len(rows), step))
    return out


def decode_rows(rows: Bytes, type: QType) -> Floats:
    """Decode uint8 (n, row bytes) to float32 (n, elements), in a buffer of its own unless the type is F32."""
    if type == QType.F32:
        return rows.view(np.float32)
    if type in KERNEL_TYPES:
        return _decode_by_kernel(rows, type)
    if type in NUMPY:
        with np.errstate(over="ignore"):  # a float64 that is too large becomes an infinity, which is looked for
            return rows.view(NUMPY[type]).astype(np.float32)
    from gguf import GGMLQuantizationType, quants

    try:
        with np.errstate(invalid="ignore", over="ignore"):
            decoded: Floats = quants.dequantize(rows, GGMLQuantizationType(type))
    except (NotImplementedError, ValueError) as e:
        raise UnsupportedError(f"{type.name} cannot be decoded", hint="re-export the model in another type") from e
    return decoded


def decode_wide(rows: Bytes, type: QType) -> npt.NDArray[Any]:
    """The same, but float64 stays as wide as it is."""
    return rows.view(np.float64) if type == QType.F64 else decode_rows(rows, type)


def _decode_by_kernel(rows: Bytes, type: QType) -> Floats:
    from .decode_kernels import kernel
    from .encode_kernels import unit

    rows = np.ascontiguousarray(rows)
    block, elements = BLOCKS[type], unit(type)
    out = np.empty((len(rows), rows.shape[1] // block.nbytes * block.elements), np.float32)
    whole, rest = divmod(out.size, elements)
    kernel(type)(rows.ctypes.data, out.ctypes.data, whole)
    if rest:  # of a plain type
        last, decoded = np.zeros(elements * block.nbytes, np.uint8), np.empty(elements, np.float32)
        last[: rest * block.nbytes] = rows.reshape(-1)[-rest * block.nbytes :]
        kernel(type)(last.ctypes.data, decoded.ctypes.data, 1)
        out.reshape(-1)[-rest:] = decoded[:rest]
    return out


def encode(
    t: Tensor, type: QType, name: str = "", allow_nonfinite: bool = False, stats: ErrorStats | None = None
) -> Tensor:
    """The same tensor stored as `type`, encoded as its rows are read; of that type already, the tensor itself.

    Raises UnsupportedError at once when the rows are not whole blocks. Reading the rows raises LossyError at a NaN, an
    infinity or a value that `type` cannot hold, with its index, unless `allow_nonfinite`; `stats` gathers the errors.
    """
    if t.type == type:
        return t
    shape, origin = t.shape, {"op": "encode", "type": type.name, "of": t.origin}
    elements = shape[-1] if BLOCKS[type].elements > 1 or len(shape) > 1 else 1
    _require_writable(type, elements, name)
    prepare(type)
    if t.row_elements != elements:
        t = _regrouped(t, elements)
    width = row_bytes(type, elements)
    step = max(PIECE // max(elements, 1), 1)
    batch = max(CHUNK // 4 // max(elements, 1), 1)

    def piece(source: Bytes, first: int, out: Bytes) -> None:
        values = decode_rows(source, t.type)
        peak, record = _encode_into(values, type, out)
        if not allow_nonfinite and not peak < TOO_LARGE.get(type, HALF_MAX):
            k = _unfit(values, out, type)
            if k >= 0:
                value = source.view(np.float64).flat[k] if t.type == QType.F64 else values.flat[k]
                raise _refusal(value, type, name, np.unravel_index(first * elements + k, shape))
        if stats is not None:
            stats.add(record, values.size)

    def pieces(source: Bytes, first: int, out: Bytes) -> None:
        spread(lambda a: piece(source[a : a + step], first + a, out[a : a + step]), range(0, len(source), step))

    def rows(lo: int, hi: int) -> Bytes:
        out = np.empty((hi - lo, width), np.uint8)
        if t.view is not None:  # the bytes lie in a file: every thread reads its own
            spread(lambda a: piece(t.rows(a, min(a + step, hi)), a, out[a - lo : a - lo + step]), range(lo, hi, step))
        else:
            for a in range(lo, hi, batch):
                pieces(t.rows(a, min(a + batch, hi)), a, out[a - lo : a - lo + batch])
        return out

    return Tensor(shape, type, rows, None, origin, t.piece)


def decode(t: Tensor, name: str = "") -> Tensor:
    """The tensor as float32, infinities and NaN as they are."""
    return encode(t, QType.F32, name, allow_nonfinite=True)


def finite(t: Tensor, name: str) -> Tensor:
    """The same tensor; one of a plain type is refused at the first NaN or infinity that is read."""
    if t.type not in PLAIN:
        return t

    def rows(lo: int, hi: int) -> Bytes:
        data = t.rows(lo, hi)
        bits = data.reshape(-1).view(f"<u{BLOCKS[t.type].nbytes}")
        values = bits if t.type == QType.BF16 else bits.view(NUMPY[t.type])
        for start in range(0, len(values), PIECE):
            piece = values[start : start + PIECE]
            bad = (piece & 0x7F80) == 0x7F80 if t.type == QType.BF16 else ~np.isfinite(piece)
            if bad.any():
                k = start + int(bad.argmax())
                value = decode_wide(bits[k : k + 1].view(np.uint8)[None], t.type)[0, 0]
                raise _refusal(value, t.type, name, np.unravel_index(lo * t.row_elements + k, t.shape))
        return data

    return replace(t, rows=rows)


def _encode_into(values: Floats, type: QType, out: Bytes) -> tuple[np.float32, Bytes]:
    """Encode into `out`; the largest magnitude, NaN or infinity if there is one, and the record of errors."""
    record = np.zeros(256, np.uint8)
    if values.size == 0:
        return np.float32(0), record
    if type in KERNEL_TYPES:
        return _kernel(type)(np.ascontiguousarray(values), out, record), record
    np.copyto(out.view(NUMPY[type]), values)
    with np.errstate(invalid="ignore"):
        return np.float32(max(values.max(), -values.min())), record  # NaN stays NaN through both


def prepare(type: QType) -> None:
    """Have the encoder of a type compiled, while other things are done; those of K-quants are kept on disk."""
    if type in LLVM_TYPES:
        from .encode_kernels import begin

        begin(type)


@cache
def _kernel(type: QType) -> Callable[[Floats, Bytes, Bytes], np.float32]:
    """The compiled encoder of a type; imported here, since llvmlite and, for K-quants, numba take their time."""
    if type in K_QUANTS:
        from .encode_kernels_k import kernel as k_kernel

        encode_k = k_kernel(type)
        return lambda values, out, record: np.int32(encode_k(values, out, values.size // 256, record)).view(np.float32)
    from .encode_kernels import kernel, unit

    call, elements = kernel(type), unit(type)

    def run(values: Floats, out: Bytes, record: Bytes) -> np.float32:
        whole, rest = divmod(values.size, elements)
        peak = call(values.ctypes.data, out.ctypes.data, whole, record.ctypes.data)
        if rest:  # of a plain type
            last, width = np.zeros(elements, np.float32), BLOCKS[type].nbytes
            last[:rest] = values.reshape(-1)[-rest:]
            encoded = np.empty(elements * width, np.uint8)
            peak = max(peak, call(last.ctypes.data, encoded.ctypes.data, 1, record.ctypes.data))
            out.reshape(-1)[-rest * width :] = encoded[: rest * width]
        return np.int32(peak).view(np.float32)

    return run


def _unfit(values: Floats, out: Bytes, type: QType) -> int:
    """Place of the first value that is not finite, else of the largest that `type` turned into one; -1 if none."""
    bad = ~np.isfinite(values)
    if bad.any():
        return int(np.argmax(bad))
    bad = ~np.isfinite(decode_rows(out, type))
    return int(np.argmax(np.where(bad, np.abs(values), -1))) if bad.any() else -1


def _refusal(value: Any, type: QType, name: str, index: Iterable[Any]) -> LossyError:
    too_large = bool(np.isfinite(value))
    return LossyError(
        f"a value is too large for {type.name}" if too_large else "a value is not finite",
        at=f"tensor {name}, element [{', '.join(str(int(i)) for i in index)}]",
        got=f"{value:.9g}",
        hint="choose a type with a wider range, such as bf16 or f32"
        if too_large
        else "the training diverged, or the file is damaged; --allow-nonfinite converts it all the same",
    )


def _regrouped(t: Tensor, elements: int) -> Tensor:
    """A vector as one row, as block types see it, or, decoded, as rows of one element, as plain types see it."""
    if elements > 1:
        return replace(t, shape=(1, elements), rows=lambda lo, hi: t.read().reshape(1, -1)[lo:hi], view=None)
    return replace(
        t,
        type=QType.F32,
        rows=lambda lo, hi: decode_rows(t.read(), t.type).view(np.uint8).reshape(-1, 4)[lo:hi],
        view=None,
    )


def _require_writable(type: QType, elements: int, name: str = "") -> None:
    if type not in WRITABLE:
        raise UnsupportedError(
            f"{type.name} cannot be written",
            at=f"tensor {name}" if name else "",
            expected=" ".join(w.name for w in WRITABLE),
        )
    if elements % BLOCKS[type].elements:
        raise UnsupportedError(
            f"rows are not whole {type.name} blocks",
            at=f"tensor {name}" if name else "",
            expected=f"a multiple of {BLOCKS[type].elements} elements a row",
            got=elements,
            hint="choose q8_0 or f16" if BLOCKS[type].elements == 256 else "choose f16",
        )

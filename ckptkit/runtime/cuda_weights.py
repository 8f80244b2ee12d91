"""Weights on the card: uploaded through page-locked memory while the next piece is read, split into planes there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint import Checkpoint
from ..quant.encode import decode, decode_rows
from ..quant.types import BLOCKS, QType
from ..tensor import Tensor
from . import cuda_driver as gpu
from .cuda_driver import Address, Buffer
from .cuda_layout import LAYOUTS
from .cuda_plan import Split

STAGE = 32 << 20  # bytes of a piece on its way
SPLIT_TYPES = frozenset(t for t in LAYOUTS if BLOCKS[t].elements > 1)


@dataclass(frozen=True, eq=False)
class Part:
    """A matrix of one type: `planes` are the addresses of its four planes (0 where there is none)."""

    type: QType
    n_rows: int
    n_in: int
    planes: tuple[Address, Address, Address, Address]
    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """Bytes on the card."""
        return self.buffer.nbytes


@dataclass(frozen=True, eq=False)
class Weight:
    """Stacked rows: one part where all types agree; `bias` f32 (all rows,) or None."""

    parts: tuple[Part, ...]
    bias: Buffer | None
    kept: list[tuple[str, int]]  # type name and stored bytes of every tensor that runs as stored
    copied: list[tuple[str, str, int]]  # type name, what was done, bytes, of every other

    @property
    def n_rows(self) -> int:
        """Rows of all parts."""
        return sum(p.n_rows for p in self.parts)

    @property
    def n_in(self) -> int:
        """Length of a row."""
        return self.parts[0].n_in


class Stage:
    """Two page-locked buffers and their copies on the card, used in turn; made on first use, freed after loading."""

    def __init__(self) -> None:
        self.host: list[tuple[npt.NDArray[Any], int]] = []
        self.device: list[Buffer] = []
        self.events: list[Any] = []
        self.turn = 0

    def send(self, data: npt.NDArray[np.uint8]) -> Buffer:
        """Bytes on their way to the card; the buffer holds them for launches made now."""
        if not self.host:
            for _ in range(2):
                self.host.append(gpu.pinned(STAGE))
                self.device.append(gpu.empty((STAGE,), np.uint8))
                self.events.append(gpu.event())
        k = self.turn
        self.turn = 1 - k
        gpu.wait(self.events[k])
        array, address = self.host[k]
        array[: len(data)] = data
        gpu.copy_from_pinned(self.device[k], address, len(data))
        return self.device[k]

    def sent(self) -> None:
        """Everything that reads the last piece has been launched."""
        gpu.record(self.events[1 - self.turn])

    def close(self) -> None:
        """Wait, and free both sides."""
        gpu.sync()
        for _, address in self.host:
            gpu.release_pinned(address)
        self.host, self.device, self.events = [], [], []
        _tables.clear()


stage = Stage()


def pieces(t: Tensor) -> Iterable[npt.NDArray[np.uint8]]:
    """Rows of a tensor in pieces that fit the stage: uint8 (rows, row bytes)."""
    for _, rows in t.chunks(STAGE):
        yield rows


def place_part(tensors: list[Tensor]) -> Part:
    """Tensors of one type, stacked, as one matrix."""
    t = tensors[0]
    layout, n_in, n_rows = LAYOUTS[t.type], t.row_elements, sum(p.n_rows for p in tensors)
    starts, nbytes = layout.offsets(n_rows, n_in)
    buffer = gpu.empty((nbytes,), np.uint8)
    planes = [Address(buffer.address + at) for at in starts] + [Address(0)] * (4 - len(starts))
    pitch, row = layout.pitch(0, n_in), t.row_bytes
    if t.type not in SPLIT_TYPES and pitch != row:
        gpu.fill_zero(buffer)
    done = 0
    for tensor in tensors:
        for rows in pieces(tensor):
            if t.type in SPLIT_TYPES:
                split(t.type, rows, done * (n_in // BLOCKS[t.type].elements), planes)
            elif pitch == row:
                sent = stage.send(rows.reshape(-1))
                gpu.copy(Buffer(planes[0] + done * row, (rows.size,), np.dtype(np.uint8)), sent)
                stage.sent()
            else:
                for lo in range(0, len(rows), max(STAGE // pitch, 1)):
                    some = rows[lo : lo + max(STAGE // pitch, 1)]
                    padded = np.zeros((len(some), pitch), np.uint8)
                    padded[:, :row] = some
                    sent = stage.send(padded.reshape(-1))
                    gpu.copy(Buffer(planes[0] + (done + lo) * pitch, (padded.size,), np.dtype(np.uint8)), sent)
                    stage.sent()
            done += len(rows)
    return Part(t.type, n_rows, n_in, (planes[0], planes[1], planes[2], planes[3]), buffer)


def split(type: QType, rows: npt.NDArray[np.uint8], first: int, planes: list[Address]) -> None:
    """Send rows of blocks and split them into planes, from block `first` on."""
    plan, block, layout = Split(type), BLOCKS[type], LAYOUTS[type]
    n = rows.size // block.nbytes
    at = [
        Address(p + first * (block.elements // plane.per) * plane.nbytes)
        for p, plane in zip(planes, layout.planes, strict=False)
    ]
    sent = stage.send(rows.reshape(-1))
    words = block.elements // layout.values * 4
    grid = (-(-n * words // plan.threads), 1, 1)
    gpu.launch(plan, grid, [sent, *at, *[Address(0)] * (4 - len(at)), n])
    stage.sent()


def place(parts: list[Tensor], biases: list[Tensor] | None) -> Weight:
    """Rows of all parts as one weight; types that have no kernel are decoded to F32 and said so."""
    if _tables and biases is None and len(parts) == 1 and parts[0] is _tables[0][0]:
        return replace(_tables.pop()[1], kept=[], copied=[])
    kept: list[tuple[str, int]] = []
    copied: list[tuple[str, str, int]] = []
    ready = []
    for t in parts:
        if t.type in LAYOUTS:
            ready.append(t)
            kept.append((t.type.name, t.nbytes))
        else:
            ready.append(decode(t))
            copied.append((t.type.name, "decoded to F32", 4 * t.n_elements))
    runs: list[list[Tensor]] = []
    for t in ready:
        if runs and runs[-1][0].type == t.type:
            runs[-1].append(t)
        else:
            runs.append([t])
    bias = np.concatenate([plain(b) for b in biases]) if biases else None
    placed = Weight(tuple(place_part(run) for run in runs), None if bias is None else gpu.upload(bias), kept, copied)
    return placed


_tables: list[tuple[Tensor, Weight]] = []  # of the model being loaded


def place_rows(t: Tensor) -> Weight:
    """A table of which single rows are read; the same memory serves where it is the output matrix too."""
    weight = place([t], None)
    _tables[:] = [(t, weight)]
    return weight


def weight_bytes(ck: Checkpoint) -> int:
    """Bytes that the weights take on the card; a tied output counts once."""
    total = 0
    for t in ck.tensors.values():
        if t.type in LAYOUTS:
            total += LAYOUTS[t.type].offsets(t.n_rows, t.row_elements)[1]
        else:
            total += 4 * t.n_elements
    return total


def plain(t: Tensor) -> npt.NDArray[np.float32]:
    """A small tensor as f32, flat or (rows, columns)."""
    values = decode_rows(t.read(), t.type)
    return np.ascontiguousarray(values.reshape(t.shape), np.float32)

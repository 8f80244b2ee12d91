"""llm.c debug states: one batch with the logits, loss and gradients that PyTorch gave for it (train_*.py write_state).

int32[256] header | int32 x (B, T) | int32 y (B, T) | float32 logits (B, T, V) | float32 loss | float32 gradients

magic     slots                     gradients, in the model's order
20240327  [1] version [2] B [3] T   version 1: 16 tensors of GPT-2; version 2: the embedding's padded with zero rows
20240803  [1] B [2] T               10 tensors of Llama-3; the magic is the model's too, which has more slots than these

The vocabulary is not in the file, nor any size of the model: it takes the model's config to know where the logits end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint import Config
from ..errors import FormatError, UnsupportedError
from ..files import File
from ..layout import end_of, places, read_sequential
from ..quant.types import QType
from ..tensor import Tensor
from . import llmc, llmc_llama3

GPT2, LLAMA3 = 20240327, 20240803
HEADER = 1024
ARCHS = {GPT2: "gpt2", LLAMA3: "llama"}
LAYOUTS = {GPT2: llmc.IN_PLACE, LLAMA3: llmc_llama3.LAYOUT}


@dataclass(frozen=True)
class State:
    """A batch: ids x, targets y (B, T), the loss, gradients by canonical name; logits are read when asked for."""

    file: File
    version: str
    vocab_size: int
    x: npt.NDArray[np.int32]
    y: npt.NDArray[np.int32]
    loss: float
    grads: dict[str, Tensor]

    def logits(self, b: int) -> npt.NDArray[Any]:
        """float32 (T, V) of sequence b."""
        length = self.x.shape[1]
        start = HEADER + 8 * self.x.size + 4 * b * length * self.vocab_size
        return self.file.read(start, 4 * length * self.vocab_size, "logits").view("<f4").reshape(length, -1)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> State:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def is_state(head: bytes) -> bool:
    """Whether a file that starts like this is a debug state; a Llama-3 model has sizes where a state has zeros."""
    if len(head) < 64:
        return False
    slots = np.frombuffer(head[:64], "<i4").tolist()
    return slots[0] == GPT2 or (slots[0] == LLAMA3 and llmc_llama3.is_state(slots))


def read(path: Path, config: Config) -> State:
    """The debug state of a model with this config; FormatError where its size or its ids do not fit the model."""
    file = File(path)
    try:
        return _read(file, config)
    except BaseException:
        file.close()
        raise


def _read(file: File, config: Config) -> State:
    header = file.ints(0, HEADER // 4, at="header")
    if not is_state(header.tobytes()):
        raise FormatError(
            "not a debug state of llm.c", path=file.path, offset=0, expected=f"{GPT2}, or {LLAMA3} without model sizes",
            got=int(header[0]),
        )  # fmt: skip
    magic = int(header[0])
    if config.arch != ARCHS[magic]:
        raise UnsupportedError(
            "the debug state is of another architecture", path=file.path, expected=config.arch, got=ARCHS[magic]
        )
    version = int(header[1]) if magic == GPT2 else 0
    if magic == GPT2 and version not in (1, 2):
        raise UnsupportedError(
            "unknown version of a debug state", path=file.path, offset=4, expected="1 or 2", got=version
        )
    batch, length = header[2:4].tolist() if magic == GPT2 else header[1:3].tolist()
    if batch < 1 or not 1 <= length <= config.context_length:
        raise FormatError(
            "the batch cannot be the model's", path=file.path, offset=8 if magic == GPT2 else 4,
            expected=f"B >= 1 and T from 1 to {config.context_length:,}", got=f"B {batch:,}, T {length:,}",
        )  # fmt: skip
    n, vocab = batch * length, config.vocab_size
    loss_at = HEADER + 8 * n + 4 * n * vocab
    grads, end = _gradients(file, config, magic, version, loss_at + 4)
    if end != file.size:
        raise FormatError(
            "the debug state's size does not fit the model", path=file.path, offset=HEADER,
            expected=f"{end:,} bytes for a batch of {batch} x {length} and a vocabulary of {vocab:,}",
            got=f"{file.size:,}", hint="it belongs to another model, or was cut",
        )  # fmt: skip
    ids = []
    for name, offset in (("x", HEADER), ("y", HEADER + 4 * n)):
        found = file.ints(offset, n, at=name)
        bad = np.flatnonzero((found < 0) | (found >= vocab))
        if len(bad):
            raise FormatError(
                "a token is not in the vocabulary", path=file.path, offset=offset + 4 * int(bad[0]), at=name,
                expected=f"0 to {vocab - 1:,}", got=int(found[bad[0]]),
            )  # fmt: skip
        ids.append(found.reshape(batch, length))
    loss = float(file.read(loss_at, 4, "loss").view("<f4")[0])
    return State(file, f"version {version}" if version else "", vocab, ids[0], ids[1], loss, grads())


def _gradients(file: File, config: Config, magic: int, version: int, start: int) -> tuple[Any, int]:
    """A function that places the gradients, and where they end. The padded rows of version 2 follow from the size."""
    layout, padding = LAYOUTS[magic], 0
    end = end_of(layout, config, start, QType.F32)
    if version == 2:
        row = 4 * config.n_embd
        padding = max(file.size - end, 0) // row
        multiple = (config.vocab_size + padding) % llmc.PAD == 0
        padding = padding if multiple else -config.vocab_size % llmc.PAD
        end += padding * row
    return lambda: read_sequential(places(layout, config, start, QType.F32, padding)[0], config, file), end

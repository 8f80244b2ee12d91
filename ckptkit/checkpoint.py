"""What every format is read into and written from: config, canonical tensors, tokenizer and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import FormatError
from .files import File
from .tensor import Tensor

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

LIMIT = 2**31 - 1  # every size in every format is an int32


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; `type` as Hugging Face names it."""

    type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0

    def factors(self, head_dim: int, theta: float) -> npt.NDArray[np.float32]:
        """Divisor of each rotary frequency, (head_dim / 2,): what GGUF keeps in rope_freqs.weight (Llama 3.1)."""
        if self.type == "linear":
            return np.full(head_dim // 2, self.factor, np.float32)
        wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        low, high = self.original_context / self.low_freq_factor, self.original_context / self.high_freq_factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = 1 / ((1 - smooth) / self.factor + smooth)
        return np.where(wavelength < high, 1.0, np.where(wavelength > low, self.factor, between)).astype(np.float32)


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a model. Zero or "" where the file does not say (a foreign arch, a vocabulary alone)."""

    arch: str
    context_length: int = 0
    vocab_size: int = 0
    n_layer: int = 0
    n_head: int = 0
    n_kv_head: int = 0
    n_embd: int = 0
    n_ff: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_pairing: str = ""  # "adjacent": (0,1),(2,3)...; "half": (0,h/2),(1,h/2+1)...; "" without rotary positions
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # tokens each position sees; 0 for all before it
    n_mtp_head: int = 1  # prediction heads, the ordinary one included
    tied_output: bool = False

    def dims(self) -> dict[str, int]:
        """Sizes by the names that the arch table uses."""
        return {
            "n_embd": self.n_embd,
            "n_ff": self.n_ff,
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "q": self.n_head * self.head_dim,
            "kv": self.n_kv_head * self.head_dim,
            "half_head": self.head_dim // 2,
        }

    def check(self, path: Path, offset: int = 0) -> None:
        """Raise a FormatError that names the first size which cannot be; `offset` is where the sizes are stored."""
        for name in (
            "context_length",
            "vocab_size",
            "n_layer",
            "n_head",
            "n_kv_head",
            "n_embd",
            "n_ff",
            "head_dim",
            "n_mtp_head",
        ):
            value = getattr(self, name)
            if not 1 <= value <= LIMIT:
                raise FormatError(
                    f"{name} is out of range", path=path, offset=offset, expected=f"1 to {LIMIT:,}", got=value
                )
        if self.n_head % self.n_kv_head:
            raise FormatError(
                "heads do not divide into groups", path=path, offset=offset,
                expected="n_head a multiple of n_kv_head", got=f"n_head {self.n_head}, n_kv_head {self.n_kv_head}",
            )  # fmt: skip
        if self.rope_pairing and self.head_dim % 2:
            raise FormatError(
                "rotary heads need an even size", path=path, offset=offset, expected="head_dim even", got=self.head_dim
            )
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (0 < value < float("inf")):
                raise FormatError(
                    f"{name} is out of range", path=path, offset=offset, expected="a positive number", got=value
                )


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from. `metadata`: header fields and keys as found. `notes`: what the reader assumed."""

    paths: tuple[Path, ...]
    format: str
    version: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()  # names of the tensors as stored, in file order, where they have names


@dataclass(frozen=True)
class Checkpoint:
    """A model between formats: tensors under canonical names in canonical order. A context manager over its files."""

    config: Config
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None
    source: Source
    files: tuple[File, ...] = ()

    def close(self) -> None:
        """Close the files; tensors cannot be read after."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def n_parameters(self) -> int:
        """Values in all tensors; padding rows and extra prediction heads count, a tied output counts once."""
        return sum(t.n_elements for t in self.tensors.values())

"""What a person may tell a reader or a writer beyond what the file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import Config, Source
from ..errors import UnsupportedError
from ..layout import Layout
from ..quant.types import QType
from ..tensor import Tensor


@dataclass(frozen=True)
class ReadOptions:
    """Overrides for facts that a format does not store, or stores wrongly. None or "": as the file says."""

    tokenizer: Path | None = None
    layout: str = ""  # which of several layouts, where the header does not settle it
    norm_eps: float | None = None
    rope_theta: float | None = None
    context_length: int | None = None
    n_head: int | None = None


# facts of ReadOptions that are fields of Config under the same names -> their flags
FACTS = {"norm_eps": "--norm-eps", "rope_theta": "--rope-base", "context_length": "--context", "n_head": "--heads"}


@dataclass(frozen=True)
class WriteOptions:
    """How to write: `version` of the format ("" for the one that fits the types), `split_max_size` in bytes a shard."""

    version: str = ""
    mixture: str = ""  # the --type that the tensors were encoded by; "" if they were kept as they are
    split_max_size: int = 0
    write_output: bool = False  # store a tied output matrix a second time
    name: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # keys to set
    remove: tuple[str, ...] = ()  # keys to leave out
    complete: bool = True  # add what a file of the same format lacks; False where only what is asked for may change


# field of WriteOptions -> the flags that set it; a format that heeds any beside --version lists them in its OPTIONS
FLAGS = {
    "split_max_size": "--split-max-size", "write_output": "--write-output", "name": "--name",
    "metadata": "--set and --chat-template", "remove": "--remove",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One way in which a format can store a model: its version, layout, types (a --type name) and padding rows."""

    version: str
    layout: Layout
    mixture: str
    n_padding: int = 0


# facts of a source file that mean nothing elsewhere and are carried along, so that the way back gives the same bytes
CARRIED = ("llmc_version", "llmc_llama3_rest", "llama2c_version", "padded_vocab_size", "mtp_sha256")


def origin(source: Source, name: str) -> Any:
    """A fact of the file that a model first came from, kept through other formats (in GGUF as key ckptkit.NAME)."""
    value = source.metadata.get(name, source.metadata.get(f"ckptkit.{name}"))
    return getattr(value, "value", value)


def uniform(_config: Config, stored: Mapping[str, Tensor], mixture: str, _pure: bool = False) -> dict[str, QType]:
    """The type plan of formats that keep every tensor in one type."""
    return dict.fromkeys(stored, QType[mixture.upper()])


def chosen(option: Any, stored: Any, default: Any, name: str, notes: list[str]) -> Any:
    """The option if given, else what is stored, else a default; a note says so where it is not what is stored."""
    if option is not None:
        said = f" (the file says {stored:g})" if stored else ""
        notes.append(f"{name} {option:g} as given{said}")
        return option
    if stored:
        return stored
    notes.append(f"{name} is not stored; took {default:g}")
    return default


def refuse_version(path: Path, given: str, known: tuple[str, ...]) -> UnsupportedError:
    """The error for a version that a writer does not know."""
    return UnsupportedError("no such version can be written", path=path, expected=", ".join(known), got=given)

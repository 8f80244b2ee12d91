"""Open, convert, verify and run the checkpoints of hand-written language model trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .conversion import Report
    from .runtime.model import Model

__all__ = ["convert", "load", "open"]


def open(path: str | Path, **facts: Any) -> Checkpoint:
    """Open a checkpoint of any format; nothing but headers is read. Close it, or use it in a `with`.

    `format` names the format instead of finding it out; other `facts` are those of formats.options.ReadOptions:
    tokenizer, norm_eps, rope_theta, context_length, n_head, layout. Raises a CkptError (errors.py).
    """
    from . import formats
    from .formats.options import ReadOptions

    format = facts.pop("format", "")
    return formats.open(path, format, ReadOptions(**_paths(facts, "tokenizer")))


def convert(src: str | Path, dst: str | Path, **options: Any) -> Report:
    """Convert a checkpoint and say what was done. `options` are those of conversion.Options: type, arch, force, ...

    Raises a CkptError and leaves nothing at `dst` if the input is broken or something would be lost.
    """
    from .conversion import Options
    from .conversion import convert as run

    return run(src, dst, Options(**_paths(options, "manifest")))


def load(path: str | Path, device: str = "cpu", **how: Any) -> Model:
    """Open a checkpoint and put it on a device; `how` as in runtime.load: precision, threads, context, ..."""
    from .runtime import load as run

    ck = open(path)
    try:
        return run(ck, device, **how)
    except BaseException:
        ck.close()
        raise


def _paths(given: dict[str, Any], name: str) -> dict[str, Any]:
    """The same arguments with the file among them as a Path."""
    return given if given.get(name) is None else given | {name: Path(given[name])}

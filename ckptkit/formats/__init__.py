"""The formats, in order of the strength of what they are recognised by: magic numbers first, mere sizes last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ..checkpoint import Checkpoint
from ..errors import FormatError, UnsupportedError
from ..files import read_head
from . import gguf, llama2c, llmc, llmc_llama3, microgpt, nanoeuler, safetensors, sidecar
from .options import ReadOptions, Target, WriteOptions
from .tokenizer_files import read_tokenizer

FORMATS: tuple[ModuleType, ...] = (
    gguf,
    safetensors,
    llmc,
    llmc_llama3,
    llama2c,
    microgpt,
    nanoeuler,
)


def by_name(name: str) -> ModuleType:
    """The format of that name."""
    for module in FORMATS:
        if name == module.NAME:
            return module
    raise UnsupportedError("no such format", expected=", ".join(m.NAME for m in FORMATS), got=name)


def detect(path: Path) -> ModuleType:
    """The one format whose detector says yes."""
    head, size = (b"", 0) if path.is_dir() else read_head(path)
    found = [m for m in FORMATS if m.detect(path, head, size)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise FormatError(
            "no format recognises this file",
            path=path,
            offset=0,
            expected=", ".join(m.NAME for m in FORMATS),
            got=f"{size:,} bytes that begin with {head[:8]!r}"
            if head
            else "an empty file or a directory without a model",
            hint="pass --from NAME if you know what it is",
        )
    raise UnsupportedError(
        "several formats fit this file", path=path, got=", ".join(m.NAME for m in found), hint="pass --from NAME"
    )


def open(path: str | Path, format: str = "", options: ReadOptions | None = None) -> Checkpoint:
    """Detect and read a checkpoint, its tokenizer and the sidecar of its extra prediction heads. Close it after use."""
    path, options = Path(path), options or ReadOptions()
    module = by_name(format) if format else detect(path)
    ck: Checkpoint = module.read(path, options)
    try:
        if options.tokenizer and ck.tokenizer is None:
            tokenizer = read_tokenizer(options.tokenizer, ck.config.vocab_size)
            ck = replace(ck, tokenizer=tokenizer)
        return sidecar.attach(ck)
    except BaseException:
        ck.close()
        raise


def targets(module: ModuleType, ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """The ways in which a format can store this model, best first; by default one for each type it knows."""
    if hasattr(module, "targets"):
        found: list[Target] = module.targets(ck, options)
        return found
    if options.version:
        raise UnsupportedError(f"{module.NAME} has no versions", got=options.version, hint="leave --version out")
    return [Target("", module.LAYOUTS[ck.config.arch], mixture) for mixture in module.MIXTURES]

"""The formats, in order of the strength of what they are recognised by: magic numbers first, mere sizes last.

Each is a module of the same name, imported when a file asks for it: reading one format waits for no other.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..checkpoint import Checkpoint
from ..errors import FormatError, UnsupportedError, blaming
from ..files import read_head
from .options import FACTS, ReadOptions, Target, WriteOptions

FORMATS = {
    "gguf": ".gguf",
    "llmc": ".bin",
    "llmc-llama3": ".bin",
    "safetensors": ".safetensors",
    "llama2c": ".bin",
    "microgpt": ".json",
    "nanoeuler": ".bin",
}  # name -> suffix
BY_MAGIC = ("gguf", "llmc", "llmc-llama3")  # their magic number settles it; those after them may be several


def by_name(name: str) -> ModuleType:
    """The format of that name."""
    if name not in FORMATS:
        raise UnsupportedError("no such format", expected=", ".join(FORMATS), got=name)
    return import_module(f".{name.replace('-', '_')}", __name__)


def detect(path: Path) -> ModuleType:
    """The first format that knows its magic number, else the one format whose detector says yes."""
    head, size = (b"", 0) if path.is_dir() else read_head(path)
    for name in BY_MAGIC:
        if by_name(name).detect(path, head, size):
            return by_name(name)
    found = [name for name in FORMATS if name not in BY_MAGIC and by_name(name).detect(path, head, size)]
    if len(found) == 1:
        return by_name(found[0])
    if not found:
        raise FormatError(
            "no format recognises this file",
            path=path,
            offset=0,
            expected=", ".join(FORMATS),
            got=f"{size:,} bytes that begin with {head[:8]!r}"
            if head
            else "an empty file or a directory without a model",
            hint="pass --from NAME if you know what it is",
        )
    raise UnsupportedError("several formats fit this file", path=path, got=", ".join(found), hint="pass --from NAME")


def open(path: str | Path, format: str = "", options: ReadOptions | None = None, strict: bool = True) -> Checkpoint:
    """Detect and read a checkpoint, its tokenizer and the sidecar of its extra prediction heads. Close it after use.

    `strict` refuses facts given that the file settles otherwise.
    """
    path, options = Path(path), options or ReadOptions()
    module = by_name(format) if format else detect(path)
    with blaming(path):
        ck: Checkpoint = module.read(path, options)
    try:
        if strict:
            _check_heeded(module, ck, options)
        if options.tokenizer and ck.tokenizer is None:
            from .tokenizer_files import read_tokenizer

            tokenizer = read_tokenizer(options.tokenizer, ck.config.vocab_size)
            ck = replace(ck, tokenizer=tokenizer)
        if ck.config.n_mtp_head > 1:
            from . import sidecar

            ck = sidecar.attach(ck)
        return ck
    except BaseException:
        ck.close()
        raise


def _check_heeded(module: ModuleType, ck: Checkpoint, options: ReadOptions) -> None:
    """Refuse facts that the reader did not take: the file settles them, or such a model has none."""
    refused = {flag: (getattr(ck.config, name), getattr(options, name)) for name, flag in FACTS.items()}
    refused["--layout"] = ("", "" if hasattr(module, "HEEDS_LAYOUT") else options.layout)
    for flag, (own, given) in refused.items():
        if given is not None and given != own:
            raise UnsupportedError(
                "the file does not leave this open", path=ck.source.paths[0], at=flag, expected=own or None, got=given,
                hint=f"leave {flag} out",
            )  # fmt: skip


def targets(module: ModuleType, ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """The ways in which a format can store this model, best first; by default one for each type it knows."""
    if hasattr(module, "targets"):
        found: list[Target] = module.targets(ck, options)
        return found
    if options.version:
        raise UnsupportedError(f"{module.NAME} has no versions", got=options.version, hint="leave --version out")
    return [Target("", module.LAYOUTS[ck.config.arch], mixture) for mixture in module.MIXTURES]

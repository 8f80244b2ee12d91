"""Predict what llama.cpp, Ollama and Hugging Face refuse in a file, or silently get wrong; nothing is run.

A file that no reader takes is walked as far as it goes: the reader's error is then one of the findings.
"""

from __future__ import annotations

from pathlib import Path

from .. import formats
from ..errors import CkptError, FormatError, UnsupportedError
from ..files import File
from ..formats import gguf
from ..formats.gguf_io import MAGIC, Header, Value, tensors
from ..formats.gguf_keys import text
from ..tensor import Tensor
from ..tokenizer.faults import faults
from . import container, keys, pairing, shapes, sizes, template, values, vocabulary
from .finding import JUDGED_BY, RULES, SEVERITIES, Finding, Report, finding
from .mend import mend

__all__ = ["JUDGED_BY", "RULES", "Finding", "Report", "check"]


def check(path: Path, deep: bool = False, fix: Path | None = None, force: bool = False) -> Report:
    """Findings on a file or directory; `deep` reads all values, `fix` is where the mended file goes."""
    if path.is_file():
        with path.open("rb") as f:
            if f.read(4) == MAGIC:
                return _gguf(path, deep, fix, force)
    if fix:
        raise UnsupportedError("only GGUF files can be mended", path=path)
    return _other(path, deep)


def _report(path: Path, format: str, arch: str, found: list[Finding], notes: tuple[str, ...] = ()) -> Report:
    unique = sorted(dict.fromkeys(found), key=lambda f: SEVERITIES.index(f.severity))
    return Report(path, format, arch, tuple(unique), notes)


def _gguf(path: Path, deep: bool, fix: Path | None, force: bool) -> Report:
    found: list[Finding] = []
    files: list[File] = []
    try:
        try:
            headers, stored = _walk(path, files, found)
        except CkptError as e:
            if fix:
                raise
            return _report(path, "gguf", "", [container.unreadable(e)])
        first: dict[str, Value] = headers[0].keys
        arch = text(first, "general.architecture")
        if not any(header.infos for header in headers):
            found.append(container.no_tensors())
        found += keys.check(first, stored)
        found += sizes.check(first)
        found += shapes.check(first, stored)
        found += vocabulary.check(first)
        if chat := text(first, "tokenizer.chat_template"):
            found += template.check(chat)
        broken = any(f.rule == "unreadable" for f in found)
        if not broken:
            found += values.zero_rows(stored)
            found += pairing.check(first, stored)
            found += values.nonfinite(stored) if deep else ()
        notes = () if arch in shapes.ROWS else (f"the keys and tensors of arch {arch or 'unknown'} were not looked at",)
        report = _report(path, "gguf", arch, found, notes)
        if fix:
            if broken:
                raise UnsupportedError("a file that cannot be read whole cannot be mended", path=path)
            mend(first, stored, report.findings, tuple(f.path for f in files), fix, force)
        return report
    finally:
        for file in files:
            file.close()


def _walk(path: Path, files: list[File], found: list[Finding]) -> tuple[list[Header], dict[str, Tensor]]:
    """Headers and tensors of all shards; what lies wrongly becomes a finding and its shard has no tensors."""
    headers: list[Header] = []
    stored: dict[str, Tensor] = {}
    for shard, header in gguf.open_shards(path, files):
        headers.append(header)
        found += container.check(header, shard)
        try:
            own = tensors(header, shard)
        except CkptError as e:
            found.append(container.unreadable(e))
            continue
        for name in stored.keys() & own.keys():
            again = FormatError("two shards hold the same tensor", path=shard.path, at=f"tensor {name}")
            found.append(container.unreadable(again))
        stored |= own
    found += container.shards(path, headers)
    return headers, stored


def _other(path: Path, deep: bool) -> Report:
    """Formats other than GGUF: does it open, has every token a row, is the template only text, are merges of tokens.

    That a token without a row stops Hugging Face rests on PyTorch's embedding, which raises IndexError for such an id.
    """
    found: list[Finding] = []
    try:
        with formats.open(path) as ck:
            if ck.tokenizer and ck.tokenizer.chat_template:
                found += template.check(ck.tokenizer.chat_template, "chat template")
            if ck.tokenizer and ck.tokenizer.vocab_size > ck.config.vocab_size:
                what = f"{ck.tokenizer.vocab_size:,} tokens for {ck.config.vocab_size:,} rows"
                found.append(finding("tokens-beyond-rows", "tokenizer", what,
                                     "an id beyond the rows stops Hugging Face",
                                     "pair it with its tokenizer"))  # fmt: skip
            if ck.tokenizer:
                merges = [f for f in faults(ck.tokenizer.vocabulary()) if f.part == "merges"]
                found += [container.unreadable(ck.tokenizer.origin.error(fault)) for fault in merges[:1]]
            found += values.zero_rows(ck.tensors)
            found += values.nonfinite(ck.tensors) if deep else ()
            return _report(path, ck.source.format, ck.config.arch, found, tuple(ck.source.notes))
    except UnsupportedError as e:  # what is unknown here may be known elsewhere
        return _report(path, "", "", found, (f"not looked at: {e.what}" + (f", {e.got}" if e.got else ""),))
    except CkptError as e:
        return _report(path, "", "", [container.unreadable(e)])

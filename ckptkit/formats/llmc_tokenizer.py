"""llm.c's tokenizer file (karpathy/llm.c train_gpt2.py write_tokenizer, llmc/tokenizer.h).

uint32[256] header: magic 20240328 | version | n tokens | id of the end-of-text token (version 2 only) | zeros
n times: uint8 length (1..255), that many raw bytes

Version 1 has no end-of-text slot: its reader wants 50,257 tokens and takes 50,256. The file holds no merges; for GPT-2
the ids are in merge order, so they can be rebuilt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import FormatError, UnsupportedError
from ..files import File, replacing
from ..tokenizer import ByteBPE, Strings, Tokenizer, TokenType
from ..tokenizer.faults import Origin

MAGIC = 20240328
HEADER = 1024
SLOTS = {1: 3, 2: 4}  # version -> header slots in use
GPT2_VOCAB, GPT2_EOT = 50257, 50256
STORED = "llmc-tokenizer version {}"


def detect(head: bytes) -> bool:
    """Whether a file that begins with `head` is an llm.c tokenizer."""
    return len(head) >= 4 and int.from_bytes(head[:4], "little") == MAGIC


def read(path: Path) -> ByteBPE:
    """Read version 1 or 2. BOS and EOS are the end-of-text token, as GPT-2 has it; no BOS is added."""
    file = File(path)
    try:
        data = file.read(0, file.size).tobytes() if file.size < 1 << 28 else b""
        file.require(0, HEADER, "header")
    finally:
        file.close()
    header = np.frombuffer(data, "<u4", HEADER // 4)
    magic, version, n, eot = (int(x) for x in header[:4])
    if magic != MAGIC:
        raise FormatError("not an llm.c tokenizer", path=path, offset=0, at="magic", expected=MAGIC, got=magic)
    if version not in SLOTS:
        raise UnsupportedError(
            "unknown version of the tokenizer file", path=path, offset=4, at="version", expected="1 or 2", got=version
        )
    notes = []
    if version == 1:
        eot = GPT2_EOT if n == GPT2_VOCAB else -1
        notes.append(
            f"version 1 names no end-of-text token: took {eot:,}, as for GPT-2"
            if eot >= 0
            else f"version 1 names no end-of-text token and {n:,} tokens are not GPT-2's: there is none"
        )
    elif not eot < n:
        raise FormatError(
            "the end-of-text token is outside the vocabulary",
            path=path,
            offset=12,
            at="eot",
            expected=f"below {n:,}",
            got=f"{eot:,}",
        )
    if header[SLOTS[version] :].any():
        slot = SLOTS[version] + int(np.flatnonzero(header[SLOTS[version] :])[0])
        notes.append(f"header slot {slot} is not zero; it is written as zero")
    try:
        tokens, end = Strings.prefixed(data, HEADER, n, 1)
    except FormatError as e:
        e.path, e.at = path, "tokens"
        raise
    if end != len(data):
        raise FormatError(
            "bytes follow the last token",
            path=path,
            offset=end,
            expected=f"a file of {end:,} bytes",
            got=f"{len(data):,}",
        )
    empty = np.flatnonzero(tokens.lengths == 0)
    if len(empty):
        i = int(empty[0])
        raise FormatError(
            "a token is empty",
            path=path,
            offset=int(tokens.starts[i]) - 1,
            at=f"token {i:,}",
            expected="1 to 255 bytes",
            got=0,
        )
    types = np.full(n, TokenType.NORMAL, np.int32)
    ids = {}
    if eot >= 0:
        types[eot] = TokenType.CONTROL
        ids = {"bos": eot, "eos": eot}
    tokenizer = ByteBPE(
        tokens, None, pre="gpt-2", raw=True, types=types, ids=ids, notes=notes, stored=STORED.format(version)
    )
    tokenizer.origin = Origin(path)
    return tokenizer


def holds(tokenizer: Tokenizer | None) -> bool:
    """Whether the file can say what this tokenizer does: GPT-2's words, ids in merge order, one special token."""
    if not isinstance(tokenizer, ByteBPE) or tokenizer.pre != "gpt-2" or tokenizer.vocab_size >= 1 << 31:
        return False
    if tokenizer.stored.startswith("llmc-tokenizer"):
        return True
    special = 0 if tokenizer.types is None else int((tokenizer.types != TokenType.NORMAL).sum())
    if special > 1 or (
        special == 1 and (tokenizer.eos is None or tokenizer.type_of(tokenizer.eos) != TokenType.CONTROL)
    ):
        return False
    plain = ByteBPE(
        Strings.of(map(tokenizer.token_bytes, range(tokenizer.vocab_size))),
        None,
        pre="gpt-2",
        raw=True,
        types=tokenizer.types,
    )
    try:
        return int(plain.tokens.lengths.max(initial=1)) <= 255 and plain.merge_ids == tokenizer.merge_ids
    except UnsupportedError:
        return False


def write(tokenizer: Tokenizer, path: Path, version: int = 0) -> None:
    """Write `version`, or the one that was read, or 2. Raises UnsupportedError for a token that does not fit."""
    version = version or (1 if tokenizer.stored == STORED.format(1) else 2)
    if version not in SLOTS:
        raise UnsupportedError("no such version can be written", path=path, expected="1 or 2", got=version)
    n, eot = tokenizer.vocab_size, tokenizer.eos
    if version == 2 and eot is None:
        raise UnsupportedError(
            "the file must name an end-of-text token",
            path=path,
            expected="a tokenizer with EOS",
            got="none",
            hint="write version 1",
        )
    header = np.zeros(HEADER // 4, "<u4")
    header[: SLOTS[version]] = (MAGIC, version, n, eot or 0)[: SLOTS[version]]
    body = bytearray()
    for i in range(n):
        token = tokenizer.token_bytes(i)
        if not 1 <= len(token) <= 255:
            raise UnsupportedError(
                "a token does not fit the file",
                path=path,
                at=f"token {i:,}",
                expected="1 to 255 bytes",
                got=f"{len(token):,}",
            )
        body.append(len(token))
        body += token
    with replacing(path) as out:
        out.write(header.tobytes())
        out.write(body)


def find_tokenizer(
    model: Path, vocab_size: int, given: Path | None
) -> tuple[Tokenizer | None, tuple[Path, ...], list[str]]:
    """The tokenizer of a model file: `given`, or NAME_tokenizer.bin beside it, or gpt2_tokenizer.bin beside it.

    NAME is the model's name, with or without _bf16. Returns it, the files read and notes. A given one must have
    `vocab_size` tokens; one found by its name that has not is left alone, with a note.
    """
    if given is not None:
        from .tokenizer_files import read_tokenizer

        tokenizer = read_tokenizer(given, vocab_size)
        return tokenizer, (given,), list(tokenizer.notes)
    names = dict.fromkeys(f"{stem}_tokenizer.bin" for stem in (model.stem, model.stem.removesuffix("_bf16")))
    found = [p for p in map(model.with_name, names) if p.is_file()]
    if len(found) > 1:
        raise FormatError(
            "several tokenizers fit by their names",
            path=model,
            got=", ".join(p.name for p in found),
            hint="choose one with --tokenizer",
        )
    found = found or [p for p in [model.with_name("gpt2_tokenizer.bin")] if p.is_file()]
    if not found:
        return None, (), ["no tokenizer beside the model; --tokenizer gives one"]
    read_one = read(found[0])
    if read_one.vocab_size != vocab_size:
        return None, (), [f"{found[0].name} has {read_one.vocab_size:,} tokens and the model {vocab_size:,}: not used"]
    return read_one, (found[0],), [f"tokenizer from {found[0].name}", *read_one.notes]


def write_tokenizer_beside(model: Path, tokenizer: Tokenizer | None) -> tuple[Path, ...]:
    """Write NAME_tokenizer.bin beside a model file where the file can hold the tokenizer and none stands there yet."""
    path = model.with_name(f"{model.stem.removesuffix('_bf16')}_tokenizer.bin")
    if tokenizer is None or path.exists() or not holds(tokenizer):
        return ()
    write(tokenizer, path)
    return (path,)

"""llama2.c's tokenizer.bin (karpathy/llama2.c tokenizer.py export, run.c build_tokenizer).

uint32 length of the longest token | for each token: float32 score, int32 length, bytes

The number of tokens is not in the file. Spaces stand for U+2581, BOS (id 1) is "\\n<s>\\n" and EOS (id 2)
"\\n</s>\\n", id 0 is <unk>, ids 3..258 are the byte tokens "<0x00>" to "<0xFF>". Encoding joins characters by
score, as in SPM.
"""

from __future__ import annotations

from pathlib import Path
from struct import pack

import numpy as np

from ..errors import CkptError, FormatError, UnsupportedError
from ..files import File, replacing
from ..tokenizer import Strings, Tokenizer, TokenType
from ..tokenizer.faults import Origin
from ..tokenizer.spm import SPACE, SPM

STORED = "llama2c-tokenizer longest {}"
NAMES = {1: (b"\n<s>\n", b"<s>"), 2: (b"\n</s>\n", b"</s>")}  # id -> as stored here, as others write it
LIMIT = 1 << 28  # bytes of a file


def read(path: Path, vocab_size: int = 0) -> SPM:
    """Read `vocab_size` tokens, which must fill the file; 0 reads to its end."""
    file = File(path)
    try:
        file.require(0, 4, "longest token")
        if file.size > LIMIT:
            raise UnsupportedError("too large for a tokenizer", path=path, got=f"{file.size:,} bytes")
        data = file.read(0, file.size).tobytes()
    finally:
        file.close()
    longest = int.from_bytes(data[:4], "little")
    try:
        found, end = Strings.prefixed(data, 4, vocab_size or _count(data), 4, gap=4)
    except FormatError as e:
        e.path, e.at = path, "tokens"
        e.hint = "llama2.c's file does not say how many tokens it holds; is it this model's?"
        raise
    if end != len(data):
        raise FormatError(
            "bytes follow the last token",
            path=path,
            offset=end,
            expected=f"{len(found):,} tokens in {end:,} bytes",
            got=f"{len(data):,} bytes",
            hint="is it this model's tokenizer?",
        )
    empty = np.flatnonzero(found.lengths == 0)
    if len(empty):
        i = int(empty[0])
        raise FormatError(
            "a token is empty",
            path=path,
            offset=int(found.starts[i]) - 4,
            at=f"token {i:,}",
            expected="a length",
            got=0,
        )
    actual = int(found.lengths.max(initial=0))
    if longest < actual:
        raise FormatError(
            "a token is longer than the longest",
            path=path,
            offset=int(found.starts[found.lengths.argmax()]) - 4,
            expected=f"at most {longest:,} bytes",
            got=f"{actual:,}",
        )
    places = found.starts[:, None] - 8 + np.arange(4)
    scores = found.buffer[places].view("<f4").reshape(-1).astype(np.float32)
    if not np.isfinite(scores).all():
        i = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise FormatError("a score is not finite", path=path, offset=int(found.starts[i]) - 8, at=f"token {i:,}")
    tokens = [t.replace(b" ", SPACE.encode()) for t in found]
    types = np.full(len(tokens), TokenType.NORMAL, np.int32)
    types[:1] = TokenType.UNKNOWN
    for i, (stored, text) in NAMES.items():
        if tokens[i : i + 1] == [stored]:
            tokens[i], types[i] = text, TokenType.CONTROL
    for b in range(256):
        if tokens[3 + b : 4 + b] == [f"<0x{b:02X}>".encode()]:
            types[3 + b] = TokenType.BYTE
    tokenizer = SPM(Strings.of(tokens), scores, types=types, stored=STORED.format(longest))
    tokenizer.origin = Origin(path)
    return tokenizer


def _count(data: bytes) -> int:
    """Records up to the end of the file; a last one that does not fit counts, so that reading it fails."""
    n, at = 0, 4
    while at < len(data):
        at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        n += 1
    return n


def holds(tokenizer: Tokenizer | None) -> bool:
    """Whether llama2.c's program would read the file as this tokenizer: SPM with its first 259 ids."""
    if not isinstance(tokenizer, SPM) or not tokenizer.add_space_prefix or tokenizer.vocab_size < 259:
        return False
    ends = tokenizer.token_bytes(3), tokenizer.token_bytes(258)
    return ends == (b"\0", b"\xff") and tokenizer.type_of(258) == TokenType.BYTE


def write(tokenizer: Tokenizer, path: Path) -> None:
    """Write an SPM tokenizer. Raises UnsupportedError for another kind."""
    if not isinstance(tokenizer, SPM):
        raise UnsupportedError("llama2.c has SPM tokenizers only", path=path, expected="spm", got=tokenizer.kind)
    body = bytearray()
    longest = 0
    for i, text in enumerate(tokenizer.tokens):
        stored, plain = NAMES.get(i, (b"", b""))
        token = stored if text == plain and plain else text.replace(SPACE.encode(), b" ")
        longest = max(longest, len(token))
        body += pack("<fi", tokenizer.scores[i], len(token)) + token
    kept = tokenizer.stored.removeprefix(STORED.format(""))
    if kept.isdigit():
        longest = max(longest, int(kept))
    with replacing(path) as out:
        out.write(pack("<I", longest))
        out.write(body)


def find_tokenizer(
    model: Path, vocab_size: int, given: Path | None
) -> tuple[Tokenizer | None, tuple[Path, ...], list[str]]:
    """The tokenizer of a model file: `given`, or NAME_tokenizer.bin or tokenizer.bin beside it, if it fits.

    Returns it, the files read and notes.
    """
    if given is not None:
        from .tokenizer_files import read_tokenizer

        tokenizer = read_tokenizer(given, vocab_size)
        return tokenizer, (given,), list(tokenizer.notes)
    notes = []
    for path in (model.with_name(f"{model.stem}_tokenizer.bin"), model.with_name("tokenizer.bin")):
        if path.is_file():
            try:
                found = read(path, vocab_size)
            except CkptError as e:
                notes.append(f"{path.name} is not this model's tokenizer ({e.what}): not used")
            else:
                return found, (path,), [f"tokenizer from {path.name}", *found.notes]
    return None, (), notes or ["no tokenizer beside the model; --tokenizer gives one"]


def write_tokenizer_beside(model: Path, tokenizer: Tokenizer | None) -> tuple[Path, ...]:
    """Write tokenizer.bin beside a model file, or NAME_tokenizer.bin where another model's stands there already."""
    if tokenizer is None or not holds(tokenizer):
        return ()
    path = model.with_name("tokenizer.bin")
    if path.exists():
        path = model.with_name(f"{model.stem}_tokenizer.bin")
    if path.exists():
        return ()
    write(tokenizer, path)
    return (path,)

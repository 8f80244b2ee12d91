"""A tokenizer given by name: whichever kind of file it is."""

from __future__ import annotations

from pathlib import Path

from ..errors import FormatError, UnsupportedError, blaming
from ..files import read_head
from ..tokenizer import Tokenizer


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer that must be a model's of `vocab_size` tokens, where that is not 0."""
    with blaming(path):
        tokenizer = _read(path, vocab_size)
    if vocab_size and tokenizer.vocab_size != vocab_size:
        raise UnsupportedError(
            "the tokenizer is not this model's",
            path=path,
            expected=f"{vocab_size:,} tokens",
            got=f"{tokenizer.vocab_size:,}",
        )
    return tokenizer


def _read(path: Path, vocab_size: int) -> Tokenizer:
    """Read llm.c's tokenizer.bin, a GGUF's, Hugging Face's tokenizer.json or directory, llama2.c's, or a byte map.

    `vocab_size` is the model's; llama2.c's file and the byte map do not say how many tokens they hold.
    """
    from . import gguf, hf_tokenizer, llama2c_tokenizer, llmc_tokenizer
    from .options import ReadOptions

    head, size = (b"", 0) if path.is_dir() else read_head(path)
    tokenizer: Tokenizer | None
    if path.is_dir() or path.suffix == ".json":
        tokenizer = hf_tokenizer.read(path)
    elif llmc_tokenizer.detect(head):
        tokenizer = llmc_tokenizer.read(path)
    elif gguf.detect(path, head, size):
        with gguf.read(path, ReadOptions()) as ck:
            tokenizer = ck.tokenizer
    elif size == vocab_size and size <= 256:
        from ..tokenizer.chars import CharTokenizer

        tokenizer = CharTokenizer.from_bytes(head[:size])
    else:
        tokenizer = llama2c_tokenizer.read(path, vocab_size)
    if tokenizer is None:
        raise FormatError(
            "no tokenizer in this file", path=path, hint="give an llm.c, Hugging Face, llama2.c or GGUF file"
        )
    return tokenizer

"""A struct walk over a GGUF header for the tokenizer tests: keys only, nothing from the reader under test."""

from __future__ import annotations

from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np

from ckptkit.tokenizer import Strings

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}


def gguf_keys(path: Path, limit: int = 1 << 24) -> dict[str, Any]:
    """Keys of a GGUF v3 file; arrays of strings as lists of bytes, others as numpy arrays."""
    with path.open("rb") as f:
        data = f.read(limit)
    n_keys = unpack_from("<Q", data, 16)[0]
    at = 24

    def string() -> bytes:
        nonlocal at
        n = unpack_from("<Q", data, at)[0]
        at += 8 + n
        return data[at - n : at]

    def value(kind: int) -> Any:
        nonlocal at
        if kind == 8:
            return string()
        if kind == 9:
            element, n = unpack_from("<IQ", data, at)
            at += 12
            if element == 8:
                return [string() for _ in range(n)]
            at += n * WIDTHS[element]
            return np.frombuffer(data, SCALARS[element], n, at - n * WIDTHS[element])
        at += WIDTHS[kind]
        return unpack_from(SCALARS[kind], data, at - WIDTHS[kind])[0]

    keys = {}
    for _ in range(n_keys):
        name = string().decode()
        kind = unpack_from("<I", data, at)[0]
        at += 4
        keys[name] = value(kind)
    return keys


def arguments(keys: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that every tokenizer class takes, from a file's keys."""
    p = "tokenizer.ggml."
    return {
        "types": keys.get(p + "token_type"),
        "ids": {role: keys[f"{p}{n}_token_id"] for role, n in ROLES.items() if f"{p}{n}_token_id" in keys},
        "add_bos": keys.get(p + "add_bos_token"),
        "add_eos": keys.get(p + "add_eos_token"),
    }


def byte_bpe(path: Path) -> Any:
    """The byte BPE of a GGUF file."""
    from ckptkit.tokenizer import ByteBPE

    keys = gguf_keys(path)
    tokens, merges = Strings.of(keys["tokenizer.ggml.tokens"]), Strings.of(keys["tokenizer.ggml.merges"])
    return ByteBPE(tokens, merges, pre=keys["tokenizer.ggml.pre"].decode(), **arguments(keys))


def vectors(texts: Path, ids: Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's tokenizer vectors: texts as they are, ids without BOS."""
    inputs = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = [[int(i) for i in line.split()] for line in ids.read_bytes().decode().split("\n")]
    assert len(inputs) == len(outputs) == 47
    return list(zip(inputs, outputs, strict=True))

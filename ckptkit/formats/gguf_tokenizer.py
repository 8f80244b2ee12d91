"""The tokenizer's keys of a GGUF file, both ways (llama-vocab.cpp reads them).

What GGUF cannot say is kept under ckptkit.*: nanoeuler's merges as ids, since two of them may spell the same bytes.
Character tables go out as model "rwkv", whose rule is the longest match, and which needs neither BOS nor EOS: for the
model "gpt2" llama.cpp would take an id that is a real character as the end of every text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError, UnsupportedError
from ..tokenizer import ByteBPE, Strings, Tokenizer
from ..tokenizer.chars import CharTokenizer
from ..tokenizer.faults import MEND, Origin, Vocabulary, refuse
from ..tokenizer.nanoeuler_bpe import NanoeulerBPE, gguf_vocabulary
from ..tokenizer.pre import WITHOUT_BOS
from ..tokenizer.spm import SPM
from .gguf_io import Kind, Value
from .gguf_known import ARRAYS, ID_KEYS, WITH_MERGES, T

NANOEULER = "ckptkit.nanoeuler.merges"
CHARS_BOS = "ckptkit.chars.bos"
OWN_ARRAYS = {NANOEULER: Kind.I32}
STAND_IN = "ckptkit.stand_in."  # role -> the id that was written for one that the vocabulary does not name
DEFAULT_ID = 11  # what llama.cpp takes for BOS and EOS of model "gpt2"
NAMES = {key.removeprefix(T): key for key in ARRAYS} | {f"{role}_token_id": key for role, key in ID_KEYS.items()}
MENDS = {  # kind of fault -> what to do
    "id": "ckptkit check FILE --fix OUT removes the key; convert with --set {name}=ID writes another",
    "empty": "ckptkit check FILE --fix OUT names it [EMPTY_{index}], as llama.cpp does",
    "length": f"{MEND}; or convert with --remove {{name}}",
    **dict.fromkeys(("merge", "unknown"), f"{MEND}; or convert with --remove {{name}} and let check --fix rebuild it"),
}


def read(keys: Mapping[str, Value], path: Path) -> Tokenizer | None:
    """The tokenizer that the keys describe; None for a kind that we cannot run.

    Arrays that it needs and that have another type are refused.
    """
    tokenizer, found = _read(keys, path), vocabulary(keys)
    if tokenizer is not None:
        tokenizer.origin = origin(path)
        tokenizer.lengths = dict(found.lengths) if found is not None else {}
    return tokenizer


def _read(keys: Mapping[str, Value], path: Path) -> Tokenizer | None:
    model = _text(keys, f"{T}model")
    for key, kind in (ARRAYS | OWN_ARRAYS).items():
        value = keys.get(key)
        kinds = (kind, Kind.I32) if key == f"{T}scores" else (kind,)
        read = model == "gpt2" or key != f"{T}merges"
        if read and value is not None and (value.kind != Kind.ARRAY or value.element not in kinds):
            found = value.element if value.kind == Kind.ARRAY else value.kind
            raise FormatError(
                f"{key} has the wrong type",
                path=path,
                at=f"key {key}",
                expected=f"array of {kind.name.lower()}",
                got=found.name.lower() if found is not None else "nothing",
            )
    tokens = _array(keys, "tokens")
    if NANOEULER in keys:
        return NanoeulerBPE.from_flat(keys[NANOEULER].value)
    if tokens is None:
        return None
    common: dict[str, Any] = {
        "types": _array(keys, "token_type"),
        "ids": {role: i for role, i in _ids(keys).items() if keys[ID_KEYS[role]] != keys.get(STAND_IN + role)},
        "add_bos": _flag(keys, f"{T}add_bos_token"),
        "add_eos": _flag(keys, f"{T}add_eos_token"),
        "chat_template": _text(keys, "tokenizer.chat_template"),
    }
    if CHARS_BOS in keys or f"{CHARS_BOS}.none" in keys:
        bos = keys[CHARS_BOS].value if CHARS_BOS in keys and _is_integer(keys[CHARS_BOS]) else None
        return CharTokenizer([unescaped(t) for t in tokens], bos)
    if model == "gpt2":
        return ByteBPE(tokens, _array(keys, "merges"), pre=_text(keys, f"{T}pre") or "", **common)
    if model == "llama":
        flags: dict[str, Any] = {n: _flag(keys, f"{T}{n}") for n in ("add_space_prefix", "remove_extra_whitespaces")}
        return SPM(tokens, _array(keys, "scores"), **common, **{n: v for n, v in flags.items() if v is not None})
    return None


def origin(path: Path) -> Origin:
    """How faults of a GGUF's vocabulary are told."""
    return Origin(path, NAMES, MENDS, c_strings=True)


def vocabulary(keys: Mapping[str, Value]) -> Vocabulary | None:
    """What the keys say of a vocabulary of any model; None where they hold no tokens."""
    tokens, merges = keys.get(f"{T}tokens"), keys.get(f"{T}merges")
    if tokens is None or tokens.element != Kind.STRING:
        return None
    arrays = {name: keys[T + name] for name in ("token_type", "scores") if T + name in keys}
    lengths = {name: len(value.value) for name, value in arrays.items() if value.kind == Kind.ARRAY}
    read = _text(keys, f"{T}model") in WITH_MERGES and merges is not None and merges.element == Kind.STRING
    return Vocabulary(tokens.value, merges.value if merges and read else None, _ids(keys), lengths, c_strings=True)


def check_vocabulary(keys: Mapping[str, Value], path: Path) -> None:
    """Raise FormatError for the first fault of the vocabulary that the keys hold."""
    found = vocabulary(keys)
    if found is not None:
        refuse(found, origin(path))


def _ids(keys: Mapping[str, Value]) -> dict[str, int]:
    """Role -> id, as stored."""
    found = {role: keys[key] for role, key in ID_KEYS.items() if key in keys}
    return {role: int(value.value) for role, value in found.items() if _is_integer(value)}


def _array(keys: Mapping[str, Value], name: str) -> Any:
    value = keys.get(T + name)
    return None if value is None else value.value


def _flag(keys: Mapping[str, Value], key: str) -> bool | None:
    value = keys.get(key)
    return bool(value.value) if value is not None and value.kind == Kind.BOOL else None


def _text(keys: Mapping[str, Value], key: str) -> str | None:
    value = keys.get(key)
    return value.value if value is not None and value.kind == Kind.STRING else None


def _is_integer(value: Value) -> bool:
    return value.kind not in (Kind.F32, Kind.F64, Kind.STRING, Kind.ARRAY, Kind.BOOL)


def stand_ins(tokenizer: Tokenizer) -> dict[str, int]:
    """Role -> id written for a BOS or EOS that the vocabulary does not name and for which llama.cpp would take id 11.

    It is the other one of the two, or else the token of byte 0, which no text holds.
    """
    if tokenizer.model != "gpt2" or isinstance(tokenizer, CharTokenizer) or tokenizer.vocab_size <= DEFAULT_ID:
        return {}
    known = {role: tokenizer.ids[role] for role in ("bos", "eos") if role in tokenizer.ids}
    try:
        instead = next(iter(known.values())) if known else tokenizer.byte_ids(b"\0")[0]
    except UnsupportedError:
        instead = 0
    without = () if tokenizer.pre not in WITHOUT_BOS else ("bos",)
    return {role: instead for role in ("bos", "eos") if role not in known and role not in without}


def notes(tokenizer: Tokenizer) -> list[str]:
    """What a GGUF cannot say of a tokenizer, and what stands in its place."""
    found = [
        f"the vocabulary names no {role.upper()}: token {i} stands in, or llama.cpp would take {DEFAULT_ID}"
        for role, i in stand_ins(tokenizer).items()
    ]
    return [*found, *(gguf_vocabulary(tokenizer).notes if isinstance(tokenizer, NanoeulerBPE) else ())]


def keys(tokenizer: Tokenizer) -> dict[str, Value]:
    """The keys for a tokenizer, complete: llama.cpp takes id 11 for a BOS or EOS that is not named."""
    if not tokenizer.model:
        raise UnsupportedError(
            "GGUF has no name for this tokenizer", expected="byte-level BPE, SPM or characters", got=tokenizer.kind
        )
    strings: Strings
    merges: Strings | None = None
    pre, extra = tokenizer.pre, {}
    ids = dict(tokenizer.ids)
    types = tokenizer.types
    if isinstance(tokenizer, NanoeulerBPE):
        vocabulary = gguf_vocabulary(tokenizer)
        strings, merges, pre = vocabulary.tokens, vocabulary.merges, vocabulary.pre
        extra[NANOEULER] = Value(Kind.ARRAY, vocabulary.pairs, Kind.I32)
    elif isinstance(tokenizer, CharTokenizer):
        strings, bos = Strings.of(map(escaped, tokenizer.tokens)), tokenizer.bos
        extra |= {f"{CHARS_BOS}.none": Value(Kind.BOOL, True)} if bos is None else {CHARS_BOS: Value(Kind.U32, bos)}
    elif isinstance(tokenizer, ByteBPE):
        strings, merges = tokenizer.token_texts(), tokenizer.merge_texts()
    else:
        strings = tokenizer.tokens
    n = len(strings)
    found = {
        f"{T}model": Value(Kind.STRING, "rwkv" if isinstance(tokenizer, CharTokenizer) else tokenizer.model),
        f"{T}pre": Value(Kind.STRING, pre),
        f"{T}tokens": Value(Kind.ARRAY, strings, Kind.STRING),
        f"{T}token_type": Value(Kind.ARRAY, np.ones(n, np.int32) if types is None else types[:n], Kind.I32),
    }
    if not pre:
        del found[f"{T}pre"]
    if merges is not None:
        found[f"{T}merges"] = Value(Kind.ARRAY, merges, Kind.STRING)
    if isinstance(tokenizer, SPM):
        found[f"{T}scores"] = Value(Kind.ARRAY, tokenizer.scores, Kind.F32)
        found[f"{T}add_space_prefix"] = Value(Kind.BOOL, tokenizer.add_space_prefix)
        found[f"{T}remove_extra_whitespaces"] = Value(Kind.BOOL, tokenizer.remove_extra_whitespaces)
    for role, i in stand_ins(tokenizer).items():
        ids[role] = i
        extra[STAND_IN + role] = Value(Kind.U32, i)
    found |= {ID_KEYS[role]: Value(Kind.U32, i) for role, i in ids.items() if role in ID_KEYS}
    found[f"{T}add_bos_token"] = Value(Kind.BOOL, tokenizer.add_bos)
    found[f"{T}add_eos_token"] = Value(Kind.BOOL, tokenizer.add_eos)
    if tokenizer.chat_template:
        found["tokenizer.chat_template"] = Value(Kind.STRING, tokenizer.chat_template)
    return found | extra


def escaped(data: bytes) -> bytes:
    """A token as model "rwkv" writes it: printable ASCII as it is, other bytes as \\xHH."""
    return b"".join(bytes([c]) if 33 <= c < 127 and c != 92 else b"\\x%02x" % c for c in data)


def unescaped(text: bytes) -> bytes:
    """The bytes of a token that `escaped` wrote."""
    return re.sub(rb"\\x([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), text)

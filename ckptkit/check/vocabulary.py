"""The tokenizer's keys: what llama.cpp refuses, and what it silently takes for something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..formats.gguf_io import Kind, Value
from ..formats.gguf_keys import text
from ..formats.gguf_known import ARRAYS, ID_KEYS, WITH_MERGES, T
from ..tokenizer import TokenType
from ..tokenizer.faults import Vocabulary, faults
from ..tokenizer.pre import ELSEWHERE, PRES, WITHOUT_BOS, WITHOUT_MERGES
from .finding import Finding, finding


@dataclass(frozen=True)
class Model:
    """What llama.cpp does with a `tokenizer.ggml.model`: the ids it takes for roles without a key, and what it reads.

    `pre`: the rule that cuts text is read. `silent`: arrays whose absence changes ids.
    """

    ids: Mapping[str, int]
    pre: bool = False
    silent: tuple[str, ...] = ()


MODELS: Mapping[str, Model] = {
    "gpt2": Model({"bos": 11, "eos": 11}, pre=True, silent=("token_type",)),
    "hybriddna": Model({"bos": 11, "eos": 11}, pre=True),
    "whitespace": Model({"bos": 11, "eos": 11}, pre=True),
    "gemma4": Model({}),
    "llama": Model({"bos": 1, "eos": 2, "unk": 0}, silent=("token_type", "scores")),
    "bert": Model({"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}),
    "t5": Model({"eos": 1, "unk": 2, "pad": 0}),
    "rwkv": Model({}),
    "plamo2": Model({"bos": 1, "eos": 2, "unk": 0, "pad": 3}),
}
NO_VOCABULARY = ("none", "no_vocab")
SILENT = {
    "token_type": "every token counts as text: special tokens are not found in a prompt",
    "scores": "every piece has score 0: text is cut into other tokens",
}
KINDS = {f"{T}scores": (Kind.F32, Kind.I32)}  # where llama.cpp takes more than one
PADDING = re.compile(rb"\[PAD\d+\]")
# kind of fault -> what llama.cpp does; what mends it, and whether --fix can
AGAIN = "export the tokenizer again; ckptkit convert refuses it as it is"
FAULTS: Mapping[str, tuple[str, str, bool]] = {
    "equal": ("llama.cpp stops the whole process: its table of tokens is too short", AGAIN, False),
    "empty": ("llama.cpp gives the token a name of its own; ckptkit convert refuses it", "write that name", True),
    "merge": ("the merge never happens", AGAIN, False),
    "unknown": ("the merge never happens", AGAIN, False),
}


def check(keys: Mapping[str, Value]) -> Iterator[Finding]:
    """Everything about the vocabulary that the keys alone show."""
    name = text(keys, f"{T}model")
    if not name:
        yield finding("tokenizer-missing", f"key {T}model", "the file has no tokenizer", "llama.cpp refuses",
                      "convert with --tokenizer FILE")  # fmt: skip
        return
    if name in NO_VOCABULARY:
        yield finding("no-vocabulary", f"key {T}model", "the file has no vocabulary",
                      "llama.cpp loads it and stops the process at the first prompt: it has no text to read or write",
                      "convert with --tokenizer FILE")  # fmt: skip
        return
    model = MODELS.get(name)
    if model is None:
        yield finding("tokenizer-unknown", f"key {T}model", f"tokenizer {name[:40]} is not known",
                      "llama.cpp refuses: unknown tokenizer", "convert with --tokenizer FILE")  # fmt: skip
        return
    arrays = {}
    for key, kind in (ARRAYS | {f"{T}suppress_tokens": Kind.I32}).items():
        value = keys.get(key)
        if value is None or (key == f"{T}merges" and name not in WITH_MERGES):  # nothing reads them then
            continue
        if value.kind == Kind.ARRAY and value.element in KINDS.get(key, (kind,)):
            arrays[key.removeprefix(T)] = value.value
        else:
            yield finding("tokenizer-array", f"key {key}", f"{key} is no array of {kind.name.lower()}",
                          "llama.cpp refuses: invalid gguf type", "export the tokenizer again")  # fmt: skip
    if f"{T}tokens" not in keys:
        yield finding("tokens-missing", f"key {T}tokens", "the tokens are missing", "llama.cpp refuses",
                      "convert with --tokenizer FILE")  # fmt: skip
    tokens = arrays.get("tokens")
    if tokens is None:
        return
    yield from _lengths(keys, arrays, model)
    yield from _bytes(arrays, name)
    yield from _bpe(keys, name, model)
    yield from _ids(keys, tokens, model)
    for fault in islice(faults(Vocabulary(tokens, arrays.get("merges"), c_strings=True)), 20):
        yield finding(f"vocabulary-{fault.kind}", f"key {T}{fault.part}", str(fault), *FAULTS[fault.kind])
    padding = [i for i, token in enumerate(tokens) if PADDING.fullmatch(token)]
    if padding:
        yield finding("padding-rows", f"token {padding[0]}", f"{len(padding):,} tokens are padding ([PADn])",
                      "they take part in sampling; a row of zeros has logit 0, which can beat every real token",
                      "convert again from the source, which leaves them out")  # fmt: skip


def _lengths(keys: Mapping[str, Value], arrays: Mapping[str, Any], model: Model) -> Iterator[Finding]:
    n = len(arrays["tokens"])
    for name, effect in SILENT.items():
        found = len(arrays[name]) if name in arrays else n
        said = (f"key {T}{name}", f"{found:,} entries for {n:,} tokens")
        if found < n:
            yield finding("array-length", *said, "llama.cpp refuses", "export the tokenizer again")
        if found > n:
            yield finding("array-longer", *said, "the rest is left unread", "leave the rest out", True)
        if f"{T}{name}" not in keys and name in model.silent:
            yield finding(f"{name}-missing", f"key {T}{name}", f"{T}{name} is missing", effect,
                          "convert with --tokenizer FILE")  # fmt: skip


def _bytes(arrays: Mapping[str, Any], model: str) -> Iterator[Finding]:
    """llama.cpp takes the two digits behind the third character of every byte token of an SPM vocabulary."""
    types, tokens = arrays.get("token_type"), arrays["tokens"]
    if model != "llama" or types is None or len(types) < len(tokens):
        return
    for i in np.flatnonzero(types[: len(tokens)] == TokenType.BYTE).tolist():
        if 0 < len(tokens[i].partition(b"\0")[0]) < 3:  # an empty one has a longer name
            yield finding("byte-token", f"token {i:,}", f"a byte is written {tokens[i]!r} and not as <0x0A>",
                          "llama.cpp refuses: basic_string::substr", "export the tokenizer again")  # fmt: skip
            return


def _bpe(keys: Mapping[str, Value], name: str, model: Model) -> Iterator[Finding]:
    pre = text(keys, f"{T}pre")
    if not model.pre:
        pass
    elif not pre and keys.get(f"{T}pre", Value(Kind.STRING, "")).kind == Kind.STRING:
        yield finding("pre-missing", f"key {T}pre", "the rule by which text is cut is not named",
                      "llama.cpp takes its rule \"default\", which cuts numbers and punctuation in other places",
                      f"convert with --set {T}pre=gpt-2 (or qwen2, llama-bpe: what it was trained with)")  # fmt: skip
    elif pre and pre not in PRES and pre not in ELSEWHERE:
        yield finding("pre-unknown", f"key {T}pre", f"the rule {pre[:40]!r} is not known",
                      "llama.cpp refuses: unknown pre-tokenizer type",
                      f"convert with --set {T}pre=gpt-2, or the rule it was trained with")  # fmt: skip
    if name in WITH_MERGES and f"{T}merges" not in keys and pre not in WITHOUT_MERGES:
        yield finding("merges-missing", f"key {T}merges", "the merges are missing",
                      "llama.cpp refuses: cannot find tokenizer merges in model file",
                      "they are rebuilt from the order of the tokens", True)  # fmt: skip


def _ids(keys: Mapping[str, Value], tokens: Any, model: Model) -> Iterator[Finding]:
    n = len(tokens)
    absent = ("bos",) if text(keys, f"{T}pre") in WITHOUT_BOS and model.pre else ()
    ids = {role: i for role, i in model.ids.items() if i < n and role not in absent}
    for role, key in ID_KEYS.items():
        value = keys.get(key)
        if value is None:
            if model.pre and role in ids:
                shown = tokens[ids[role]].decode("utf-8", "replace")
                yield finding(f"{role}-default", f"key {key}", f"{role} is not named",
                              f"llama.cpp takes token {ids[role]} ({shown!r})",
                              f"convert with --set {key}=ID")  # fmt: skip
        elif value.kind == Kind.U32 and value.value >= n:
            yield finding("id-range", f"key {key}", f"{role} is {value.value:,} of {n:,} tokens",
                          "llama.cpp warns and takes its default",
                          f"convert with --set {key}=ID, or remove the key", True)  # fmt: skip
        elif value.kind == Kind.U32:
            ids[role] = value.value
    for role in ("bos", "eos"):
        flag = keys.get(f"{T}add_{role}_token")
        if flag is not None and flag.kind == Kind.BOOL and flag.value and role not in ids and model.pre:
            yield finding(f"{role}-absent", f"key {T}add_{role}_token",
                          f"{role} is to be added, and there is none",
                          "llama.cpp loads it and stops the process at the first text",
                          f"convert with --set {ID_KEYS[role]}=ID, or --set {T}add_{role}_token=false")  # fmt: skip

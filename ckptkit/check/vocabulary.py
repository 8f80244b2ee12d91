"""The tokenizer's keys: what llama.cpp refuses, and what it silently takes for something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from ..formats.gguf_io import Kind, Value
from ..formats.gguf_keys import text
from ..formats.gguf_tokenizer import ARRAYS, ID_KEYS, T
from ..tokenizer.faults import faults
from ..tokenizer.pre import PRES
from .finding import ERROR, WARNING, Finding

MODELS = ("gpt2", "llama", "bert", "t5", "rwkv", "ugm", "plamo2", "none", "no_vocab", "gemma4", "hybriddna")
PADDING = re.compile(rb"\[PAD\d+\]")
FAULTS: Mapping[str, tuple[str, str]] = {
    "equal": (ERROR, "llama.cpp stops the whole process: its table of tokens is too short"),
    "empty": (WARNING, "llama.cpp gives the token a name of its own"),
    "merge": (WARNING, "the merge never happens"),
    "unknown": (WARNING, "the merge never happens"),
}


def check(keys: Mapping[str, Value]) -> Iterator[Finding]:
    """Everything about the vocabulary that the keys alone show."""
    model = text(keys, f"{T}model")
    if not model:
        yield Finding(ERROR, "tokenizer-missing", f"key {T}model", "the file has no tokenizer", "llama.cpp refuses",
                      "convert with --tokenizer FILE")  # fmt: skip
        return
    if model not in MODELS:
        yield Finding(ERROR, "tokenizer-unknown", f"key {T}model", f"tokenizer {model[:40]} is not known",
                      "llama.cpp refuses: unknown tokenizer", "convert with --tokenizer FILE")  # fmt: skip
        return
    if model in ("none", "no_vocab"):
        yield Finding(ERROR, "no-vocabulary", f"key {T}model", "the file has no vocabulary",
                      "llama.cpp's server refuses: it has no text to read or write",
                      "convert with --tokenizer FILE")  # fmt: skip
        return
    arrays = {k.removeprefix(T): keys[k].value for k, kind in ARRAYS.items() if k in keys and keys[k].element == kind}
    for key, kind in ARRAYS.items():
        if key in keys and keys[key].element != kind:
            yield Finding(ERROR, "key-type", f"key {key}", f"{key} is no array of {kind.name.lower()}",
                          "llama.cpp refuses, or reads other values", "export the tokenizer again")  # fmt: skip
    tokens = arrays.get("tokens")
    if tokens is None:
        if f"{T}tokens" not in keys:
            yield Finding(ERROR, "tokens-missing", f"key {T}tokens", "the tokens are missing", "llama.cpp refuses",
                          "convert with --tokenizer FILE")  # fmt: skip
        return
    for name in ("token_type", "scores"):
        if name in arrays and len(arrays[name]) != len(tokens):
            yield Finding(ERROR, "array-length", f"key {T}{name}",
                          f"{len(arrays[name]):,} entries for {len(tokens):,} tokens",
                          "llama.cpp refuses, or reads beyond the end", "export the tokenizer again")  # fmt: skip
    for name, needed, effect in (
        ("token_type", ("gpt2", "llama"), "every token counts as text: special tokens are not found in a prompt"),
        ("scores", ("llama",), "every piece has score 0: text is cut into other tokens"),
    ):
        if f"{T}{name}" not in keys and model in needed:
            yield Finding(WARNING, f"{name}-missing", f"key {T}{name}", f"{T}{name} is missing", effect,
                          "convert with --tokenizer FILE")  # fmt: skip
    if model == "gpt2":
        yield from _bpe(keys, arrays)
    yield from _ids(keys, len(tokens), model)
    merges = arrays.get("merges") if model == "gpt2" else None
    for fault in islice(faults(tokens, merges), 20):
        severity, effect = FAULTS[fault.kind]
        yield Finding(severity, f"vocabulary-{fault.kind}", f"key {T}tokens", str(fault), effect,
                      "export the tokenizer again")  # fmt: skip
    padding = [i for i, token in enumerate(tokens) if PADDING.fullmatch(token)]
    if padding:
        yield Finding(WARNING, "padding-rows", f"token {padding[0]}", f"{len(padding):,} tokens are padding ([PADn])",
                      "they take part in sampling; a row of zeros has logit 0, which can beat every real token",
                      "convert again from the source, which leaves them out")  # fmt: skip


def _bpe(keys: Mapping[str, Value], arrays: Mapping[str, object]) -> Iterator[Finding]:
    pre = text(keys, f"{T}pre")
    if f"{T}pre" not in keys:
        yield Finding(WARNING, "pre-missing", f"key {T}pre", "the rule by which text is cut is not named",
                      "llama.cpp takes its rule \"default\", which cuts numbers and punctuation in other places",
                      f"convert with --set {T}pre=gpt-2 (or qwen2, llama-bpe: what it was trained with)")  # fmt: skip
    elif pre not in PRES:
        yield Finding(ERROR, "pre-unknown", f"key {T}pre", f"the rule {pre[:40]!r} is not known",
                      "llama.cpp refuses: unknown pre-tokenizer type",
                      f"convert with --set {T}pre=gpt-2, or the rule it was trained with")  # fmt: skip
    if "merges" not in arrays and f"{T}merges" not in keys:
        yield Finding(ERROR, "merges-missing", f"key {T}merges", "the merges are missing",
                      "llama.cpp refuses: cannot find tokenizer merges in model file",
                      "they are rebuilt from the order of the tokens", True)  # fmt: skip


def _ids(keys: Mapping[str, Value], n: int, model: str) -> Iterator[Finding]:
    for role, key in ID_KEYS.items():
        value = keys.get(key)
        if value is None:
            if model == "gpt2" and role in ("bos", "eos"):
                yield Finding(WARNING, f"{role}-default", f"key {key}", f"{role} is not named",
                              "llama.cpp takes token 11, a comma in GPT-2's vocabulary",
                              f"convert with --set {key}=ID")  # fmt: skip
        elif value.kind == Kind.U32 and value.value >= n:
            yield Finding(WARNING, "id-range", f"key {key}", f"{role} is {value.value:,} of {n:,} tokens",
                          "llama.cpp warns and takes its default", f"convert with --set {key}=ID")  # fmt: skip

"""Write tokenizer.json and tokenizer_config.json so that the `tokenizers` package gives the same ids.

Splitters are written as their patterns, special tokens as added tokens, SPM as BPE over U+2581 with byte fallback. What
tokenizer.json cannot say (nanoeuler's merges as ids) goes under a ckptkit_* key of tokenizer_config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..files import replacing
from ..tokenizer import ByteBPE, Strings, Tokenizer, TokenType
from ..tokenizer.chars import CharTokenizer
from ..tokenizer.hf import HFTokenizer
from ..tokenizer.nanoeuler_bpe import NanoeulerBPE, gguf_vocabulary
from ..tokenizer.pre import PATTERNS, lookup
from ..tokenizer.spm import SPACE, SPM
from .hf_pre import NANOEULER as NANOEULER_WORD
from .hf_pre import pre_tokenizer, regex

ROLES = {
    "bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token", "sep": "sep_token",
    "mask": "mask_token",
}  # fmt: skip
# null where there is none: a tokenizer class of transformers has its own default, and adds that to the vocabulary
STATED = ("bos_token", "eos_token", "unk_token", "pad_token")
NANOEULER = "ckptkit_nanoeuler_merges"  # key of tokenizer_config.json: ids of both sides of each merge, in turn
CHARS = "ckptkit_chars"  # key of tokenizer_config.json: one token for each character
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def write(tokenizer: Tokenizer, folder: Path) -> tuple[Path, ...]:
    """Write both files into `folder`; returns their paths. Raises UnsupportedError for two equal token texts."""
    files = {"tokenizer.json": tokenizer_json(tokenizer), "tokenizer_config.json": tokenizer_config(tokenizer)}
    for name, text in files.items():
        with replacing(folder / name) as out:
            out.write(text.encode("utf-8", "surrogatepass"))
    return tuple(folder / name for name in files)


def differs(tokenizer: Tokenizer, arch: str = "") -> tuple[str, ...]:
    """What transformers will do differently with the files in the directory of a model of `arch`, in sentences.

    Version 5 builds a Qwen2Tokenizer for every qwen2: of the files it takes vocabulary, merges and special tokens, and
    its own normaliser and splitter.
    """
    said = []
    if isinstance(tokenizer, NanoeulerBPE):
        said.append("transformers ends a word after 4,096 characters, nanoeuler after 4,096 bytes")
        renamed = gguf_vocabulary(tokenizer).renamed
        if renamed:
            said.append(f"transformers never produces {len(renamed)} tokens that spell the same as an earlier one")
    elif isinstance(tokenizer, SPM) and _ties(tokenizer):
        said.append("of pairs with the same score transformers joins the one listed first, llama.cpp the leftmost")
    elif isinstance(tokenizer, CharTokenizer):
        said.append("transformers drops characters outside the vocabulary, ckptkit refuses them")
    if arch == "qwen2" and not isinstance(tokenizer, CharTokenizer):
        if isinstance(tokenizer, ByteBPE) and lookup(tokenizer.pre).patterns == PATTERNS["qwen2"]:
            said.append("transformers 5 composes letters and their accents first (NFC), llama.cpp does not")
        else:
            said.append(
                "AutoTokenizer of transformers 5 cuts the text of every qwen2 by Qwen2's own rule, which gives other "
                "ids: PreTrainedTokenizerFast.from_pretrained reads the files"
            )
    return tuple(said)


def _ties(tokenizer: SPM) -> bool:
    """Whether two tokens that pairs are joined into have the same score."""
    joined = {m.replace(b" ", b"") for m in tokenizer.merge_texts()}
    scores = tokenizer.scores[[tokenizer.tokens.find(text) for text in joined]]
    return len(np.unique(scores)) < len(scores)


def tokenizer_config(tokenizer: Tokenizer) -> str:
    """The text of tokenizer_config.json."""
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    found |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    found |= dict.fromkeys(STATED)
    found |= {key: _text(tokenizer, tokenizer.ids[role]) for role, key in ROLES.items() if role in tokenizer.ids}
    if tokenizer.chat_template is not None:
        found["chat_template"] = tokenizer.chat_template
    if isinstance(tokenizer, NanoeulerBPE):
        found[NANOEULER] = np.stack(tokenizer.merges(), 1).reshape(-1).tolist()
    if isinstance(tokenizer, CharTokenizer):
        found[CHARS] = {"bos": tokenizer.bos, "bytes": _all_bytes(tokenizer)}
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of tokenizer.json."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.json
    decoder: dict[str, Any] = BYTE_LEVEL
    cut: dict[str, Any] | None
    normalizer: dict[str, Any] | None = None
    more: dict[str, Any] = {}
    if isinstance(tokenizer, SPM):
        tokens, merges, cut = tokenizer.tokens, tokenizer.merge_texts(), None
        normalizer, decoder = _space_normalizer(tokenizer), _space_decoder(tokenizer)
        more = {"byte_fallback": True, "fuse_unk": True}
        if "unk" in tokenizer.ids:
            more["unk_token"] = _text(tokenizer, tokenizer.ids["unk"])
    elif isinstance(tokenizer, NanoeulerBPE):
        vocabulary = gguf_vocabulary(tokenizer)
        tokens, merges, cut = vocabulary.tokens, vocabulary.merges, pre_tokenizer((NANOEULER_WORD,))
    elif isinstance(tokenizer, CharTokenizer):
        in_bytes = _all_bytes(tokenizer)
        tokens = tokenizer.alphabet_texts() if in_bytes else tokenizer.tokens
        merges, cut = Strings.of(()), pre_tokenizer(()) if in_bytes else None
        decoder = BYTE_LEVEL if in_bytes else {"type": "Fuse"}
    elif isinstance(tokenizer, ByteBPE):
        tokens, merges = tokenizer.token_texts(), tokenizer.merge_texts()
        cut = pre_tokenizer(tuple(map(regex, lookup(tokenizer.pre).patterns)))
        more = {"ignore_merges": tokenizer.ignore_merges}
    else:
        raise UnsupportedError("tokenizer.json has no place for this tokenizer", got=tokenizer.kind)
    found = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(tokenizer, i) for i in special_ids(tokenizer)],
        "normalizer": normalizer,
        "pre_tokenizer": cut,
        "post_processor": _post_processor(tokenizer),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **more,
            "vocab": _vocabulary(tokens),
            "merges": [m.decode("utf-8", "replace").split(" ") for m in merges],
        },
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _vocabulary(tokens: Strings) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for i, data in enumerate(tokens):
        text = data.decode("utf-8", "replace")
        if vocabulary.setdefault(text, i) != i:
            raise UnsupportedError(
                "two tokens are written the same", at=f"tokens {vocabulary[text]:,} and {i:,}", got=repr(text)
            )
    return vocabulary


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that are cut out of a text before merging."""
    if tokenizer.types is None:
        return []
    wanted = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    return np.flatnonzero(np.isin(tokenizer.types[: tokenizer.vocab_size], wanted)).tolist()


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.tokens[id].decode("utf-8", "replace") if len(tokenizer.tokens) else ""


def _added(tokenizer: Tokenizer, id: int) -> dict[str, Any]:
    return {
        "id": id,
        "content": _text(tokenizer, id),
        "single_word": False,
        "lstrip": id in tokenizer.lstrip,
        "rstrip": id in tokenizer.rstrip,
        "normalized": False,
        "special": tokenizer.types is not None and int(tokenizer.types[id]) != TokenType.USER_DEFINED,
    }


def _post_processor(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """BOS and EOS around a text, where the vocabulary asks for them."""
    ends = [tokenizer.bos if tokenizer.add_bos else None, tokenizer.eos if tokenizer.add_eos else None]
    if ends == [None, None]:
        return None
    special = {i: _text(tokenizer, i) for i in ends if i is not None}

    def around(*sequences: str) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for k, name in enumerate(sequences):
            first, last = ({"SpecialToken": {"id": special[i], "type_id": k}} if i is not None else None for i in ends)
            middle = {"Sequence": {"id": name, "type_id": k}}
            out += [part for part in (first, middle, last) if part is not None]
        return out

    listed = {text: {"id": text, "ids": [i], "tokens": [text]} for i, text in special.items()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": listed}


def _space_normalizer(tokenizer: SPM) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if tokenizer.add_space_prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _space_decoder(tokenizer: SPM) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if tokenizer.add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _all_bytes(tokenizer: CharTokenizer) -> bool:
    """Whether every character is one byte."""
    return all(len(t) == 1 for i, t in enumerate(tokenizer.tokens) if i != tokenizer.bos)

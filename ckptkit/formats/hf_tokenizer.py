"""Hugging Face's tokenizer files: tokenizer.json, or vocab.json with merges.txt, and tokenizer_config.json beside them.

tokenizer.json ("version": "1.0") of the `tokenizers` package: "model" with vocab and merges ("a b" or ["a", "b"]),
"added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder". Byte-level BPE with a splitter that
llama.cpp has a name for becomes a ByteBPE, BPE over U+2581 with byte fallback an SPM; anything else is run by the
package as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import FormatError, blaming, brief
from ..tokenizer import ByteBPE, Strings, Tokenizer, TokenType
from ..tokenizer.chars import CharTokenizer
from ..tokenizer.faults import NO_ID, Origin
from ..tokenizer.hf import HFTokenizer
from ..tokenizer.nanoeuler_bpe import NanoeulerBPE
from ..tokenizer.spm import SPACE, SPM
from . import hf_config
from .hf_pre import recognise
from .hf_tokenizer_write import CHARS, NANOEULER, ROLES, differs, write

__all__ = ["differs", "read", "write"]

LIMIT = 1 << 28  # bytes of a file
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
DIGITS = re.compile("[0-9]{1,9}")
NAMED = {list: "list", dict: "object"}
Part = TypeVar("Part", list[Any], dict[str, Any])
GPT2_END = 50256  # transformers writes it as BOS and EOS of every gpt2, however small the vocabulary
MENDS = {"id": "correct {name} in config.json, or name the token in tokenizer_config.json"}


def read(path: Path) -> Tokenizer | None:
    """Read the tokenizer of a directory, or a tokenizer.json by any name. None where a directory has none."""
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json" if path.is_dir() else path
    config = _load(folder / "tokenizer_config.json")
    if file.is_file():
        with blaming(file):
            return _from_json(file, _load(file), config, folder)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_vocab(folder, config)
    if path.is_dir():
        return None
    raise FormatError("no such file", path=path)


def from_texts(path: Path, tokenizer: str, config: str) -> Tokenizer:
    """The tokenizer of the texts of tokenizer.json and tokenizer_config.json, which the file at `path` carries."""
    found, settings = (hf_config.parse(path, text.encode("utf-8", "surrogatepass")) for text in (tokenizer, config))
    made = _from_json(path, found, settings, path, tokenizer)  # no file lies in a file
    made.origin = Origin(path)
    return made


def _load(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one for a file that is not there."""
    return hf_config.load(path, LIMIT) if path.is_file() else {}


def _part(path: Path, found: Mapping[str, Any], key: str, kind: type[Part]) -> Part:
    """The list or object under a key; an empty one where there is none, or null."""
    value = found.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise FormatError(
            f"{key} is no {NAMED[kind]}", path=path, at=f"key {key}", expected=f"a JSON {NAMED[kind]}", got=brief(value)
        )
    return value


def _utf8(text: str) -> bytes:
    """The bytes of a text, lone surrogates included, which JSON can spell."""
    return text.encode("utf-8", "surrogatepass")


def _from_vocab(folder: Path, config: dict[str, Any]) -> Tokenizer:
    vocab = _load(folder / "vocab.json")
    try:
        lines = (folder / "merges.txt").read_bytes().decode().splitlines()
    except UnicodeDecodeError as e:
        raise FormatError("not UTF-8", path=folder / "merges.txt", offset=e.start) from e
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = _load(folder / "added_tokens.json")
    listed = [{"id": i, "content": text, "special": True} for text, i in _ids(added, folder / "added_tokens.json")]
    tokens, types, strips = _tokens(folder / "vocab.json", vocab, listed, config)
    tokenizer = ByteBPE(
        tokens,
        Strings.of(m.encode() for m in merges),
        pre="gpt-2",
        types=types,
        ids=_roles(folder, config, tokens),
        add_bos=config.get("add_bos_token") is True,
        add_eos=config.get("add_eos_token") is True,
        chat_template=_template(folder, config),
        notes=["vocab.json and merges.txt name no splitter: took GPT-2's"],
    )
    tokenizer.lstrip, tokenizer.rstrip = strips
    tokenizer.origin = Origin(folder / "vocab.json", mends=MENDS)
    return tokenizer


def _from_json(path: Path, found: dict[str, Any], config: dict[str, Any], folder: Path, text: str = "") -> Tokenizer:
    if not isinstance(found.get("model"), dict):
        raise FormatError("not a tokenizer.json", path=path, expected='an object with "model"', got=brief(found))
    model = found["model"]
    notes: list[str] = []
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # unigram: [text, score]
        if not all(isinstance(v, list) and v and isinstance(v[0], str) for v in vocab):
            raise FormatError("not a vocabulary", path=path, expected="pairs of a text and a score")
        vocab = {v[0]: i for i, v in enumerate(vocab)}
    added = _part(path, found, "added_tokens", list)
    tokens, types, strips = _tokens(path, vocab, added, config)
    common: dict[str, Any] = {
        "types": types,
        "ids": _roles(folder, config, tokens),
        "chat_template": _template(folder, config),
    }
    begins, ends = _template_ends(found.get("post_processor"))
    for role, name, flag in (("bos", begins, "add_bos"), ("eos", ends, "add_eos")):
        stored = config.get(f"{flag}_token")
        common[flag] = stored if isinstance(stored, bool) else bool(name)
        i = tokens.find(_utf8(name)) if name else -1
        if i >= 0:
            common["ids"].setdefault(role, i)
    if NANOEULER in config:
        return NanoeulerBPE.from_flat(_part(path, config, NANOEULER, list))
    pre = recognise(found.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    normalizers = list(_parts(found.get("normalizer"), "normalizers"))
    unknown = model.get("unk_token")
    i = tokens.find(_utf8(unknown)) if isinstance(unknown, str) else -1
    if i >= 0:
        types[i] = TokenType.UNKNOWN
    bpe = model.get("type", "BPE") == "BPE" and not any(
        model.get(k) for k in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    )
    tokenizer: Tokenizer
    if CHARS in config:
        chars = _part(path, config, CHARS, dict)
        bos = chars.get("bos")
        if bos is not None and type(bos) is not int:
            raise FormatError("bos is no id", path=path, at=f"key {CHARS}", expected="a number or null", got=brief(bos))
        if pre or chars.get("bytes"):
            return CharTokenizer.from_alphabet(tokens, bos)
        return CharTokenizer([b"" if k == bos else t for k, t in enumerate(tokens)], bos)
    if bpe and pre and pre != "nanoeuler" and all(n.get("type") in ("NFC", "NFKC", "NFD", "NFKD") for n in normalizers):
        notes += [f"Unicode normalisation ({n['type']}) is left out, as in llama.cpp" for n in normalizers]
        tokenizer = ByteBPE(tokens, _merges(path, model), pre=pre, notes=notes, **common)
        tokenizer.ignore_merges = bool(model.get("ignore_merges"))
    elif bpe and model.get("byte_fallback") and (prefix := _space_prefix(found, normalizers)) is not None:
        merges = _merges(path, model)
        if prefix and not normalizers:  # Metaspace
            notes.append(
                "a text that begins with a space gets one more in front, as in llama.cpp; transformers adds none"
            )
        tokenizer = SPM(tokens, None, merges=merges, add_space_prefix=prefix, notes=notes, **common)
    else:
        kind = f"{model.get('type')} with a splitter or normaliser that has no name here"
        notes.append(f"run by the tokenizers package as it is: {kind}")
        text = text or path.read_text("utf-8")
        tokenizer = HFTokenizer(
            tokens, text, byte_level="ByteLevel" in json.dumps(found.get("decoder")), notes=notes, **common
        )
    tokenizer.lstrip, tokenizer.rstrip = strips
    tokenizer.origin = Origin(path, mends=MENDS)
    return tokenizer


def _ids(found: Any, path: Path) -> Iterator[tuple[str, int]]:
    if not isinstance(found, dict):
        raise FormatError("not a vocabulary", path=path, expected="an object of texts and ids")
    for text, i in found.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise FormatError(
                "a token's id is no id", path=path, at=f"token {brief(text)}", expected="0 or more", got=brief(i)
            )
        yield text, i


def _tokens(
    path: Path, vocab: Any, added: list[Any], config: dict[str, Any]
) -> tuple[Strings, Any, tuple[frozenset[int], frozenset[int]]]:
    """Token texts by id, their types, and the ids that swallow whitespace before and after them."""
    text_of = {i: text for text, i in _ids(vocab, path)}
    if len(text_of) < len(vocab):
        raise FormatError("two tokens have the same id", path=path, got=f"{len(vocab):,} tokens, {len(text_of):,} ids")
    listed = [a for a in added if isinstance(a, dict)]
    decoder = _part(path, config, "added_tokens_decoder", dict)
    listed += [{**a, "id": int(i)} for i, a in decoder.items() if isinstance(a, dict) and DIGITS.fullmatch(i)]
    kinds: dict[int, TokenType] = {}
    left, right = set(), set()
    for a in listed:
        i, text = a.get("id"), a.get("content")
        if not isinstance(i, int) or isinstance(i, bool) or i < 0 or not isinstance(text, str) or not text:
            raise FormatError("an added token is damaged", path=path, at="added_tokens", got=brief(a))
        text_of[i] = text
        kinds[i] = TokenType.CONTROL if a.get("special", True) else TokenType.USER_DEFINED
        left |= {i} if a.get("lstrip") else set()
        right |= {i} if a.get("rstrip") else set()
    n = max(text_of, default=-1) + 1
    if n > 2 * len(text_of) + 65536:
        raise FormatError(
            "the ids have holes", path=path, expected=f"about {len(text_of):,} ids", got=f"one of {n - 1:,}"
        )
    types = np.full(n, TokenType.UNUSED, np.int32)
    types[list(text_of)] = TokenType.NORMAL
    for i, text in text_of.items():
        if BYTE.fullmatch(text):
            types[i] = TokenType.BYTE
    for i, kind in kinds.items():
        types[i] = kind
    texts = (text_of.get(i, f"[PAD{i}]") for i in range(n))
    return Strings.of(t.encode("utf-8", "surrogatepass") for t in texts), types, (frozenset(left), frozenset(right))


def _merges(path: Path, model: dict[str, Any]) -> Strings:
    lines = []
    for k, m in enumerate(_part(path, model, "merges", list)):
        if isinstance(m, list) and len(m) == 2 and all(isinstance(p, str) for p in m):
            m = " ".join(m)
        if not isinstance(m, str):
            raise FormatError("a merge is not two tokens", path=path, at=f"merge {k:,}", got=brief(m))
        lines.append(_utf8(m))
    return Strings.of(lines)


def _roles(folder: Path, config: dict[str, Any], tokens: Strings) -> dict[str, int]:
    """Ids of bos, eos and the others: by their texts in the tokenizer's config, else by id in the model's."""
    ids: dict[str, int] = {}
    for source in (config, _load(folder / "special_tokens_map.json")):
        for role, key in ROLES.items():
            text = source.get(key)
            text = text.get("content") if isinstance(text, dict) else text
            i = tokens.find(_utf8(text)) if isinstance(text, str) and text else -1
            if i >= 0:
                ids.setdefault(role, i)
    model = _load(folder / "config.json")
    none = {*NO_ID}
    if model.get("model_type") == "gpt2" and len(tokens) <= GPT2_END:
        none.add(GPT2_END)
    for role in ("bos", "eos", "pad"):
        given = model.get(f"{role}_token_id")
        given = given[0] if isinstance(given, list) and given else given
        if isinstance(given, int) and given not in none:
            ids.setdefault(role, given)
    return ids


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    beside = folder / "chat_template.jinja"
    if found is None and beside.is_file():
        found = beside.read_text("utf-8", "replace")
    return found if isinstance(found, str) else None


def _parts(found: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a component that may be a sequence."""
    if isinstance(found, dict):
        if found.get("type") == "Sequence":
            parts = found.get(inner)
            for part in parts if isinstance(parts, list) else ():
                yield from _parts(part, inner)
        else:
            yield found


def _template_ends(found: Any) -> tuple[str, str]:
    """Texts of the special tokens that the post-processor puts before and after a text; "" for none."""
    for part in _parts(found, "processors"):
        single = part.get("single")
        if part.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            special = (s.get("SpecialToken") if isinstance(s, dict) else None for s in (single[0], single[-1]))
            first, last = (str(s.get("id", "")) if isinstance(s, dict) else "" for s in special)
            return first, last
    return "", ""


def _space_prefix(found: dict[str, Any], normalizers: list[dict[str, Any]]) -> bool | None:
    """Whether a text gets a space in front; None where spaces are not written as U+2581."""
    steps = list(_parts(found.get("pre_tokenizer"), "pretokenizers"))
    if len(steps) == 1 and steps[0].get("type") == "Metaspace" and not normalizers:
        if steps[0].get("split") is not False or steps[0].get("replacement") != SPACE:
            return None
        return bool(steps[0].get("prepend_scheme", "always") != "never")
    kinds = [n.get("type") for n in normalizers]
    replaced = any(n.get("type") == "Replace" and n.get("content") == SPACE for n in normalizers)
    if steps or not replaced or not set(kinds) <= {"Prepend", "Replace"}:
        return None
    return "Prepend" in kinds

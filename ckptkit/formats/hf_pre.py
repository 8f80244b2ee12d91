r"""Pre-tokenizers of Hugging Face's tokenizer.json and the splitters of llama.cpp's names, both ways.

There a splitter is a list of regular expressions (Oniguruma's, with \p{L}); here it is a row of tokenizer/pre.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..tokenizer.nanoeuler_bpe import WORD
from ..tokenizer.pre import GPT2, PATTERNS, PRES, SETS

CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CASED_TOO = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
HEAD = r"[^\r\n\p{L}\p{N}]?"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATED = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# As the models' own files write them -> row of PATTERNS. Where a class is narrower than ours, llama.cpp's cut is taken.
ORIGINALS: Mapping[tuple[str, ...], str] = {
    (GPT2,): "gpt2",
    (GPT2.removesuffix(r"|\s+"),): "gpt2",
    (r"\p{N}", GPT2): "digits",
    (rf"{SHORT}|{HEAD}\p{{L}}+|\p{{N}}{{1,3}}|{PUNCTUATED}|{REST}",): "llama3",
    (rf"{SHORT}|{HEAD}\p{{L}}+|\p{{N}}|{PUNCTUATED}|{REST}",): "qwen2",
    (rf"{SHORT}|{HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{REST}",): "qwen35",
    (
        rf"{HEAD}{CASED}{SHORT}?|{HEAD}{CASED_TOO}{SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}",
    ): "gpt-4o",
    (rf"{HEAD}{CASED}|{HEAD}{CASED_TOO}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}",): "tekken",
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"): "deepseek-coder",
    (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", PATTERNS["deepseek-v3"][2]): "deepseek-v3",
}
NANOEULER = WORD.pattern.decode()


def regex(pattern: str) -> str:
    """A pattern of PATTERNS as Oniguruma takes it."""

    def item(m: re.Match[str]) -> str:
        name = m[1]
        if name in ("upper", "lower"):
            return r"[\p{L}&&[^a-z]]" if name == "upper" else r"[\p{L}&&[^A-Z]]"
        if name == "L-han":
            return rf"[\p{{L}}&&[^{_ranges('han')}]]"
        return _ranges(name) if name in SETS else m[0]

    return re.sub(r"\\p\{([^}]+)\}", item, pattern).replace(r"\Z", r"\z")


def _ranges(name: str) -> str:
    return "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in SETS[name].split())


def pre_tokenizer(patterns: tuple[str, ...]) -> dict[str, Any]:
    """The "pre_tokenizer" of tokenizer.json that cuts by these patterns (Oniguruma's) and then into bytes."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns
    ]
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_of]}


def recognise(found: Any, ignore_merges: bool) -> str | None:
    """The `pre` name of a byte-level "pre_tokenizer", "nanoeuler" for nanoeuler's, None for one that has no name."""
    steps = _flat(found)
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    patterns: list[str] = []
    for step in steps[:-1]:
        pattern = _pattern(step)
        if pattern is None:
            return None
        patterns.append(pattern)
    if steps[-1].get("use_regex", True):
        patterns.append(GPT2)
    if patterns == [NANOEULER]:
        return "nanoeuler"
    key = tuple(patterns)
    row = ORIGINALS.get(key)
    if row is None:
        row = next((r for r, ours in PATTERNS.items() if tuple(map(regex, ours)) == key), None)
    if not row:
        return None
    names = [n for n, pre in PRES.items() if pre.patterns == PATTERNS[row]]
    return next((n for n in names if PRES[n].ignore_merges == ignore_merges), names[0])


def _flat(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, dict):
        return []
    if found.get("type") == "Sequence":
        inner = found.get("pretokenizers")
        return [s for f in inner for s in _flat(f)] if isinstance(inner, list) else []
    return [found]


def _pattern(step: dict[str, Any]) -> str | None:
    """The regular expression of one step; None for a step that is not a cut at matches."""
    if step.get("type") == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    if step.get("type") != "Split" or not isinstance(step.get("pattern"), dict):
        return None
    pattern = step["pattern"].get("Regex")
    kept = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    return pattern if isinstance(pattern, str) and kept else None

r"""How text is cut into words before merging: a row for each name that `tokenizer.ggml.pre` can have (llama-vocab.cpp).

A row is a sequence of patterns; each cuts the pieces that the one before left, and what lies between two matches is a
piece of its own (THREES cut otherwise). Patterns are regular expressions over code points with these classes, which
split.py compiles: \s White_Space, \p{L} \p{N} \p{M} \p{P} \p{S} categories, \p{upper} letters but a-z, \p{lower}
letters but A-Z, \p{NAME} a set of SETS. Defaults of a row hold where the file has no key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UnsupportedError

APOSTROPHE = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
SPACES = r"\s+(?!\S)|\s+"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"


def _words(
    digits: str,
    *,
    first: str = f"(?:{APOSTROPHE})|",
    letters: str = r"[^\r\n\p{L}\p{N}]?\p{L}+",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    newlines: str = r"\s*[\r\n]+",
) -> str:
    """The pattern of the GPT-4 family; its members differ in how many digits stay together, and in details."""
    return f"{first}{letters}|{digits}|{symbols}|{newlines}|{SPACES}"


def _cased(digits: str, apostrophe: str, mark: str = "", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    """The pattern of the GPT-4o family: a word is capitals and then small letters."""
    upper, lower = (rf"[\p{{upper}}{mark}]", rf"[\p{{lower}}{mark}]")
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}{upper}*{lower}+{apostrophe}|{head}{upper}+{lower}*{apostrophe}|{digits}|{symbols}|\s*[\r\n]+|{SPACES}"
    )


DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|\s*[\r\n]+|{SPACES}"
)
AFTER = rf"(?:{APOSTROPHE})?"
NOT_SENTENCE = r" ?[^(\s|.,!?)\p{stops}]+"

# Runs of numbers cut into threes from their end, in one pass; a run's rest goes with what stands before it. After the
# second dot: which numbers; "before": a run of whole threes is cut off too, "behind": what follows a run is.
THREES = "threes."
THREES_BEFORE, THREES_BEHIND = rf"{THREES}before.[0-9]+", rf"{THREES}behind.\p{{N}}+"

PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt2": (GPT2,),
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "digits": (r"\p{N}", GPT2),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]"),
    "llama3": (_words(r"\p{N}{1,3}"),),
    "qwen2": (_words(r"\p{N}"),),
    "qwen35": (
        _words(
            r"\p{N}", letters=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        ),
    ),
    "jais2": (
        _words(r"\p{N}{1,3}").removesuffix(SPACES)
        + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"\s{1,2}(?!\S)|\s",
    ),
    "deepseek-llm": (r"[\r\n]", r"\s?[A-Za-z\p{latin}]+", r"\s?[!-/:-~\p{wide}]+", r"\s+\Z", r"[\p{east}]+", r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\p{east}]+", r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", r"[\p{cjk}]+", DEEPSEEK_WORDS),
    "spark": (r"\p{N}{1,3}", r"[\p{cjk}]+", DEEPSEEK_WORDS.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), r"\p{N}"),
    "youtu": (
        r"[\p{hangul}]+|[\p{marks}]+|[\p{bopomofo}]+|[\p{cjk}]+",
        _cased(r"\p{N}", AFTER, r"\p{M}").replace("upper", "L").replace("lower", "L"),
    ),
    "poro": (NOT_SENTENCE,),
    "viking": (NOT_SENTENCE, r"\p{N}"),
    "tekken": (_cased(r"\p{N}", ""),),
    "gpt-4o": (_cased(r"\p{N}{1,3}", AFTER),),
    "granite": (_cased(r"\p{N}{1,3}", AFTER, r"\p{M}"),),
    "kimi-k2": (
        _words(r"\p{N}{1,3}", first=r"[\p{han}]+|", letters=r"[^\r\n\p{L}\p{N}]?\p{L-han}+" + AFTER),
    ),
    "chameleon": (
        "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2,
    ),
    "bailingmoe": (
        _words(r"\p{N}", first=r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|", newlines=r"\s*[\r\n]"),
    ),
    "seed-coder": (_words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "ufakzeka": (_words(r"\p{N}", first=""),),
    "laguna": (r"\n+", _words(r"\p{N}")),
    "exaone-moe": (
        _words(
            r"\p{N}",
            letters=r"[^\r\n\p{L}\p{N}]?\p{L}[\p{L}\p{M}]*(?: \p{L}[\p{L}\p{M}]*)*",
            symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            newlines=r"\s*[\r\n]",
        ),
    ),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "superbpe": (r"\p{N}+", THREES_BEFORE),
    "afmoe": (THREES_BEHIND, r"[\p{asia}]+", DEEPSEEK_WORDS),
    "tiny_aya": (
        THREES_BEHIND,
        _cased(r"\p{N}{1,3}", AFTER, r"\p{M}").replace("upper", "L").replace("lower", "L"),
    ),
}  # fmt: skip

# Code points outside ASCII, in hexadecimal.
SETS: Mapping[str, str] = {
    "cjk": "3040-30ff 4e00-9fa5",
    "asia": "e40-eff 1000-109f 1100-11ff 1780-17ff 2f00-2fdf 3040-30ff 3400-4dbf 4e00-9fff a9e0-a9ff aa60-aa7f "
    "ac00-d7af f900-faff ff65-ff9f",
    "east": "800-9fa5 ac00-d7ff",
    "wide": "2018-201f 3000-3002 ff01-ff0f ff1a-ff5e",
    "stops": "60c 6d4 964 2026 3001-3002 ff0c",
    "hangul": "3131-318e ac00-d7a3",
    "marks": "2014 2018-2019 201c-201d 2026 3001-303f fe30-fe4f ff01 ff0c ff1a-ff1b",
    "bopomofo": "3105-312f",
    "han": "3400-4dbf 4e00-9fff f900-faff 20000-2a6df 2a700-2ebef 2f800-2fa1f",
    "latin": "b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d "
    "1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 "
    "2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e "
    "2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e "
    "ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 "
    "10cc0-10cf2 118a0-118df 1e900-1e943",
}


@dataclass(frozen=True)
class Pre:
    """A splitter and what goes with its name. `ignore_merges`: a word that is a token is taken whole."""

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False


def _rows() -> dict[str, Pre]:
    table: tuple[tuple[str, str, dict[str, bool]], ...] = (
        ("gpt2", "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt "
         "olmo jais trillion granite-docling jina-v1-en jina-v2-code roberta-bpe", {}),
        ("default", "default", {}),
        ("digits", "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", {}),
        ("falcon", "falcon", {}),
        ("llama3", "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
         {"add_bos": True, "ignore_merges": True}),
        ("llama3", "dbrx smaug-bpe chatglm-bpe", {}),
        ("llama3", "glm4 glm5", {"ignore_merges": True}),
        ("qwen2", "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", {}),
        ("qwen35", "qwen35", {}),
        ("jais2", "jais-2", {}),
        ("deepseek-llm", "deepseek-llm", {}),
        ("deepseek-coder", "deepseek-coder", {}),
        ("deepseek-v3", "deepseek-v3 hunyuan-dense joyai-llm hy_v4", {}),
        ("spark", "spark2_5", {}),
        ("youtu", "youtu", {"ignore_merges": True}),
        ("poro", "poro-chat bloom gpt3-finnish", {}),
        ("viking", "viking", {}),
        ("tekken", "tekken", {"add_bos": True, "ignore_merges": True}),
        ("gpt-4o", "gpt-4o llama4 kanana2 talkie minimax-m2", {}),
        ("granite", "granite-embed-multi-97m", {"ignore_merges": True}),
        ("kimi-k2", "kimi-k2", {}),
        ("chameleon", "chameleon", {"add_bos": True}),
        ("bailingmoe", "bailingmoe bailingmoe2 llada-moe", {}),
        ("seed-coder", "seed-coder", {}),
        ("ufakzeka", "ufakzeka", {}),
        ("laguna", "laguna", {}),
        ("exaone-moe", "exaone-moe", {}),
        ("minicpm5", "minicpm5", {"ignore_merges": True}),
        ("superbpe", "superbpe", {}),
        ("afmoe", "afmoe", {}),
        ("tiny_aya", "tiny_aya cohere2moe", {}),
    )  # fmt: skip
    return {name: Pre(PATTERNS[row], **defaults) for row, names, defaults in table for name in names.split()}


PRES: Mapping[str, Pre] = _rows()
WITHOUT_MERGES = frozenset(("kimi-k2",))  # llama.cpp loads these without merges
WITHOUT_BOS = frozenset(("chatglm-bpe", "glm4", "glm5"))  # and takes no BOS by default for these
# Names that llama.cpp knows and that work on something else than words of bytes.
ELSEWHERE = frozenset(("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"))


def lookup(name: str) -> Pre:
    """The splitter called `name`. Raises UnsupportedError for an unknown one, naming it."""
    if name in PRES:
        return PRES[name]
    raise UnsupportedError(
        f"pre-tokenizer {name!r} is not supported" if name in ELSEWHERE else f"unknown pre-tokenizer {name!r}",
        at="tokenizer.ggml.pre",
        expected="one of " + ", ".join(sorted(PRES)),
        hint="llama.cpp refuses a file with an unknown pre-tokenizer; name the one that was used in training",
    )

"""Token types, and the tokens that llama.cpp knows by their text (llama-vocab.cpp): ends, fill-in-the-middle.

In plain text only user-defined tokens are recognised; control tokens are recognised when the caller asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)  # stored as plain text, cut out before merging

HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)  # shown in text only on request

# Role -> texts that take it when no key names its id. A token found so is control, whatever its stored type says.
BY_TEXT: Mapping[str, tuple[str, ...]] = {
    "eot": (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
        "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip

# Texts that end a generation, besides eos, eot, eom and the fim_pad, fim_rep and fim_sep tokens.
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
ALWAYS_PARSED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # user-defined, whatever their type says

# Where "<|end|>" only ends a part of an answer: all texts of one of these are present.
END_IS_NOT_THE_END = (
    ("<|return|>", "<|call|>"),
    ("<|return|>", "<|calls|>"),
    ("<|call|>", "<|flush|>"),
    ("<|calls|>", "<|flush|>"),
)
S_IS_NOT_THE_END = ("<|tool_response>", "<|plamo:eos|>")  # where one is present, "</s>" is an ordinary token
# marks in chat templates around what a model is trained on: Hugging Face's, no part of the language
TRAINING = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

"""A prompt put into a model's chat template, and the texts that end its answers.

nanoeuler's chat models are trained on Alpaca's sentences with "</s>" as plain text after each answer; nothing in the
file says so, only its tokenizer gives it away. Other models carry a Jinja template, which is a program from the file:
it runs only when asked for, in a process of its own (template.py), in Jinja's sandbox, with bounded output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ..errors import UnsupportedError
from ..tokenizer import Tokenizer
from ..tokenizer.special import TRAINING
from . import template
from .template import MEMORY, SECONDS

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
STOP = "</s>"


def chat_prompt(tokenizer: Tokenizer | None, text: str, given: str = "") -> tuple[list[int], tuple[str, ...]]:
    """Ids of a message in the model's template, and the stop strings of its answers; `given` is Alpaca's input."""
    if tokenizer is None:
        raise UnsupportedError("the model has no tokenizer", hint="give one with --tokenizer")
    if tokenizer.kind == "nanoeuler-bpe":
        filled = (ALPACA_INPUT if given else ALPACA).format(instruction=text, input=given)
        return tokenizer.encode(filled), (STOP,)
    if given:
        raise UnsupportedError("only Alpaca's template has a place for an input", at="--chat-input", got=given)
    if not tokenizer.chat_template:
        raise UnsupportedError("the model has no chat template", hint="leave --chat out and write the prompt in full")
    return tokenizer.encode(render(tokenizer, text), special=True), ()


def render(tokenizer: Tokenizer, text: str) -> str:
    """The template's text for one user message and the beginning of the answer."""

    def texts(role: str) -> str:
        i = tokenizer.ids.get(role)
        return "" if i is None else tokenizer.token_bytes(i).decode("utf-8", "replace")

    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "add_generation_prompt": True,
        "bos_token": texts("bos"),
        "eos_token": texts("eos"),
    }
    asked = json.dumps({"template": TRAINING.sub("", tokenizer.chat_template or ""), "values": values})
    try:
        done = subprocess.run(
            [sys.executable, "-P", template.__file__], input=asked.encode(), capture_output=True, timeout=4 * SECONDS,
            check=True,
        )  # fmt: skip
        answer: dict[str, str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):  # the system ended it
        answer = {"error": f"more than {SECONDS} s or {MEMORY:,} bytes"}
    if "error" in answer:
        raise UnsupportedError(
            "the chat template failed", at="chat template", got=answer["error"], hint="write the prompt in full"
        )
    return answer["text"]

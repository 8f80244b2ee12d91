"""A prompt put into a model's chat template, and the texts that end its answers.

nanoeuler's chat models are trained on Alpaca's sentences with "</s>" as plain text after each answer; nothing in the
file says so, only its tokenizer gives it away. Other models carry a Jinja template, which is a program from the file:
it runs only when asked for, in Jinja's sandbox, with bounded output.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from ..tokenizer import Tokenizer

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
LONGEST = 1 << 20  # characters that a template may make of one message
LOOPS = 10_000  # values that one range() in a template may have; Jinja's own limit is ten times that


def chat_prompt(tokenizer: Tokenizer | None, text: str, given: str = "") -> tuple[list[int], tuple[str, ...]]:
    """Ids of a message in the model's template, and the stop strings of its answers; `given` is Alpaca's input."""
    if tokenizer is None:
        raise UnsupportedError("the model has no tokenizer", hint="give one with --tokenizer")
    if tokenizer.kind == "nanoeuler-bpe":
        filled = (ALPACA_INPUT if given else ALPACA).format(instruction=text, input=given)
        return tokenizer.encode(filled), (STOP,)
    if not tokenizer.chat_template:
        raise UnsupportedError("the model has no chat template", hint="leave --chat out and write the prompt in full")
    return tokenizer.encode(render(tokenizer, text), special=True), ()


def render(tokenizer: Tokenizer, text: str) -> str:
    """The template's text for one user message and the beginning of the answer."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def texts(role: str) -> str:
        i = tokenizer.ids.get(role)
        return "" if i is None else tokenizer.token_bytes(i).decode("utf-8", "replace")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals = {"raise_exception": refuse, "range": _range}
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "add_generation_prompt": True,
        "bos_token": texts("bos"),
        "eos_token": texts("eos"),
    }
    pieces, length = [], 0
    try:
        for piece in environment.from_string(tokenizer.chat_template or "").generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST:
                raise UnsupportedError(
                    "the chat template does not come to an end", expected=f"at most {LONGEST:,} characters"
                )
    except UnsupportedError:
        raise
    except Exception as e:  # whatever a program from a file can raise
        raise UnsupportedError(
            "the chat template failed", got=f"{type(e).__name__}: {e}", hint="write the prompt in full"
        ) from e
    return "".join(pieces)


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > LOOPS:
        raise UnsupportedError("the chat template counts too far", expected=f"at most {LOOPS:,}", got=f"{len(found):,}")
    return found

"""Text from a model: prefill, token after token, stop rules, timings."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..tokenizer import StopStrings, Utf8Stream
from ..tokenizer.special import HIDDEN
from .sampler import Sampler, Sampling

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True)
class Timings:
    """Seconds and rates of the two phases; the first picked token belongs to the prompt's phase."""

    prompt_tokens: int
    prompt_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Generation:
    """What was generated and why it stopped: "eos", "stop" (a reverse prompt), "length" (-n) or "context" (full)."""

    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    stop_reason: str
    timings: Timings

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        body = asdict(self)
        body["timings"] |= {"prompt_rate": self.timings.prompt_rate, "decode_rate": self.timings.decode_rate}
        return body


@dataclass(frozen=True)
class GenerateOptions:
    """`n_predict` -1: until a stop or a full context. `special`: show control tokens. `ignore_eos`: never pick one."""

    n_predict: int = -1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    special: bool = False
    left_pad: bool = False
    sampling: Sampling = field(default_factory=Sampling)


def generate(
    model: Model,
    ids: Sequence[int],
    options: GenerateOptions | None = None,
    emit: Callable[[str], object] | None = None,
) -> Generation:
    """Continue `ids`; `emit` hears pieces of text that end between characters and are no part of a stop string."""
    options = options or GenerateOptions()
    row = Collector(model, check_prompt(model, ids), options, emit)
    sampler = Sampler(without_eos(model, options))
    if options.left_pad:
        from .left_pad import windows

        stream = windows(model, row.prompt, sampler, options.n_predict)
    else:
        stream = _tokens(model, row, sampler)
    with closing(stream):
        for token in stream:
            row.take(token)
            if row.reason:
                break
    return row.finish()


def _tokens(model: Model, row: Collector, sampler: Sampler) -> Generator[int, None, None]:
    """Prefill, then picked ids, at most as many as the row may take."""
    if row.limit <= 0:
        return
    cache = model.new_cache(context=min(model.context, len(row.prompt) + row.limit))
    if row.limit > 1:
        model.prepare(cache, [sampler], len(row.prompt))
    logits = model.forward(row.prompt, cache, logits="last")
    token = sampler.pick(logits, row.history)
    yield token
    if row.limit > 1:
        yield from model.decode(cache, token, sampler, row.history)


def check_prompt(model: Model, ids: Sequence[int]) -> list[int]:
    """The prompt as ints; an error where it is empty, too long, or has ids that the vocabulary lacks."""
    prompt = [int(i) for i in ids]
    if not prompt:
        raise UnsupportedError("the prompt is empty", hint="give at least one token with -p, -f or --ids")
    wrong = [i for i in prompt if not 0 <= i < model.config.vocab_size]
    if wrong:
        raise UnsupportedError(
            "the prompt has ids outside the vocabulary", expected=f"0 to {model.config.vocab_size - 1:,}", got=wrong[0]
        )
    if len(prompt) > model.context:
        raise UnsupportedError(
            "the prompt is longer than the context",
            expected=f"at most {model.context:,} tokens",
            got=f"{len(prompt):,}",
            hint="shorten the prompt; -c raises the context where the positions are rotary",
        )
    return prompt


def without_eos(model: Model, options: GenerateOptions) -> Sampling:
    """The sampling, with ends of generation made impossible if they are to be ignored; biases are of tokens there."""
    s = options.sampling
    wrong = [i for i in s.logit_bias if not 0 <= i < model.config.vocab_size]
    if wrong:
        raise UnsupportedError(
            "a logit bias is for no token of the vocabulary",
            expected=f"an id from 0 to {model.config.vocab_size - 1:,}", got=wrong[0],
        )  # fmt: skip
    if not options.ignore_eos or model.tokenizer is None or not model.tokenizer.end_ids:
        return s
    return replace(s, logit_bias=s.logit_bias | dict.fromkeys(model.tokenizer.end_ids, float("-inf")))


class Collector:
    """One row of generation: takes tokens until a rule stops it, lets text out as far as no stop can begin in it."""

    def __init__(
        self,
        model: Model,
        prompt: list[int],
        options: GenerateOptions,
        emit: Callable[[str], object] | None = None,
    ) -> None:
        self.prompt, self.history, self.options, self.emit = prompt, list(prompt), options, emit
        self.tokenizer = model.tokenizer
        if self.tokenizer is not None:
            self.tokenizer.check_vocabulary()
        if options.stop and self.tokenizer is None:
            raise UnsupportedError("a reverse prompt needs a tokenizer", hint="give one with --tokenizer")
        # the last token picked need not be fed back; the padded window of --left-pad never fills up
        room = model.context - len(prompt) + 1
        if options.left_pad:
            room = max(options.n_predict, model.context)
        self.limit = room if options.n_predict < 0 else min(options.n_predict, room)
        self._ends = frozenset() if self.tokenizer is None or options.ignore_eos else self.tokenizer.end_ids
        self._utf8, self._stops = Utf8Stream(), StopStrings(options.stop)
        self._pieces: list[str] = []
        self._begin = self._first = self._last = perf_counter()
        self.reason = "" if self.limit > 0 else self._full()

    def _full(self) -> str:
        return "length" if 0 <= self.options.n_predict <= self.limit else "context"

    @property
    def ids(self) -> list[int]:
        """What was taken so far."""
        return self.history[len(self.prompt) :]

    def take(self, token: int) -> None:
        """One more token; sets `reason` when it was the last."""
        self._last = perf_counter()
        if len(self.history) == len(self.prompt):
            self._first = self._last
        self.history.append(token)
        if self.tokenizer is not None and (self.options.special or self.tokenizer.type_of(token) not in HIDDEN):
            self._out(self._stops.feed(self._utf8.feed(self.tokenizer.token_bytes(token))))
        if token in self._ends:
            self.reason = "eos"
        elif self._stops.found:
            self.reason = "stop"
        elif len(self.history) - len(self.prompt) >= self.limit:
            self.reason = self._full()

    def _out(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self.emit:
                self.emit(piece)

    def finish(self) -> Generation:
        """The result; text that was held back comes out."""
        if self.tokenizer is not None and not self._stops.found:
            self._out(self._stops.feed(self._utf8.flush()))
            if not self._stops.found:
                self._out(self._stops.flush())
        n = len(self.ids)
        first, last = (self._first, self._last) if n else (perf_counter(),) * 2  # what is freed after it is no decoding
        timings = Timings(len(self.prompt), first - self._begin, max(n - 1, 0), last - first)
        text = None if self.tokenizer is None else "".join(self._pieces)
        return Generation(self.prompt, self.ids, text, self.reason or "length", timings)

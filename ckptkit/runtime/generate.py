"""Text from a model: prefill, token after token, stop rules, timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..tokenizer import StopStrings, TokenType, Utf8Stream
from .sampler import Sampler, Sampling

if TYPE_CHECKING:
    from .model import Model

HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)  # shown only on request


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
    prompt = check_prompt(model, ids)
    if options.left_pad:
        from .left_pad import windows

        stream = windows(model, prompt, Sampler(_without_eos(model, options)), options.n_predict)
        room = options.n_predict if options.n_predict >= 0 else model.config.context_length
        return _collect(model, prompt, stream, options, emit, perf_counter(), room)
    context = model.context
    room = context - len(prompt) + 1  # the last token picked need not be fed back
    limit = room if options.n_predict < 0 else min(options.n_predict, room)
    sampler = Sampler(_without_eos(model, options))
    begin = perf_counter()
    cache = model.new_cache(context=min(context, len(prompt) + max(limit, 1)))
    logits = model.forward(prompt, cache, logits="last")
    stream = _tokens(model, cache, logits, sampler, prompt, limit)
    return _collect(model, prompt, stream, options, emit, begin, room)


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
            expected=f"at most {model.context:,} tokens", got=f"{len(prompt):,}",
            hint="shorten the prompt; -c raises the context where the positions are rotary",
        )  # fmt: skip
    return prompt


def _without_eos(model: Model, options: GenerateOptions) -> Sampling:
    """The sampling, with ends of generation made impossible if they are to be ignored."""
    s = options.sampling
    if not options.ignore_eos or model.tokenizer is None or not model.tokenizer.end_ids:
        return s
    bias = s.logit_bias | dict.fromkeys(model.tokenizer.end_ids, float("-inf"))
    return Sampling(**{**{k: getattr(s, k) for k in s.__dataclass_fields__}, "logit_bias": bias})


def _tokens(model: Model, cache: Any, logits: Any, sampler: Sampler, prompt: list[int], limit: int) -> Any:
    """Picked ids, at most `limit`; the history grows with them."""
    if limit <= 0:
        return
    history = list(prompt)
    token = sampler.pick(logits, history)
    history.append(token)
    yield token
    if limit > 1:
        for count, following in enumerate(model.decode(cache, token, sampler, history), 2):
            yield following
            if count >= limit:
                return


def _collect(
    model: Model, prompt: list[int], stream: Any, options: GenerateOptions, emit: Callable[[str], object] | None,
    begin: float, room: int,
) -> Generation:  # fmt: skip
    """Take tokens until a rule stops them; text goes out as far as no stop string can still begin in it."""
    tokenizer = model.tokenizer
    if options.stop and tokenizer is None:
        raise UnsupportedError("a reverse prompt needs a tokenizer", hint="give one with --tokenizer")
    ends = frozenset() if tokenizer is None or options.ignore_eos else tokenizer.end_ids
    utf8, stops = Utf8Stream(), StopStrings(options.stop)
    ids: list[int] = []
    pieces: list[str] = []
    reason = ""

    def out(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if emit:
                emit(piece)

    first = begin
    for token in stream:
        if not ids:
            first = perf_counter()
        ids.append(token)
        if token in ends:
            reason = "eos"
        if tokenizer is not None and (options.special or tokenizer.type_of(token) not in HIDDEN):
            out(stops.feed(utf8.feed(tokenizer.token_bytes(token))))
            if stops.found:
                reason = "stop"
        if reason:
            break
    end = perf_counter()
    if hasattr(stream, "close"):
        stream.close()
    if not reason:
        reason = "length" if 0 <= options.n_predict <= len(ids) else "context" if len(ids) >= room else "length"
    if tokenizer is not None and reason != "stop":
        out(stops.feed(utf8.flush()))
        if not stops.found:
            out(stops.flush())
    text = None if tokenizer is None else "".join(pieces)
    timings = Timings(len(prompt), (first if ids else end) - begin, max(len(ids) - 1, 0), end - first if ids else 0.0)
    return Generation(prompt, ids, text, reason, timings)

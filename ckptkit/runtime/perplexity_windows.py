"""How a text is cut into windows and which of its tokens are scored: one convention for each way people measure.

| mode   | windows                                 | scored                                | as                    |
|--------|-----------------------------------------|---------------------------------------|-----------------------|
| llama  | n_ctx ids, side by side; tail left out  | the second half, less the first of it | llama-perplexity      |
| full   | n_ctx ids, side by side, one id more    | all n_ctx next ids                    | llm.c validation loss |
| stride | n_ctx ids, each `stride` after the last | what no window before has scored      | Hugging Face's recipe |
| docs   | one document (a line of text) each      | all of it, the closing token included | microgpt              |

A convention needs of its ids only `len` and slicing, so a shard is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError

Ids = npt.NDArray[np.int32]


class IdSource(Protocol):
    """Ids that can be measured and sliced: an array, or a shard that stays in its file."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


@dataclass(frozen=True)
class Window:
    """Ids fed at positions 0, 1, ...; `targets[k]` is what should follow the id at position `first + k`.

    `start` is the place of the first target in the source (in docs: in its document).
    """

    ids: Ids  # (n,)
    first: int
    targets: Ids  # (n - first,)
    start: int


@dataclass(frozen=True)
class Convention:
    """A way to cut and score; `shortest` is the least n_ctx that scores anything."""

    need: Callable[[int], int]  # ids that a text must have for this n_ctx
    count: Callable[[int, int, int], int]  # windows for so many ids, n_ctx, stride
    window: Callable[[Any, int, int, int, int | None], Window]  # ids, number, n_ctx, stride, BOS to put first
    rule: Callable[[int, int], str]  # n_ctx, stride
    shortest: int = 1
    bos_each: bool = False  # every window's first id gives way to BOS


@dataclass(frozen=True)
class Plan:
    """A convention applied to ids: how many windows there are, each made when asked for, and the rule in a sentence."""

    mode: str
    n_ctx: int
    stride: int
    count: int
    rule: str
    make: Callable[[int], Window]
    longest: int  # ids in the longest window
    ahead: int = 0  # prediction head: targets lie that many tokens further on

    def windows(self) -> Iterator[Window]:
        """The windows in order."""
        return map(self.make, range(self.count))


def ints(ids: Any) -> Ids:
    """Ids as an int32 array."""
    return np.ascontiguousarray(ids, np.int32)


def _llama(ids: IdSource, i: int, n_ctx: int, _: int, bos: int | None) -> Window:
    first = n_ctx // 2
    x = ints(ids[i * n_ctx : (i + 1) * n_ctx])
    fed = x[:-1].copy()  # the last id is only a target: what follows it is never scored
    if bos is not None:
        fed[0] = bos  # overwritten, not put before
    return Window(fed, first, x[first + 1 :], i * n_ctx + first + 1)


def _full(ids: IdSource, i: int, n_ctx: int, _: int, bos: int | None) -> Window:  # noqa: ARG001
    x = ints(ids[i * n_ctx : (i + 1) * n_ctx + 1])
    return Window(x[:-1], 0, x[1:], i * n_ctx + 1)


def _stride(ids: IdSource, i: int, n_ctx: int, stride: int, bos: int | None) -> Window:  # noqa: ARG001
    lo = i * stride
    x = ints(ids[lo : lo + n_ctx])
    scored_to = lo - stride + n_ctx if i else 0  # end of the window before
    first = max(scored_to - lo - 1, 0)  # with stride = n_ctx nothing stands before the first id, so it goes unscored
    return Window(x[:-1], first, x[first + 1 :], lo + first + 1)


def _stride_count(n: int, n_ctx: int, stride: int) -> int:
    count = 1 + max(0, -(-(n - n_ctx) // stride))
    # Side by side, a last window of one id would score nothing.
    return count - 1 if stride == n_ctx and count > 1 and n % n_ctx == 1 else count


def _stride_rule(n_ctx: int, stride: int) -> str:
    if stride == n_ctx:
        return f"windows of {n_ctx} tokens side by side; all but the first token of each are scored"
    return (
        f"windows of {n_ctx} tokens, each {stride} after the last; every token but the first is scored once, "
        f"after at least {n_ctx - stride} others from the second window on"
    )


def _doc(docs: Sequence[Any], i: int, n_ctx: int, _: int, bos: int | None) -> Window:  # noqa: ARG001
    x = ints(docs[i][: n_ctx + 1])
    return Window(x[:-1], 0, x[1:], 1)


CONVENTIONS: dict[str, Convention] = {
    "llama": Convention(
        need=lambda n_ctx: 2 * n_ctx,
        count=lambda n, n_ctx, _: n // n_ctx,
        window=_llama,
        rule=lambda n_ctx, _: (
            f"windows of {n_ctx} tokens side by side, the tail left out; "
            f"the last {n_ctx - 1 - n_ctx // 2} tokens of each are scored (llama-perplexity)"
        ),
        shortest=3,
        bos_each=True,
    ),
    "full": Convention(
        need=lambda n_ctx: n_ctx + 1,
        count=lambda n, n_ctx, _: (n - 1) // n_ctx,
        window=_full,
        rule=lambda n_ctx, _: (
            f"windows of {n_ctx} tokens side by side, the tail left out; "
            f"all {n_ctx} next tokens of each are scored (llm.c validation loss)"
        ),
    ),
    "stride": Convention(
        need=lambda _: 2,
        count=_stride_count,
        window=_stride,
        rule=_stride_rule,
        shortest=2,
    ),
    "docs": Convention(
        need=lambda _: 1,
        count=lambda n, _, __: n,
        window=_doc,
        rule=lambda n_ctx, _: (
            f"each line is a document of its own between its opening and closing token, cut after {n_ctx} targets; "
            "all of them are scored (microgpt)"
        ),
    ),
}
MODES = (*CONVENTIONS, "all")
TOGETHER = ("llama", "full", "stride")  # what "all" stands for


def plan(
    mode: str,
    ids: IdSource | Sequence[Any],
    n_ctx: int,
    *,
    chunks: int = -1,
    stride: int | None = None,
    bos: int | None = None,
    ahead: int = 0,
) -> Plan:
    """Apply a convention to ids (docs: to a list of id lists). `chunks` -1: all windows. `stride` None: half of n_ctx.

    `bos` is the id that a window begins with where the convention has it so; None for models that add none. `ahead` is
    the prediction head that is scored, on tokens so much further on. Raises UnsupportedError for a text too short
    (saying how long it must be), and for an n_ctx, stride or chunks that cannot be.
    """
    try:
        convention = CONVENTIONS[mode]
    except KeyError:
        raise UnsupportedError("unknown mode", at="--mode", expected=", ".join(MODES), got=mode) from None
    if n_ctx < convention.shortest:
        raise UnsupportedError(
            f"mode {mode} scores nothing in so short a window",
            at="-c",
            expected=f"at least {convention.shortest}",
            got=n_ctx,
        )
    if ahead and mode == "docs":
        raise UnsupportedError("extra prediction heads are not scored on documents", at="--mtp-head", got=ahead)
    step = max(n_ctx // 2, 1) if stride is None else stride
    if mode == "stride" and not 1 <= step <= n_ctx:
        raise UnsupportedError(
            "the stride does not fit the window", at="--stride", expected=f"1 to {n_ctx:,} (-c)", got=step,
            hint="a longer stride would skip tokens" if step > n_ctx else "",
        )  # fmt: skip
    if chunks == 0 or chunks < -1:
        raise UnsupportedError("nothing to score", at="--chunks", expected="1 or more, or -1 for all", got=chunks)
    n, need = len(ids) - ahead, convention.need(n_ctx)
    if n < need:
        unit = "document" if mode == "docs" else "tokens"
        raise UnsupportedError(
            "the text is empty" if n + ahead == 0 else "the text is too short",
            expected=f"at least {need + ahead:,} {unit} for mode {mode} and windows of {n_ctx:,}",
            got=f"{n + ahead:,}", hint=_shorter(mode, n, convention.shortest),
        )  # fmt: skip
    count = convention.count(n, n_ctx, step)
    if chunks > 0:
        count = min(count, chunks)
    longest = min(n_ctx, max((len(d) - 1 for d in ids), default=1)) if mode == "docs" else min(n_ctx, n)  # type: ignore[union-attr]
    rule = convention.rule(n_ctx, step)
    if convention.bos_each and bos is not None:
        rule += f"; the first token of each window gives way to BOS ({bos})"
    source = ids if not ahead else ids[:n]

    def make(i: int) -> Window:
        w = convention.window(source, i, n_ctx, step, bos)
        return w if not ahead else replace(w, targets=ints(ids[w.start + ahead : w.start + ahead + len(w.targets)]))

    if ahead:
        rule += f"; head {ahead} is scored on the tokens {ahead + 1} ahead"
    return Plan(mode, n_ctx, step, count, rule, make, max(longest, 1), ahead)


def _shorter(mode: str, n: int, shortest: int) -> str:
    """What would work with `n` ids."""
    fits = {"llama": n // 2, "full": n - 1}.get(mode, 0)
    if fits >= shortest:
        return f"give a longer text, or windows of at most {fits:,} (-c {fits})"
    return "give a longer text"

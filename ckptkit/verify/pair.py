"""`verify A B`: structure, tensors and logits of two open checkpoints, and the causes of what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arch import ARCHS
from ..checkpoint import Checkpoint
from ..errors import CkptError, UnsupportedError
from .causes import Cause, Explained, find_causes, judge
from .common_form import common_form
from .logits import Predictions, choose_ids, coarsest_type, compare_logits, runner
from .structure import Structure, compare_structure
from .tensors import Compared, compare_all

Progress = Callable[[int], Callable[[int], object]]


@dataclass(frozen=True)
class Options:
    """`ids`: what the logits are compared on; None chooses them. `device` and `threads` are for the logits."""

    logits: bool = True
    ids: Sequence[int] | None = None
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Report:
    """The three levels. `logits` None: not run, `logits_note` says why. `after`: logits with every cause repaired."""

    a: Path
    b: Path
    structure: Structure
    tensors: tuple[Compared, ...]
    logits: Predictions | None
    logits_note: str
    causes: tuple[Cause, ...]
    unexplained: tuple[str, ...]
    after: Predictions | None

    @property
    def tensors_ok(self) -> bool:
        """Every tensor that both sides have is the same, within the limits; and they have some in common."""
        return all(t.ok for t in self.tensors) and (bool(self.tensors) or not self.structure.n_a)

    @property
    def ok(self) -> bool:
        """Nothing differs on any level that was looked at; `logits_note` says why logits were not."""
        return self.structure.ok and self.tensors_ok and (self.logits is None or self.logits.ok)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return {
            "ok": self.ok,
            "a": str(self.a),
            "b": str(self.b),
            "structure": self.structure.as_dict(),
            "tensors": {"ok": self.tensors_ok, "compared": [t.as_dict() for t in self.tensors]},
            "logits": self.logits.as_dict() if self.logits else None,
            "logits_note": self.logits_note,
            "causes": [c.as_dict() for c in self.causes],
            "unexplained": list(self.unexplained),
            "logits_repaired": self.after.as_dict() if self.after else None,
        }


def verify(a: Checkpoint, b: Checkpoint, options: Options | None = None, progress: Progress | None = None) -> Report:
    """Compare two checkpoints. `progress` is called with the bytes to read and returns what hears of each piece."""
    options = options or Options()
    paths = a.source.paths[0], b.source.paths[0]
    a, b, done = common_form(a, b)
    structure = compare_structure(a, b, done)
    names = list(structure.shared)
    step = progress(sum(ck.tensors[n].nbytes for ck in (a, b) for n in names)) if progress else None
    tensors = tuple(compare_all(a, b, names, step))
    failed = [t.name for t in tensors if not t.ok]
    changed = [t.name for t in tensors if not t.equal]
    found: Predictions | None = None
    note, ids = "", list(options.ids) if options.ids is not None else []
    if not options.logits:
        note = "not asked for"
    elif a.config.arch not in ARCHS or b.config.arch not in ARCHS:
        note = f"models of arch {a.config.arch or 'unknown'} cannot be run"
    elif a.tensors and b.tensors and structure.same_sizes:
        ids = choose_ids(a, b) if options.ids is None else ids
        check_ids(ids, a, b)
        found, note = _logits(a, b, ids, changed, failed, options)
    else:
        note = "the models have other sizes" if a.tensors and b.tensors else "there are no tensors to run"
    explained = Explained((), (), a, b)
    causes: tuple[Cause, ...] = ()
    after: Predictions | None = None
    if structure.same_sizes and (failed or not structure.ok):
        explained = find_causes(a, b, structure, failed)
        causes = explained.causes
        if ids and causes and not explained.unexplained:
            causes, after, why = _confirm(explained, a, b, ids, changed, options)
            note = note or why
    return Report(*paths, structure, tensors, found, note, causes, explained.unexplained, after)


def check_ids(ids: Sequence[int], a: Checkpoint, b: Checkpoint) -> None:
    """Ids must be in both vocabularies and no more than both contexts hold."""
    vocab = min(a.config.vocab_size, b.config.vocab_size)
    context = min(a.config.context_length, b.config.context_length)
    if not ids or not all(0 <= i < vocab for i in ids):
        raise UnsupportedError(
            "ids are not in both vocabularies", expected=f"1 or more from 0 to {vocab - 1:,}", got=str(list(ids)[:8])
        )
    if len(ids) > context:
        raise UnsupportedError("more ids than both contexts hold", expected=f"at most {context:,}", got=len(ids))


def _logits(
    a: Checkpoint, b: Checkpoint, ids: Sequence[int], changed: list[str], failed: list[str], options: Options
) -> tuple[Predictions | None, str]:
    run = runner(ids, options.device, options.threads)
    logits = []
    for side, ck in (("A", a), ("B", b)):
        try:
            logits.append(run(ck))
        except UnsupportedError as e:
            return None, f"{side} cannot be run: {' '.join(str(e).split())}"
    return compare_logits(logits[0], logits[1], coarsest_type(a, b, [n for n in changed if n not in failed])), ""


def _confirm(
    explained: Explained, a: Checkpoint, b: Checkpoint, ids: Sequence[int], changed: list[str], options: Options
) -> tuple[tuple[Cause, ...], Predictions | None, str]:
    """Whether the repaired models agree."""
    # tensors that a repair made match are still only as exact as the type they are stored in
    coarsest = coarsest_type(a, b, [n for n in changed if a.tensors[n].type != b.tensors[n].type])
    context = min(explained.a.config.context_length, explained.b.config.context_length)
    run = runner(ids[:context], options.device, options.threads)
    try:
        causes, after = judge(explained, b, run(explained.a), run, lambda x, y: compare_logits(x, y, coarsest))
    except CkptError as e:
        return explained.causes, None, f"the repaired models cannot be run: {' '.join(str(e).split())}"
    return causes, after, ""

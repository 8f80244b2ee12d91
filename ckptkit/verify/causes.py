"""Why two models differ, found by repair: a fault is undone on one side, and named if that removes the difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..arch import is_neutral, template
from ..checkpoint import Checkpoint
from ..quant.types import PLAIN
from ..tensor import Tensor, cut, transpose
from .logits import Logits, Predictions
from .repairs import ways, with_tensors
from .structure import FACTORS, Structure, scaling_text
from .tensors import within

VOCAB = ("token_embd.weight", "output.weight", "mtp.{j}.weight")
POSITIONS = "position_embd.weight"


@dataclass(frozen=True)
class Cause:
    """A fault that explains a difference. `by`: what shows it: tensors (they match once repaired), logits or config."""

    key: str
    says: str
    tensors: tuple[str, ...]
    by: str

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return asdict(self) | {"tensors": list(self.tensors)}


@dataclass(frozen=True)
class Explained:
    """Causes, tensors that no repair explains, and both sides with every repair applied."""

    causes: tuple[Cause, ...]
    unexplained: tuple[str, ...]
    a: Checkpoint
    b: Checkpoint


class _Search:
    """The two sides as they are put right, and what was found on the way."""

    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self.a, self.b = a, b
        self.found: dict[tuple[str, str], list[str]] = {}
        self.unexplained: list[str] = []

    def add(self, key: str, says: str, name: str = "") -> None:
        """Note a cause and the tensor it shows in."""
        names = self.found.setdefault((key, says), [])
        if name:
            names.append(name)


def find_causes(a: Checkpoint, b: Checkpoint, structure: Structure, failed: list[str]) -> Explained:
    """Try every repair on every tensor of `failed` (those that differ) and on what structure says is missing or cut.

    Tensors judge the repairs of tensors; causes in the config are named for the logits to judge.
    """
    s = _Search(a, b)
    _sizes(s, structure)
    _missing(s, structure)
    repaired: dict[str, Tensor] = {}
    for name in failed:
        tensor = _repair(s, name)
        if tensor is not None:
            repaired[name] = tensor
    for name in [d.what for d in structure.differences]:  # other shapes: only transposition can be meant
        if name in s.a.tensors and name in s.b.tensors and s.a.tensors[name].shape != s.b.tensors[name].shape:
            tensor = _repair(s, name)
            if tensor is not None:
                repaired[name] = tensor
    s.b = with_tensors(s.b, repaired)
    config = _config(s, structure)
    causes = [Cause(key, says, tuple(names), "tensors") for (key, says), names in s.found.items()]
    causes += [Cause(key, says, (), "config") for key, says in config]
    return Explained(tuple(causes), tuple(s.unexplained), s.a, s.b)


def _repair(s: _Search, name: str) -> Tensor | None:
    """The first repair, or pair of repairs, of B's tensor that matches A's."""
    a, b = s.a.tensors[name], s.b.tensors[name]
    if name.endswith(".bias") and is_neutral(name, b):
        s.add("bias", "bias dropped: zero in B", name)
        return a
    if name.endswith(".bias") and is_neutral(name, a):
        s.add("bias", "bias dropped: zero in A", name)
        return a
    for way in ways(s.b, name):
        right = way[-1].tensor
        # blocks lie along the rows that B has, so a quantised B is judged as it lies
        turned = len(way) == 1 and way[0].key == "transpose" and a.type in PLAIN
        if within(transpose(a), b) if turned else within(a, right, b.type if right.type != b.type else None):
            for repair in way:
                s.add(repair.key, repair.says, name)
            return right
    s.unexplained.append(name)
    return None


def _missing(s: _Search, structure: Structure) -> None:
    """Tensors that one side lacks: dropped biases, an output that was tied or untied."""
    for d in structure.differences:
        name = d.what
        if (name in s.a.tensors) == (name in s.b.tensors):
            continue
        lacking = "B" if name in s.a.tensors else "A"
        have, lack = (s.a, s.b) if lacking == "B" else (s.b, s.a)
        if name.endswith(".bias"):
            s.add("bias", f"bias dropped: {lacking} has none", name)
        elif name == "output.weight":
            s.add("tied", f"output dropped: {lacking} uses the embedding in its place", name)
        elif template(name) == "mtp.{j}.weight":
            s.add("mtp", f"extra prediction heads dropped: {lacking} has none", name)
            continue
        else:
            s.unexplained.append(name)
            continue
        filled = with_tensors(lack, {name: have.tensors[name]})
        if name == "output.weight":
            filled = with_tensors(filled, {}, tied_output=False)
        s.a, s.b = (s.a, filled) if lacking == "B" else (filled, s.b)


def _sizes(s: _Search, structure: Structure) -> None:
    """Vocabulary or positions of another length: the rows that both have are compared, the rest is cut off."""
    for templates, field, says in (
        (VOCAB, "vocab_size", "tokens"),
        ((POSITIONS,), "context_length", "positions"),
    ):
        names = [
            d.what for d in structure.differences
            if template(d.what) in templates and d.what in s.a.tensors and d.what in s.b.tensors
        ]  # fmt: skip
        for name in names:
            a, b = s.a.tensors[name], s.b.tensors[name]
            if a.shape[1:] != b.shape[1:]:
                continue
            n = min(a.n_rows, b.n_rows)
            short_a, short_b = (t if t.n_rows == n else cut(t, 0, n) for t in (a, b))
            if not within(short_a, short_b):
                s.unexplained.append(name)
                continue
            more, ck = ("B", b) if b.n_rows > n else ("A", a)
            zero = is_neutral("x.padding", cut(ck, n, ck.n_rows))
            if zero and says == "tokens":
                s.add("padding", f"padding kept: {more} has {ck.n_rows - n:,} zero rows after {n:,} tokens", name)
            else:
                less = "A" if more == "B" else "B"
                s.add("rows", f"rows cut: {less} has {n:,} of {ck.n_rows:,} {says}", name)
            config: dict[str, Any] = {field: n}
            s.a = with_tensors(s.a, {name: short_a}, **config)
            s.b = with_tensors(s.b, {name: short_b}, **config)


def _config(s: _Search, structure: Structure) -> list[tuple[str, str]]:
    """Constants on which the sides disagree; B takes A's."""
    found: list[tuple[str, str]] = []
    c, d = s.a.config, s.b.config
    for difference in structure.differences:
        what = difference.what
        if what == "norm_eps":
            found.append(("norm_eps", f"norm eps: B has {d.norm_eps:g}, A has {c.norm_eps:g}"))
        elif what == "rope_theta":
            found.append(("rope_base", f"rope base: B has {d.rope_theta:,.10g}, A has {c.rope_theta:,.10g}"))
        elif what == "rope_scaling":
            found.append(("rope_scaling", f"rope scaling: B has {scaling_text(s.b)}, A has {scaling_text(s.a)}"))
    for key, _ in found:
        s.b = apply_config(key, s.a, s.b)
    return found


def apply_config(key: str, a: Checkpoint, b: Checkpoint) -> Checkpoint:
    """B with A's constant."""
    if key == "norm_eps":
        return with_tensors(b, {}, norm_eps=a.config.norm_eps)
    if key == "rope_base":
        return with_tensors(b, {}, rope_theta=a.config.rope_theta)
    factors = {FACTORS: a.tensors[FACTORS]} if FACTORS in a.tensors else {}
    return with_tensors(b, factors, () if factors else (FACTORS,), rope_scaling=a.config.rope_scaling)


def judge(
    explained: Explained,
    original: Checkpoint,
    logits_a: Logits,
    run: Callable[[Checkpoint], Logits],
    compare: Callable[[Logits, Logits], Predictions],
) -> tuple[tuple[Cause, ...], Predictions]:
    """Run the repaired B: what remains of the difference, and which constants were needed to remove it.

    `logits_a` are those of the repaired A, `original` is B before any repair.
    """
    after = compare(logits_a, run(explained.b))
    constants = [c for c in explained.causes if c.by == "config"]
    if not after.ok or not constants:
        return explained.causes, after
    kept: list[Cause] = []
    for cause in explained.causes:
        if cause.by == "config":
            as_it_was = apply_config(cause.key, original, explained.b)
            without = compare(logits_a, run(as_it_was))
            kept.append(Cause(cause.key, cause.says, (), "config" if without.ok else "logits"))
        else:
            kept.append(cause)
    return tuple(kept), after

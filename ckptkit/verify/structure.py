"""Structure of two checkpoints in common form: names, shapes, and every fact that changes what the numbers mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..arch import rope_divisors
from ..checkpoint import Checkpoint
from .tokenizers import compare_tokenizers

FACTORS = "rope_freqs.weight"
SIZES = ("vocab_size", "context_length", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ff", "head_dim", "n_mtp_head")
MODEL = ("arch", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ff", "head_dim")  # another one if these differ
ROUNDED = ("norm_eps", "rope_theta")  # formats keep them as float32 or as decimal text
PLAIN = ("rope_pairing", "sliding_window", "tied_output")


@dataclass(frozen=True)
class Difference:
    """A fact on which the sides disagree; None where a side lacks it."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Structure:
    """`shared`: tensors with the same name and shape on both sides. `types_a`, `types_b`: tensors of each type."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    shared: tuple[str, ...]
    n_a: int
    n_b: int
    types_a: dict[str, int]
    types_b: dict[str, int]

    @property
    def ok(self) -> bool:
        """No difference that changes the meaning."""
        return not self.differences

    @property
    def same_sizes(self) -> bool:
        """Whether these could be the same model at all: one arch, as many layers and heads, as wide."""
        return not any(d.what in MODEL for d in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return {
            "ok": self.ok,
            "tensors_a": self.n_a,
            "tensors_b": self.n_b,
            "shared": len(self.shared),
            "types_a": self.types_a,
            "types_b": self.types_b,
            "differences": [asdict(d) for d in self.differences],
            "notes": list(self.notes),
        }


def compare_structure(a: Checkpoint, b: Checkpoint, done: list[str]) -> Structure:
    """Compare two checkpoints in common form; `done` says how they came to it."""
    found: list[Difference] = []
    notes = list(done)
    for side, ck in (("A", a), ("B", b)):
        said = dict.fromkeys((*ck.source.notes, *(ck.tokenizer.notes if ck.tokenizer else ())))
        notes += [f"{side}: {note}" for note in said]
    _config(a, b, found)
    names_a, names_b = _names(a), _names(b)
    for name in dict.fromkeys((*names_a, *names_b)):
        shape_a, shape_b = names_a.get(name), names_b.get(name)
        if shape_a != shape_b:
            found.append(Difference(name, _shape(shape_a), _shape(shape_b)))
    compare_tokenizers(a.tokenizer, b.tokenizer, lambda w, x, y: found.append(Difference(w, x, y)), notes.append)
    shared = tuple(n for n, shape in names_a.items() if names_b.get(n) == shape)
    return Structure(tuple(found), tuple(notes), shared, len(names_a), len(names_b), _types(a), _types(b))


def _names(ck: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes by name; rotary factors are compared as the frequencies they make."""
    return {n: t.shape for n, t in ck.tensors.items() if n != FACTORS}


def _shape(shape: tuple[int, ...] | None) -> str | None:
    return None if shape is None else " x ".join(f"{n:,}" for n in shape)


def _types(ck: Checkpoint) -> dict[str, int]:
    out: dict[str, int] = {}
    for t in ck.tensors.values():
        out[t.type.name] = out.get(t.type.name, 0) + 1
    return out


def _config(a: Checkpoint, b: Checkpoint, found: list[Difference]) -> None:
    x, y = a.config, b.config
    if x.arch != y.arch:
        found.append(Difference("arch", x.arch, y.arch))
    for name in (*SIZES, *PLAIN):
        if getattr(x, name) != getattr(y, name):
            found.append(Difference(name, getattr(x, name), getattr(y, name)))
    for name in ROUNDED:
        if name == "rope_theta" and not (x.rope_pairing and y.rope_pairing):
            continue
        if np.float32(getattr(x, name)) != np.float32(getattr(y, name)):
            found.append(Difference(name, getattr(x, name), getattr(y, name)))
    if x.rope_pairing and y.rope_pairing and x.head_dim == y.head_dim and not _same_scaling(a, b):
        found.append(Difference("rope_scaling", scaling_text(a), scaling_text(b)))


def _same_scaling(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether both divide their rotary frequencies by the same numbers; kinds we do not know must be named alike."""
    factors = [rope_divisors(ck) for ck in (a, b)]
    if factors[0] is None or factors[1] is None:
        return a.config.rope_scaling == b.config.rope_scaling
    return factors[0].shape == factors[1].shape and bool(np.allclose(factors[0], factors[1], rtol=1e-5, atol=0))


def scaling_text(ck: Checkpoint) -> str:
    """How rotary frequencies are scaled, in a few words."""
    scaling = ck.config.rope_scaling
    kind = f"{scaling.type} x {scaling.factor:g}" if scaling else "none"
    return f"{FACTORS}" if FACTORS in ck.tensors else kind

"""A model against llm.c's debug state: the logits and the loss that the original program computed from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import CkptError
from ..formats import llmc_state
from ..formats.llmc_state import State
from .causes import Cause
from .logits import log_p
from .repairs import whole_model

LOGITS_LIMIT = 1e-3  # |d logit| between two float32 programs over the same weights
LOSS_LIMIT = 1e-4


@dataclass(frozen=True)
class StateReport:
    """Errors of the logits over the whole batch, both losses, and the causes found by repair."""

    model: Path
    state: Path
    batch: int
    length: int
    max_error: float
    rms_error: float
    limit: float
    loss: float
    loss_stored: float
    loss_limit: float
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]

    @property
    def logits_ok(self) -> bool:
        """Every logit within the limit."""
        return self.max_error <= self.limit

    @property
    def loss_ok(self) -> bool:
        """The loss within its limit."""
        return abs(self.loss - self.loss_stored) <= self.loss_limit

    @property
    def ok(self) -> bool:
        """Logits and loss both."""
        return self.logits_ok and self.loss_ok

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        body = asdict(self) | {"model": str(self.model), "state": str(self.state)}
        return {"ok": self.ok, "logits_ok": self.logits_ok, "loss_ok": self.loss_ok} | body | {
            "causes": [c.as_dict() for c in self.causes], "notes": list(self.notes),
        }  # fmt: skip


def verify_state(ck: Checkpoint, path: Path, device: str = "cpu", threads: int | None = None) -> StateReport:
    """Run the state's batch through the model; where it differs, try what could have been done wrong to the model."""
    with llmc_state.read(path, replace(ck.config, tied_output=ck.config.arch == "gpt2")) as state:
        batch, length = state.x.shape
        found = _run(ck, state, range(batch), device, threads)
        causes: tuple[Cause, ...] = ()
        if not (found[0] <= LOGITS_LIMIT and abs(found[2] - state.loss) <= LOSS_LIMIT):
            causes = _causes(ck, state, device, threads)
        notes = [n for n in ck.source.notes if "tokenizer" not in n]
        kinds = sorted({t.type.name for t in ck.tensors.values()} - {"F32", "F64"})
        if kinds:
            notes.append(f"the state was computed in float32, and this model stores {', '.join(kinds)}")
        return StateReport(
            ck.source.paths[0], path, batch, length, found[0], found[1], LOGITS_LIMIT, found[2], state.loss,
            LOSS_LIMIT, causes, tuple(notes),
        )  # fmt: skip


def _run(
    ck: Checkpoint, state: State, sequences: range, device: str, threads: int | None
) -> tuple[float, float, float]:
    """Largest and rms error of the logits, and the mean loss, over some sequences; the checkpoint stays open."""
    from ..runtime import load

    worst, squares, count, losses = 0.0, 0.0, 0, []
    with (
        load(replace(ck, files=()), device=device, threads=threads, context=state.x.shape[1]) as model,
        np.errstate(all="ignore"),
    ):
        for b in sequences:
            logits = model.forward(state.x[b], logits="all")
            d = np.abs(logits - state.logits(b))
            worst = float(np.maximum(worst, d.max()))  # NaN stays NaN
            squares += float(np.square(d, dtype=np.float64).sum())
            count += d.size
            losses += [-float(log_p(row)[t]) for row, t in zip(logits, state.y[b], strict=True)]
    return worst, (squares / count) ** 0.5, float(np.mean(losses))


def _causes(ck: Checkpoint, state: State, device: str, threads: int | None) -> tuple[Cause, ...]:
    """Every single repair that brings the logits of the first sequence within the limit; first found, first named."""
    for key, says, repaired in whole_model(ck):
        try:
            error = _run(repaired, state, range(1), device, threads)[0]
        except CkptError:
            continue
        if error <= LOGITS_LIMIT:
            names = tuple(n for n, t in repaired.tensors.items() if ck.tensors.get(n) is not t)
            return (Cause(key, says, names, "logits"),)
    return ()

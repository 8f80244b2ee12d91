"""Running a checkpoint: `load` puts it on a device and gives a Model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..arch import arch_of, check_tensors
from ..checkpoint import Checkpoint
from ..errors import UnsupportedError

if TYPE_CHECKING:
    from .model import Model

DEVICES = {"cpu": "kernels_cpu", "cuda": "kernels_cuda"}
PRECISIONS = ("exact", "fast")
LONGEST = 1 << 18  # tokens of a sequence, where nobody asks for more: a file can state any context


def load(
    ck: Checkpoint,
    device: str = "cpu",
    precision: str = "exact",
    threads: int | None = None,
    context: int | None = None,
    type_k: str = "f32",
    type_v: str = "f32",
    message: Callable[[str], None] | None = None,
) -> Model:
    """Put a checkpoint on a device. The checkpoint belongs to the model then: closing the model closes it.

    `precision`: exact keeps activations float32, fast may round them in prompts. `context`: tokens a sequence may
    have, by default the model's own up to LONGEST. `type_k`, `type_v`: f32 or f16 cache. `message` is told what takes
    time.
    Raises UnsupportedError for what cannot run, or would not fit in memory, before memory is taken.
    """
    if device == "auto":
        device = automatic_device()
    if device not in DEVICES:
        raise UnsupportedError("no such device", expected=" or ".join([*DEVICES, "auto"]), got=device)
    if precision not in PRECISIONS:
        raise UnsupportedError("no such precision", expected=" or ".join(PRECISIONS), got=precision)
    arch_of(ck, "running")
    check_tensors(ck)
    path, own = ck.source.paths[0], ck.config.context_length
    if context is not None and context < 1:
        raise UnsupportedError("the context must be at least 1 token", path=path, got=context)
    limit = own if "position_embd.weight" in ck.tensors else max(own, context or 0)
    if context is not None and context > limit:
        raise UnsupportedError(
            "the model has no positions beyond its context", path=path, expected=f"at most {own:,}", got=context
        )
    _refuse_windows(ck)
    kernels = importlib.import_module(f".{DEVICES[device]}", __name__)
    from . import model, rope
    from .kernels_cpu_team import check_threads

    model.check_kv_types(type_k, type_v)
    if ck.config.rope_pairing:
        rope.factors(ck)  # refuses scalings by name
    context = context or min(own, LONGEST)
    positions = 4 * context * ck.config.head_dim if ck.config.rope_pairing else 0
    kernels.check_fits(kernels.load_bytes(ck) + positions, "weights, positions and scratch")
    return model.Model(ck, kernels, device, precision, check_threads(threads), context, type_k, type_v, message)


def automatic_device() -> str:
    """cuda where there are a driver, a GPU and the package that compiles for it; else cpu."""
    from .cuda_driver import available

    return "cuda" if available() else "cpu"


def _refuse_windows(ck: Checkpoint) -> None:
    """Sliding windows would change which keys a token sees."""
    for key, value in ck.source.metadata.items():
        if key.endswith((".attention.sliding_window", "sliding_window")):
            size = getattr(value, "value", value)
            if (
                isinstance(size, int)
                and 0 < size < ck.config.context_length
                and ck.source.metadata.get("use_sliding_window", True)
            ):
                raise UnsupportedError(
                    "sliding-window attention is not supported",
                    path=ck.source.paths[0],
                    at=key,
                    got=f"a window of {size:,}",
                )

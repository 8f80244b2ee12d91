"""What is in a file: config, types, tokenizer, tensors and their statistics, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .tensor import Tensor


@dataclass(frozen=True)
class Stats:
    """Statistics of one tensor's values, NaN and infinities left out of the rest."""

    min: float
    max: float
    mean: float
    std: float
    nan: int
    inf: int


def tensor_stats(t: Tensor) -> Stats:
    """Read a tensor chunk by chunk; sums in float64."""
    from .quant.encode import decode_wide

    low, high, total, squares, n, nan, inf = float("inf"), float("-inf"), 0.0, 0.0, 0, 0, 0
    for _, rows in t.chunks(1 << 22):
        values = decode_wide(rows, t.type).reshape(-1)
        good = np.isfinite(values)
        if not good.all():
            nan += int(np.isnan(values).sum())
            inf += int(np.isinf(values).sum())
            values = values[good]
        if len(values):
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            wide = values.astype(np.float64)
            with np.errstate(over="ignore"):  # float64 near its end: infinite is the answer
                total, squares, n = total + float(wide.sum()), squares + float(np.dot(wide, wide)), n + len(wide)
    mean = total / n if n else float("nan")
    std = max(squares / n - mean * mean, 0.0) ** 0.5 if n else float("nan")
    return Stats(low if n else float("nan"), high if n else float("nan"), mean, std, nan, inf)


def types(ck: Checkpoint) -> dict[str, dict[str, int]]:
    """Tensors, values and bytes of each type, most bytes first."""
    found: dict[str, dict[str, int]] = {}
    for t in ck.tensors.values():
        entry = found.setdefault(t.type.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["parameters"] += t.n_elements
        entry["bytes"] += t.nbytes
    return dict(sorted(found.items(), key=lambda kv: -kv[1]["bytes"]))


def offset(t: Tensor) -> int | None:
    """Where a tensor begins in its file; None where it is not one stretch of it."""
    origin, rows = t.origin, 0
    while origin.get("op") == "cut":
        rows += origin["rows"][0] * t.row_bytes
        origin = origin["of"]
    return origin["offset"] + rows if origin.get("op") == "bytes" else None


def tokenizer_facts(ck: Checkpoint) -> dict[str, Any] | None:
    """Kind, size, special ids and flags."""
    t = ck.tokenizer
    if t is None:
        return None
    return {
        "kind": t.kind, "vocab_size": t.vocab_size, "pre": t.pre, "special_ids": dict(t.ids), "add_bos": t.add_bos,
        "add_eos": t.add_eos, "chat_template": t.chat_template,
    }  # fmt: skip


def describe(
    ck: Checkpoint, tensors: bool = False, stats: bool = False, step: Callable[[int], object] | None = None
) -> dict[str, Any]:
    """Everything about a checkpoint under stable keys; `stats` reads all tensors, `step` hears of every byte read."""
    c = ck.config
    config = {k: v for k, v in asdict(c).items() if k != "arch"}
    metadata = {k: getattr(v, "value", v) for k, v in ck.source.metadata.items()}
    body: dict[str, Any] = {
        "paths": [str(p) for p in ck.source.paths],
        "format": ck.source.format,
        "version": ck.source.version,
        "arch": c.arch,
        "parameters": ck.n_parameters,
        "bytes": sum(f.size for f in ck.files),
        "config": config,
        "padded_vocab_size": metadata.get("padded_vocab_size", metadata.get("ckptkit.padded_vocab_size", c.vocab_size)),
        "types": types(ck),
        "tokenizer": tokenizer_facts(ck),
        "metadata": {k: plain(v) for k, v in metadata.items()},
        "notes": list(dict.fromkeys((*ck.source.notes, *(ck.tokenizer.notes if ck.tokenizer else ())))),
    }
    if tensors or stats:
        rows = []
        for name, t in ck.tensors.items():
            row: dict[str, Any] = {
                "name": name,
                "shape": list(t.shape),
                "type": t.type.name,
                "offset": offset(t),
                "bytes": t.nbytes,
            }
            if stats:
                row |= asdict(tensor_stats(t))
                if step:
                    step(t.nbytes)
            rows.append(row)
        body["tensors"] = rows
    return body


def plain(value: Any, limit: int = 16) -> Any:
    """A metadata value as JSON can hold it; long arrays become their length and their beginning."""
    if hasattr(value, "__len__") and not isinstance(value, str | bytes | dict):
        head = [plain(v) for v in value[:limit]]
        return head if len(value) <= limit else {"length": len(value), "begins": head}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, np.generic) else value

"""The manifest of a conversion: hashes of sources, outputs and tensors, and where each tensor's bytes came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np

from .checkpoint import Checkpoint
from .files import Bytes, replacing
from .tensor import Tensor


class Recorder:
    """Hashes what is written as it streams, and says where every byte came from."""

    def __init__(self, ck: Checkpoint, stored: Mapping[str, Tensor]) -> None:
        self.ck = ck
        self.stored = dict(stored)
        self.hashes = {name: hashlib.sha256() for name in stored}
        self.next_row = dict.fromkeys(stored, 0)
        self.tensors = {name: self._hashed(name, t) for name, t in stored.items()}

    def _hashed(self, name: str, t: Tensor) -> Tensor:
        """The same tensor; rows that come before those above them, from another thread, wait here to be hashed."""
        early: dict[int, Bytes] = {}
        turn = Lock()

        def rows(lo: int, hi: int) -> Bytes:
            data = t.rows(lo, hi)
            with turn:
                if lo >= self.next_row[name]:  # below: a writer that reads twice
                    early[lo] = data
                while (waiting := early.pop(self.next_row[name], None)) is not None and len(waiting):
                    self.hashes[name].update(np.ascontiguousarray(waiting).data)
                    self.next_row[name] += len(waiting)
            return data

        return replace(t, rows=rows)

    def _sha256(self, name: str, t: Tensor) -> str:
        """The hash of what streamed through; of a tensor that did not stream through once, in order, read again."""
        if self.next_row[name] == t.n_rows:
            return self.hashes[name].hexdigest()
        total = hashlib.sha256()
        for _, rows in t.chunks():
            total.update(np.ascontiguousarray(rows).data)
        return total.hexdigest()

    def save(self, path: Path, written: tuple[Path, ...]) -> None:
        """Write the manifest as JSON; the same conversion gives the same bytes."""
        body = {
            "manifest": 1,
            "sources": [_file(p) for p in self.ck.source.paths],
            "outputs": [_file(p) for p in written if p.is_file()],
            "tensors": {
                name: {
                    "shape": list(t.shape),
                    "type": t.type.name,
                    "sha256": self._sha256(name, t),
                    "origin": t.origin,
                }
                for name, t in self.stored.items()
            },
        }  # fmt: skip
        with replacing(path) as out:
            out.write((json.dumps(body, indent=1) + "\n").encode())


def _file(path: Path) -> dict[str, str | int]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in chunks."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

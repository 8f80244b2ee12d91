"""The manifest of a conversion: hashes of sources, outputs and tensors, and where each tensor's bytes came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .checkpoint import Checkpoint
from .files import Bytes, replacing
from .tensor import Tensor


class Recorder:
    """Hashes what is written as it streams, and says where every byte came from."""

    def __init__(self, ck: Checkpoint, stored: Mapping[str, Tensor]) -> None:
        self.ck = ck
        self.hashes = {name: hashlib.sha256() for name in stored}
        self.tensors = {name: self._hashed(name, t) for name, t in stored.items()}

    def _hashed(self, name: str, t: Tensor) -> Tensor:
        inner, total = t.rows, self.hashes[name]

        def rows(lo: int, hi: int) -> Bytes:
            data = inner(lo, hi)
            total.update(data.data)
            return data

        return replace(t, rows=rows)

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
                    "sha256": self.hashes[name].hexdigest(),
                    "origin": t.origin,
                }
                for name, t in self.tensors.items()
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

"""Extra prediction heads beside a GGUF: <stem>.mtp.safetensors.

llama.cpp refuses a GGUF with tensors it does not know, so the heads lie in a file of their own. The GGUF's keys
ckptkit.mtp_heads and ckptkit.mtp_sha256 say that it must be there and which it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..checkpoint import Checkpoint
from ..errors import FormatError
from ..files import File
from ..tensor import Tensor
from . import safetensors_io
from .options import origin

DIGEST = "ckptkit.mtp_sha256"


def path_for(path: Path) -> Path:
    """Where the sidecar of a model lies; shards of a split file share one."""
    stem = path.name.removesuffix(".gguf").split("-00001-of-")[0]
    return path.with_name(f"{stem}.mtp.safetensors")


def digest(heads: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of the heads."""
    total = hashlib.sha256()
    for name, t in heads.items():
        total.update(f"{name} {t.type.name} {t.shape}\n".encode())
        for _, rows in t.chunks():
            total.update(rows.data)
    return total.hexdigest()


def write(heads: Mapping[str, Tensor], path: Path, sha256: str) -> Path:
    """Write the sidecar of the model at `path`."""
    where = path_for(path)
    safetensors_io.write_file(where, heads, {DIGEST: sha256})
    return where


def attach(ck: Checkpoint) -> Checkpoint:
    """Add the heads that a sidecar holds to a checkpoint that says it has some; a note where the file is missing."""
    path = ck.source.paths[0]
    if any(name.startswith("mtp.") for name in ck.tensors):
        return ck
    where = path_for(path)
    if not where.exists():
        note = f"{ck.config.n_mtp_head - 1} extra prediction heads belong to this model; {where.name} is not beside it"
        return replace(ck, source=replace(ck.source, notes=(*ck.source.notes, note)))
    file = File(where)
    try:
        metadata, heads = safetensors_io.read_header(file)
        expected = origin(ck.source, "mtp_sha256")
        if metadata.get(DIGEST) != expected:
            raise FormatError(
                "the sidecar belongs to another model",
                path=where,
                expected=f"{DIGEST} {expected}",
                got=metadata.get(DIGEST, "none"),
                hint="move it away, or convert again",
            )
    except BaseException:
        file.close()
        raise
    names = [f"mtp.{j}.weight" for j in range(1, ck.config.n_mtp_head)]
    tensors = {**ck.tensors, **{name: heads[name] for name in names if name in heads}}
    source = replace(ck.source, paths=(*ck.source.paths, where))
    return replace(ck, tensors=tensors, source=source, files=(*ck.files, file))

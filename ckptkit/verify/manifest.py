"""A converted file checked against the manifest of its conversion: hashes, and the recipes carried out again.

Without the source files the hashes of the output and of its tensors are checked; with them, that every tensor follows
from the source's bytes by the recipe that the manifest gives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import formats
from ..arch import ARCHS
from ..checkpoint import Checkpoint
from ..errors import CkptError, FormatError, some
from ..files import File, is_file
from ..formats.options import ReadOptions, WriteOptions
from ..layout import write_rows
from ..manifest import sha256
from ..tensor import Tensor
from .origin import Node, is_bare, redo

MAX_BYTES = 256 << 20  # of a manifest
CHUNK = 4 << 20
Progress = Callable[[int], Callable[[int], object]]


@dataclass(frozen=True)
class Check:
    """One thing looked at: output, tensors, source or recipes."""

    what: str
    ok: bool
    says: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class ManifestReport:
    """Everything looked at, and what could not be."""

    path: Path
    manifest: Path
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every check passed."""
        return all(c.ok for c in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return {
            "ok": self.ok,
            "path": str(self.path),
            "manifest": str(self.manifest),
            "checks": [asdict(c) | {"details": list(c.details)} for c in self.checks],
            "notes": list(self.notes),
        }


def verify_manifest(
    out: Path,
    manifest: Path,
    sources: Sequence[Path] = (),
    format: str = "",
    options: ReadOptions | None = None,
    progress: Progress | None = None,
) -> ManifestReport:
    """Check `out` against a manifest. Source files are `sources`, or lie beside the manifest or beside `out`."""
    body = read_manifest(manifest)
    places = [*(p if p.is_dir() else p.parent for p in sources), manifest.parent, out.parent]
    named = {p.name: p for p in sources if p.is_file()}
    checks, notes = [_outputs(out, body["outputs"])], []
    with ExitStack() as stack:
        ck = stack.enter_context(formats.open(out, format, options))
        stored = stored_tensors(ck)
        step = progress(sum(t.nbytes for t in stored.values())) if progress else None
        check, extra = _tensors(stored, body["tensors"], step)
        checks.append(check)
        if extra:
            notes.append(f"not in the manifest: {some(extra, 6)}")
    found, missing = _find(body["sources"], named, places)
    if missing:
        notes.append(f"source not found, so recipes were not carried out: {some(missing)} (--source says where it is)")
        return ManifestReport(out, manifest, tuple(checks), tuple(notes))
    check = _sources(found, body["sources"])
    checks.append(check)
    if check.ok:
        with ExitStack() as stack:
            files = {name: _opened(stack, path) for name, path in found.items()}
            check, bare = _recipes(body["tensors"], files)
            checks += [check] if len(bare) < len(body["tensors"]) else []
        if bare:
            notes.append(
                f"{len(bare)} tensors have no recipe, since their values were computed or parsed: {some(bare)}"
            )
    return ManifestReport(out, manifest, tuple(checks), tuple(notes))


def read_manifest(path: Path) -> dict[str, Any]:
    """The JSON of a manifest, its shape checked."""
    file = File(path)
    try:
        if file.size > MAX_BYTES:
            raise FormatError("too large for a manifest", path=path, expected=f"at most {MAX_BYTES:,}", got=file.size)
        raw = file.read(0, file.size).tobytes()
    finally:
        file.close()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise FormatError("not a manifest: it is no JSON", path=path, got=e) from e
    if not isinstance(body, dict) or body.get("manifest") != 1:
        raise FormatError("not a manifest of this version", path=path, at="key manifest", expected=1)
    lists = all(isinstance(body.get(k), list) and all(_is_file(f) for f in body[k]) for k in ("sources", "outputs"))
    tensors = body.get("tensors")
    if not lists or not isinstance(tensors, dict) or not all(_is_tensor(t) for t in tensors.values()):
        raise FormatError(
            "a manifest without its parts", path=path,
            expected="sources and outputs with name, bytes, sha256; tensors with shape, type, sha256, origin",
        )  # fmt: skip
    return body


def _is_file(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in ("name", "sha256"))


def _is_tensor(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(k), str) for k in ("type", "sha256"))
        and isinstance(entry.get("shape"), list)
        and isinstance(entry.get("origin"), dict)
    )


def _outputs(out: Path, entries: list[dict[str, Any]]) -> Check:
    """Files of the output by their hashes. The one that was given may have been renamed; the others are beside it."""
    wrong: list[str] = []
    found = 0
    folder = out if out.is_dir() else out.parent
    for k, entry in enumerate(entries):
        path = folder / Path(entry["name"]).name
        if k == 0 and out.is_file() and all(e["name"] != out.name for e in entries):
            path = out
        if not is_file(path):
            wrong.append(f"{entry['name']} is not there")
        elif (got := sha256(path)) != entry["sha256"]:
            wrong.append(f"{path.name}: SHA-256 {got}, the manifest says {entry['sha256']}")
        else:
            found += 1
    return Check("output", not wrong and found > 0, f"{found} of {len(entries)} files have their SHA-256", tuple(wrong))


def stored_tensors(ck: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a file as it stores them: fused, transposed and padded as its format does."""
    if ck.config.arch not in ARCHS:
        return ck.tensors
    target = formats.targets(formats.by_name(ck.source.format), ck, WriteOptions())[0]
    return write_rows(target.layout, ck.config, ck.tensors, target.n_padding)


def _digest(rows: Callable[[int, int], Any], n_rows: int, width: int, step: Callable[[int], object] | None) -> str:
    total, size = hashlib.sha256(), max(CHUNK // max(width, 1), 1)
    for lo in range(0, n_rows, size):
        data = rows(lo, min(lo + size, n_rows))
        total.update(memoryview(data).cast("B") if data.flags.c_contiguous else data.tobytes())
        if step:
            step(data.nbytes)
    return total.hexdigest()


def _tensors(
    stored: Mapping[str, Tensor], entries: Mapping[str, Any], step: Callable[[int], object] | None
) -> tuple[Check, list[str]]:
    wrong: list[str] = []
    for name, entry in entries.items():
        t = stored.get(name)
        if t is None:
            wrong.append(f"{name} is not there")
        elif (list(t.shape), t.type.name) != (entry["shape"], entry["type"]):
            wrong.append(f"{name}: {t.type.name} {list(t.shape)}, the manifest says {entry['type']} {entry['shape']}")
        elif _digest(t.rows, t.n_rows, t.row_bytes, step) != entry["sha256"]:
            wrong.append(f"{name} has other bytes")
    says = f"{len(entries) - len(wrong)} of {len(entries)} have their SHA-256"
    return Check("tensors", not wrong and bool(entries), says, tuple(wrong)), [n for n in stored if n not in entries]


def _find(
    entries: list[dict[str, Any]], named: Mapping[str, Path], places: Iterable[Path]
) -> tuple[dict[str, Path], list[str]]:
    """Source files by name, and the names that are nowhere."""
    found: dict[str, Path] = {}
    for entry in entries:
        name = Path(entry["name"]).name
        for path in (*([named[name]] if name in named else []), *(p / name for p in places)):
            if is_file(path):
                found[entry["name"]] = path
                break
    if len(named) == 1 and len(entries) == 1 and not found:
        found[entries[0]["name"]] = next(iter(named.values()))
    return found, [e["name"] for e in entries if e["name"] not in found]


def _sources(found: Mapping[str, Path], entries: list[dict[str, Any]]) -> Check:
    wrong = [
        f"{path.name}: SHA-256 {got}, the manifest says {entry['sha256']}"
        for entry in entries
        if (got := sha256(path := found[entry["name"]])) != entry["sha256"]
    ]
    says = f"{len(entries) - len(wrong)} of {len(entries)} files have their SHA-256"
    return Check("source", not wrong, says, tuple(wrong))


def _opened(stack: ExitStack, path: Path) -> File:
    file = File(path)
    stack.callback(file.close)
    return file


def _recipes(entries: Mapping[str, Any], files: Mapping[str, File]) -> tuple[Check, list[str]]:
    """Carry out every recipe; its result must have the hash that the tensor has."""
    wrong: list[str] = []
    bare: list[str] = []
    for name, entry in entries.items():
        if is_bare(entry["origin"]):
            bare.append(name)
            continue
        try:
            node: Node = redo(entry["origin"], files, name)
            if (list(node.shape), node.type.name) != (entry["shape"], entry["type"]):
                wrong.append(f"{name}: the recipe makes {node.type.name} {list(node.shape)}")
            elif _digest(node.rows, node.n_rows, node.width, None) != entry["sha256"]:
                wrong.append(f"{name}: the recipe makes other bytes")
        except CkptError as e:
            wrong.append(f"{name}: {' '.join(str(e).split())}")
    n = len(entries) - len(bare)
    says = f"{n - len(wrong)} of {n} tensors follow from the source's bytes"
    return Check("recipes", not wrong, says, tuple(wrong)), bare

"""The pipeline: open, change arch and pairing, lay out, encode, write; and the report of what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import formats
from .arch import ARCHS, MTP, ROPE_FACTORS, arch_of, as_arch, check_model, leave_out, template, with_pairing
from .checkpoint import Checkpoint
from .errors import LossyError, UnsupportedError, blaming
from .files import Bytes, check_outputs
from .formats.options import FLAGS, ReadOptions, Target, WriteOptions
from .layout import at, indices, write_rows
from .quant import policy
from .quant.encode import ErrorStats, decode_rows, decode_wide, encode, finite, prepare
from .quant.types import PLAIN, QType
from .tensor import Tensor

MTP_WAYS = ("sidecar", "drop")  # with extra prediction heads that the target has no place for
Progress = Callable[[int], None]  # called with the number of bytes just written


@dataclass(frozen=True)
class Stored:
    """One tensor of the output: shape, type before and after, and the error of the change, 0 where bytes were kept."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    type: str
    nbytes: int
    stats: ErrorStats | None = field(default=None, repr=False)

    @property
    def max_error(self) -> float:
        """Largest absolute difference from the source."""
        return self.stats.max_error if self.stats else 0.0

    @property
    def rms_error(self) -> float:
        """Root mean square difference from the source."""
        return self.stats.rms if self.stats else 0.0


@dataclass(frozen=True)
class Report:
    """What a conversion did: files written, what was filled, permuted or left out (`done`), and assumed (`notes`)."""

    source: Path
    paths: tuple[Path, ...]
    source_format: str
    format: str
    version: str
    arch: str
    mixture: str
    tensors: tuple[Stored, ...]
    done: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files written."""
        return sum(p.stat().st_size for p in self.paths if p.is_file())

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        return {
            "source": str(self.source),
            "source_format": self.source_format,
            "paths": [str(p) for p in self.paths],
            "format": self.format,
            "version": self.version,
            "arch": self.arch,
            "type": self.mixture,
            "bytes": self.nbytes,
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "source_type": t.source_type,
                    "type": t.type,
                    "bytes": t.nbytes,
                    "max_error": t.max_error,
                    "rms_error": t.rms_error,
                }
                for t in self.tensors
            ],
            "done": list(self.done),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Options:
    """What a conversion may be told; None and "" mean: find out."""

    source_format: str = ""
    format: str = ""
    arch: str = ""
    type: str = ""
    pure: bool = False
    mtp: str = "sidecar"
    drop: tuple[str, ...] = ()
    force: bool = False
    allow_nonfinite: bool = False
    manifest: Path | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    write: WriteOptions = field(default_factory=WriteOptions)


def convert(
    src: str | Path, dst: str | Path, options: Options | None = None, progress: Callable[[int], Progress] | None = None
) -> Report:
    """Convert a checkpoint; `progress` is given the bytes to come and returns what is called with each piece of them.

    Raises a CkptError and leaves nothing at `dst` where the input is broken, the target cannot hold the model, or
    information would be lost that no option gave up.
    """
    src, dst, options = Path(src), Path(dst), options or Options()
    if options.mtp not in MTP_WAYS:
        raise UnsupportedError(
            "no such way with extra heads", at="mtp", expected=" or ".join(MTP_WAYS), got=options.mtp
        )
    with blaming(src):  # errors of what knows the tensor but not the file
        return _convert(src, dst, options, progress)


def _convert(src: Path, dst: Path, options: Options, progress: Callable[[int], Progress] | None) -> Report:
    if wanted := policy.MIXTURES.get(options.type.upper()):
        prepare(wanted.base)
    with formats.open(src, options.source_format, options.read) as ck:
        module = formats.by_name(options.format) if options.format else target_format(dst, ck, options)
        check_outputs((dst, options.manifest) if options.manifest else (dst,), ck.source.paths, options.force)
        if not hasattr(module, "write"):
            raise UnsupportedError(f"{module.NAME} files can be read but not written", path=dst)
        return write(ck, module, dst, options, progress)


def target_format(dst: Path, ck: Checkpoint, options: Options) -> ModuleType:
    """The format that the output's name stands for; for .bin the one that the model came from or can be held by."""
    suffix = dst.suffix.lower()
    named = [formats.by_name(name) for name, usual in formats.FORMATS.items() if suffix == usual]
    fitting = [m for m in named if hasattr(m, "write")]
    if len(fitting) > 1:
        arch = options.arch or ck.config.arch
        came_from = formats.options.origin(ck.source, "source_format") or ck.source.format
        fitting = [m for m in fitting if came_from == m.NAME] or [m for m in fitting if arch in m.LAYOUTS]
    if len(fitting) == 1:
        return fitting[0]
    if not suffix:
        return formats.by_name("safetensors")
    raise UnsupportedError(
        "the output's name does not say which format",
        path=dst,
        got=f"{suffix!r}" + (f", arch {ck.config.arch}" if fitting else ""),
        expected=", ".join(f"{formats.FORMATS[n]} ({n})" for n in [m.NAME for m in fitting] or formats.FORMATS),
        hint="pass --to NAME",
    )


def write(
    ck: Checkpoint, module: ModuleType, dst: Path, options: Options, progress: Callable[[int], Progress] | None = None
) -> Report:
    """Write an open checkpoint in a format."""
    original = ck
    _check_options(module, options.write, dst)
    notes = list(dict.fromkeys((*ck.source.notes, *(ck.tokenizer.notes if ck.tokenizer else ()))))
    if ck.config.arch not in ARCHS or not ck.tensors:
        if ck.source.format != module.NAME or options.arch or options.type:
            arch_of(ck, "converting")
        _check_vocabulary(ck, module, options)
        return _copy(ck, module, dst, options, progress)
    check_model(ck)
    ck, done = as_arch(ck, options.arch, options.drop) if options.arch else (ck, [])
    if ck.config.arch not in module.LAYOUTS:
        raise UnsupportedError(
            f"{module.NAME} has no place for arch {ck.config.arch}",
            path=original.source.paths[0],
            expected=", ".join(module.LAYOUTS),
            got=ck.config.arch,
            hint="--arch names another arch with the same mathematics",
        )
    _check_vocabulary(ck, module, options)
    heads = {name: t for name, t in ck.tensors.items() if template(name) in MTP}
    pairing = module.LAYOUTS[ck.config.arch].rope_pairing
    if pairing and pairing != ck.config.rope_pairing:
        done.append(f"permuted q and k from {ck.config.rope_pairing} to {pairing} rotary pairs")
    ck = with_pairing(ck, pairing)
    target, stored = _plan(ck, module, options)
    ck, beside = _mtp(ck, heads, target, module, options, done)
    if beside:
        from .formats import sidecar

        check_outputs((sidecar.path_for(dst),), original.source.paths, options.force)
    holds = target.layout.holds()
    said = ROPE_FACTORS if ck.config.rope_scaling else {}  # the config says what these hold
    gone = [n for n in ck.tensors if template(n) not in holds and n not in beside and n not in said]
    done += leave_out(ck, gone, options.drop, f"{module.NAME} ({ck.config.arch})")
    notes += module.notes(ck) if hasattr(module, "notes") else ()
    encoded, lines = _encode(stored, _types(ck, module, target, stored, options), options, done)
    total = sum(t.nbytes for t in encoded.values())
    if progress:
        step = progress(total + sum(t.nbytes for t in beside.values()))
        encoded, beside = (
            {n: _counted(t, step) for n, t in encoded.items()},
            {n: _counted(t, step) for n, t in beside.items()},
        )
    manifest = None
    if options.manifest:
        from .manifest import Recorder

        manifest = Recorder(original, encoded)
    digest = ""
    if beside:
        digest = sidecar.digest(beside)
        ck = replace(ck, source=replace(ck.source, metadata={**ck.source.metadata, "mtp_sha256": digest}))
    mixture = options.type or target.mixture
    edited = original.source.format == module.NAME and not options.arch and not options.type
    write_options = replace(
        options.write,
        version=target.version,
        mixture=mixture if options.type else "",
        complete=not edited or options.read != ReadOptions(),
    )
    if hasattr(module, "outputs"):
        made = module.outputs(ck, encoded, dst, write_options)
        check_outputs([p for p in made if p != dst], original.source.paths, options.force)
    written = module.write(ck, manifest.tensors if manifest else encoded, dst, write_options)
    if beside:  # last: what refuses the model leaves no heads of it
        written = (*written, sidecar.write(beside, dst, digest))
    if manifest and options.manifest:
        manifest.save(options.manifest, written)
    return Report(
        original.source.paths[0],
        written,
        original.source.format,
        module.NAME,
        target.version,
        ck.config.arch,
        mixture,
        tuple(lines),
        tuple(done),
        tuple(notes),
    )


def _check_options(module: ModuleType, given: WriteOptions, dst: Path) -> None:
    """Refuse what the format would not heed."""
    for name, flags in FLAGS.items():
        if getattr(given, name) and name not in getattr(module, "OPTIONS", ()):
            heeding = [n for n in formats.FORMATS if name in getattr(formats.by_name(n), "OPTIONS", ())]
            raise UnsupportedError(
                f"{module.NAME} files have no place for what {flags} asks", path=dst, at=flags,
                expected=" or ".join(heeding), got=module.NAME,
                hint="leave it out, or convert to one of those with it first",
            )  # fmt: skip


def _check_vocabulary(ck: Checkpoint, module: ModuleType, options: Options) -> None:
    """Refuse a malformed vocabulary before anything is written: as the format will hold it, or as it was read."""
    if hasattr(module, "check_vocabulary"):
        module.check_vocabulary(ck, options.write)
    elif ck.tokenizer is not None:
        ck.tokenizer.check_vocabulary()


def _plan(ck: Checkpoint, module: ModuleType, options: Options) -> tuple[Target, dict[str, Tensor]]:
    """The first way of storing that has the type asked for or, without one, that holds every value exactly."""
    kind = options.type.lower()
    ways = formats.targets(module, ck, replace(options.write, mixture=kind))
    if kind:
        ways = [w for w in ways if w.mixture in ("", kind)]
        if not ways:
            raise UnsupportedError(
                f"{module.NAME} cannot store this type",
                path=ck.source.paths[0],
                expected=", ".join(module.MIXTURES),
                got=options.type,
            )
    for way in ways:
        stored = write_rows(way.layout, ck.config, ck.tensors, way.n_padding)
        if ck.source.format == module.NAME and ck.source.order:
            place = {name: k for k, name in enumerate(ck.source.order)}
            stored = dict(sorted(stored.items(), key=lambda entry: place.get(entry[0], len(place))))
        types = _types(ck, module, way, stored, options)
        if kind or options.write.version or all(_exact(t, types[name]) for name, t in stored.items()):
            return way, stored
    raise LossyError(
        f"{module.NAME} has no type that holds every value exactly",
        path=ck.source.paths[0],
        expected=", ".join(w.mixture for w in ways),
        got=", ".join(sorted({t.type.name for t in ck.tensors.values()})),
        hint="pass --type to accept the rounding; the report will say how much it is",
    )


def _types(
    ck: Checkpoint, module: ModuleType, target: Target, stored: Mapping[str, Tensor], options: Options
) -> dict[str, QType]:
    """Planned types; a layout row that fixes its type has the last word."""
    types: dict[str, QType] = module.plan(ck.config, stored, options.type.lower() or target.mixture, options.pure)
    for row in target.layout.rows:
        if row.type is not None:
            for index in indices(row, ck.config):
                types[at(row.theirs or " + ".join(row.ours), index)] = row.type
    return types


def _exact(t: Tensor, type: QType) -> bool:
    """Whether storing a tensor as `type` loses nothing; reads only where it depends on the values."""
    if t.type == type or (type == QType.F32 and t.type != QType.F64) or (type == QType.F64 and t.type in PLAIN):
        return True
    if type not in PLAIN or t.type not in PLAIN:
        return False
    kept = encode(t, type, allow_nonfinite=True)
    for lo, rows in t.chunks(1 << 20):
        back = decode_rows(kept.rows(lo, lo + len(rows)), type)
        values = decode_wide(rows, t.type)
        if not np.array_equal(back.astype(values.dtype), values):
            return False
    return True


def _mtp(
    ck: Checkpoint, heads: Mapping[str, Tensor], target: Target, module: ModuleType, options: Options, done: list[str]
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Extra prediction heads: into the layout if it has a place, else beside the output, else dropped by name."""
    c, extra = ck.config, ck.config.n_mtp_head - 1
    if not extra:
        return ck, {}
    if options.mtp == "drop":
        done.append(f"left out {extra} extra prediction heads (--mtp drop)")
        kept = {n: t for n, t in ck.tensors.items() if template(n) not in MTP}
        return replace(ck, config=replace(c, n_mtp_head=1), tensors=kept), {}
    if len(heads) < extra:
        from .formats import sidecar

        raise LossyError(
            "extra prediction heads belong to this model and are not here",
            path=ck.source.paths[0],
            expected=f"{extra} heads",
            got=f"{len(heads)}",
            hint=f"put {sidecar.path_for(ck.source.paths[0]).name} beside it, or pass --mtp drop",
        )
    if any(row.ours[0] in MTP for row in target.layout.rows):
        return ck, {}
    if not getattr(module, "SIDECAR", False):
        return ck, {}
    done.append(
        f"wrote {extra} extra prediction heads beside it, where ckptkit finds them and other engines do not look"
    )
    return ck, dict(heads)


def _encode(
    stored: Mapping[str, Tensor], types: Mapping[str, QType], options: Options, done: list[str]
) -> tuple[dict[str, Tensor], list[Stored]]:
    """Tensors as they will be written, and a line on each; values are checked as they stream through."""
    encoded, lines = {}, []
    for name, t in stored.items():
        stats = ErrorStats() if types[name] != t.type else None
        out = encode(t, types[name], name, options.allow_nonfinite, stats)
        encoded[name] = out if stats or options.allow_nonfinite else finite(out, name)
        lines.append(Stored(name, t.shape, t.type.name, types[name].name, out.nbytes, stats))
    changed = sum(1 for s in lines if s.stats)
    if changed:
        done.append(f"encoded {changed} of {len(lines)} tensors anew")
    return encoded, lines


def _counted(t: Tensor, step: Progress) -> Tensor:
    inner = t.rows

    def rows(lo: int, hi: int) -> Bytes:
        data = inner(lo, hi)
        step(data.nbytes)
        return data

    return replace(t, rows=rows)


def _copy(
    ck: Checkpoint, module: ModuleType, dst: Path, options: Options, progress: Callable[[int], Progress] | None
) -> Report:
    """Rewrite a file of a foreign arch, or a vocabulary alone: tensors as they are, keys edited."""
    tensors: dict[str, Tensor] = dict(ck.tensors)
    if progress:
        step = progress(sum(t.nbytes for t in tensors.values()))
        tensors = {n: _counted(t, step) for n, t in tensors.items()}
    written = module.write(ck, tensors, dst, options.write)
    lines = tuple(Stored(n, t.shape, t.type.name, t.type.name, t.nbytes) for n, t in ck.tensors.items())
    arch = ck.config.arch or "no architecture"
    done = (f"copied every tensor as it is ({arch})",)
    return Report(
        ck.source.paths[0], written, ck.source.format, module.NAME, "", arch, "", lines, done, ck.source.notes
    )

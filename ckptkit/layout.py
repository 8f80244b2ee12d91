"""How one format stores one arch: a table of rows, used to read and to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .arch import ARCHS, ORDER, PADDING, expand
from .checkpoint import Config
from .files import File
from .quant.types import QType, row_bytes
from .tensor import Tensor, cat, cut, from_file, pad, transpose


@dataclass(frozen=True)
class Row:
    """One stored tensor: the canonical templates it holds (several: fused along tensor rows), and how it is stored."""

    ours: tuple[str, ...]
    theirs: str = ""  # template of the stored name; "" where the position is the name
    transposed: bool = False  # stored (in, out)
    padded: str = ""  # template of the tensor that holds the rows past the real ones
    type: QType | None = None  # where it differs from the file's type


@dataclass(frozen=True)
class Layout:
    """The rows of a format for one arch, and the RoPE pairing that the format's readers take for granted."""

    rows: tuple[Row, ...]
    rope_pairing: str = ""
    # True: output never stored; False: always stored (a tied one is written again); None: as it is
    tied: bool | None = None

    def holds(self) -> set[str]:
        """Canonical templates that have a place."""
        return {name for row in self.rows for name in (*row.ours, *([row.padded] if row.padded else []))}


@dataclass(frozen=True)
class Place:
    """Where a stored tensor lies: its layout row, its index ({i} or {j}), offset, stored shape and type."""

    row: Row
    index: int | None
    offset: int
    shape: tuple[int, ...]
    type: QType


def identity(arch: str, rope_pairing: str = "", fused: Mapping[str, tuple[str, ...]] | None = None) -> Layout:
    """A layout whose stored names are the canonical ones, except for `fused` ones."""
    parts = {p: (theirs, ours) for theirs, ours in (fused or {}).items() for p in ours}
    rows: dict[str, Row] = {}
    for template in ORDER:
        if template in ARCHS[arch].tensors and template not in (*PADDING, "mtp.{j}.weight"):
            theirs, ours = parts.get(template, (template, (template,)))
            rows.setdefault(theirs, Row(ours, theirs))
    return Layout(tuple(rows.values()), rope_pairing)


def stored_shape(row: Row, config: Config, n_padding: int = 0) -> tuple[int, ...]:
    """Shape in the file: parts stacked along the first axis, padding rows after them, axes exchanged if transposed."""
    dims = config.dims()
    shapes = [tuple(dims[d] for d in ARCHS[config.arch].tensors[name]) for name in row.ours]
    shape = (sum(s[0] for s in shapes) + (n_padding if row.padded else 0), *shapes[0][1:])
    return shape[::-1] if row.transposed else shape


def indices(row: Row, config: Config) -> Sequence[int | None]:
    """The values of {i} or {j} in a row; [None] where it has neither."""
    if "{i}" in row.ours[0]:
        return range(config.n_layer)
    if "{j}" in row.ours[0]:
        return range(1, config.n_mtp_head)
    return [None]


def end_of(layout: Layout, config: Config, start: int, type: QType, n_padding: int = 0) -> int:
    """Where `places` would end, without listing them: a header may claim two billion layers."""
    return start + sum(n * nbytes for *_, n, nbytes in _slabs(layout, config, type, n_padding))


def _slabs(
    layout: Layout, config: Config, type: QType, n_padding: int
) -> Iterator[tuple[Row, tuple[int, ...], QType, int, int]]:
    """(row, stored shape, type, copies, bytes of a copy) of the rows that such a model stores."""
    for row in layout.rows:
        if not (config.tied_output and row.ours == ("output.weight",)):
            shape, kind = stored_shape(row, config, n_padding), type if row.type is None else row.type
            yield row, shape, kind, len(indices(row, config)), prod(shape[:-1]) * row_bytes(kind, shape[-1])


def places(layout: Layout, config: Config, start: int, type: QType, n_padding: int = 0) -> tuple[list[Place], int]:
    """Walk a sequential file, slab by slab; every place and the offset at which the file must end."""
    found, offset = [], start
    for row, shape, kind, _, nbytes in _slabs(layout, config, type, n_padding):
        for index in indices(row, config):
            found.append(Place(row, index, offset, shape, kind))
            offset += nbytes
    return found, offset


def unpack(row: Row, config: Config, stored: Tensor, index: int | None) -> Iterator[tuple[str, Tensor]]:
    """The canonical tensors in one stored tensor: axes exchanged back, fused parts and padding cut apart."""
    t = transpose(stored) if row.transposed else stored
    dims, lo = config.dims(), 0
    for name in row.ours:
        shape = tuple(dims[d] for d in ARCHS[config.arch].tensors[name])
        hi = lo + shape[0]
        # another shape is for the checks to see, not to cut
        whole = (lo == 0 and t.n_rows <= hi) or t.shape[1:] != shape[1:]
        yield at(name, index), t if whole else cut(t, lo, hi)
        lo = hi
    if row.padded and lo < t.n_rows:
        yield row.padded, cut(t, lo, t.n_rows)


def pack(row: Row, tensors: Mapping[str, Tensor], index: int | None, n_padding: int = 0) -> Tensor | None:
    """One stored tensor from the canonical ones; None where the model has none of them."""
    parts = [tensors.get(at(name, index)) for name in row.ours]
    if parts[0] is None and row.ours == ("output.weight",):
        parts = [tensors["token_embd.weight"]]
    present = [p for p in parts if p is not None]
    if len(present) < len(parts):
        return None
    t = cat(present)
    if row.padded and n_padding:
        t = cat([t, tensors[row.padded]]) if row.padded in tensors else pad(t, t.n_rows + n_padding)
    return transpose(t) if row.transposed else t


def read_sequential(found: list[Place], config: Config, file: File) -> dict[str, Tensor]:
    """Canonical tensors of a file in which the position is the name."""
    tensors: dict[str, Tensor] = {}
    for p in found:
        stored = from_file(file, p.offset, p.shape, p.type, at=" + ".join(at(n, p.index) for n in p.row.ours))
        tensors.update(unpack(p.row, config, stored, p.index))
    return in_order(tensors, config)


def read_named(layout: Layout, config: Config, fetch: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Canonical tensors of a file that names its tensors; rows whose stored tensor is absent are left out."""
    tensors: dict[str, Tensor] = {}
    for row in layout.rows:
        for index in indices(row, config):
            stored = fetch(at(row.theirs, index))
            if stored is not None:
                tensors.update(unpack(row, config, stored, index))
    return in_order(tensors, config)


def write_rows(layout: Layout, config: Config, tensors: Mapping[str, Tensor], n_padding: int = 0) -> dict[str, Tensor]:
    """Stored tensors in file order, by stored name (or by the canonical template where the position is the name)."""
    stored: dict[str, Tensor] = {}
    for row in layout.rows:
        if row.ours == ("output.weight",) and (layout.tied or (layout.tied is None and "output.weight" not in tensors)):
            continue
        for index in indices(row, config):
            t = pack(row, tensors, index, n_padding)
            if t is not None:
                stored[at(row.theirs or " + ".join(row.ours), index)] = t
    return stored


def in_order(tensors: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The same tensors in canonical order, names that the arch does not know last."""
    ordered: dict[str, Tensor] = {}
    per_layer = [t for t in ORDER if "{i}" in t]
    for template in ORDER:
        if template == per_layer[0]:
            names = [at(t, i) for i in range(config.n_layer) for t in per_layer]
        elif template in per_layer:
            continue
        else:
            names = list(expand(template, config))
        ordered.update((n, tensors[n]) for n in names if n in tensors)
    return ordered | tensors


def at(template: str, index: int | None) -> str:
    """A template with its index filled in."""
    return template if index is None else template.replace("{i}", str(index)).replace("{j}", str(index))

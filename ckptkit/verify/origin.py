"""The recipes of a manifest, carried out again from the bytes of the source files, and by nothing that converted them.

A recipe is a tree of {"op": ...}; every node has rows of encoded bytes, read when asked for:

bytes        file, offset, shape, type             rows as they lie in the file
cut          rows [lo, hi], of                     some of the rows
cat          of [...]                              rows one after another
permute      head_dim, to ("half"|"adjacent"), of  rows of each head in the other rotary order
transpose    of                                    columns as rows
constant     value, shape, type                    one value
encode       type, of                              decoded and encoded as another type
int8_groups  file, offset, scales, group, shape    int8 values times a float32 scale for each group
json         file, key, shape                      a list of lists of numbers, as float64
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..errors import FormatError
from ..files import Bytes, File
from ..quant.encode import encode
from ..quant.types import BLOCKS, PLAIN, QType, row_bytes
from ..tensor import Tensor

DEPTH = 64  # of a tree; ours are at most six deep
LIMIT = 2**40  # values in a tensor
FILLED = 2**26  # values of a constant, which unlike all others take no bytes in a file
ONE = {QType.F32: "<f4", QType.F16: "<f2", QType.F64: "<f8"}


@dataclass(frozen=True)
class Node:
    """A tensor that a recipe makes: shape, type, and rows(lo, hi) as uint8 (hi - lo, width)."""

    shape: tuple[int, ...]
    type: QType
    rows: Callable[[int, int], Bytes]

    @property
    def elements(self) -> int:
        """Values in a row; a vector of a plain type has one in each."""
        return self.shape[-1] if len(self.shape) > 1 or BLOCKS[self.type].elements > 1 else 1

    @property
    def n_rows(self) -> int:
        """Rows."""
        return prod(self.shape) // self.elements if self.elements else 0

    @property
    def width(self) -> int:
        """Bytes in a row."""
        return row_bytes(self.type, self.elements)


def build(recipe: Any, files: Mapping[str, File], depth: int = 0) -> Node:
    """The node of a recipe. KeyError, TypeError and ValueError mean that it is no recipe; see `redo` for the rest."""
    if depth > DEPTH:
        raise ValueError("nested too deep")
    op = recipe["op"]
    if op in LEAVES:
        shape = tuple(int(n) for n in recipe["shape"])
        if not shape or min(shape) < 0 or prod(shape) > LIMIT:
            raise ValueError(f"shape {shape}")
        return LEAVES[op](recipe, shape, files)
    if op == "cat":
        return _cat([build(part, files, depth + 1) for part in recipe["of"]])
    return INNER[op](recipe, build(recipe["of"], files, depth + 1))


def _bytes(recipe: Any, shape: tuple[int, ...], files: Mapping[str, File]) -> Node:
    file, offset, kind = files[recipe["file"]], int(recipe["offset"]), QType[recipe["type"]]
    if shape[-1] % BLOCKS[kind].elements:
        raise ValueError(f"rows of {shape[-1]} values in {kind.name}")
    node = Node(shape, kind, lambda lo, hi: file.read(offset + lo * width, (hi - lo) * width).reshape(hi - lo, width))
    width = node.width
    file.require(offset, node.n_rows * width, "source bytes of a manifest")
    return node


def _constant(recipe: Any, shape: tuple[int, ...], _files: Mapping[str, File]) -> Node:
    kind, value = QType[recipe["type"]], float(recipe["value"])
    if prod(shape) > FILLED or shape[-1] % BLOCKS[kind].elements:
        raise ValueError(f"{kind.name} of shape {shape}")
    bits = b"\0"  # zero is zeros, in blocks too
    if value:
        with np.errstate(over="ignore"):
            bits = np.float32(value).tobytes()[2:] if kind == QType.BF16 else np.array(value, ONE[kind]).tobytes()
    one = np.frombuffer(bits, np.uint8)
    node = Node(shape, kind, lambda lo, hi: np.tile(one, (hi - lo, node.width // len(one))))
    return node


def _int8_groups(recipe: Any, shape: tuple[int, ...], files: Mapping[str, File]) -> Node:
    file, offset, scales, group = files[recipe["file"]], *(int(recipe[k]) for k in ("offset", "scales", "group"))
    width = shape[-1]
    if group < 1 or prod(shape) % group:
        raise ValueError(f"groups of {group}")
    file.require(offset, prod(shape))
    file.require(scales, 4 * (prod(shape) // group))

    def rows(lo: int, hi: int) -> Bytes:
        q = file.read(offset + lo * width, (hi - lo) * width).view(np.int8).astype(np.float32)
        number = np.arange(lo * width, hi * width) // group
        first = int(number[0])
        s = file.read(scales + 4 * first, 4 * (int(number[-1]) + 1 - first)).view("<f4")
        out: Bytes = (q * s[number - first]).astype("<f4").view(np.uint8).reshape(hi - lo, 4 * width)
        return out

    return Node(shape, QType.F32, rows)


@lru_cache(maxsize=1)
def _parsed(file: File) -> Any:
    body = json.loads(file.read(0, file.size).tobytes())
    return body.get("state_dict", body)


def _json(recipe: Any, shape: tuple[int, ...], files: Mapping[str, File]) -> Node:
    a = np.array(_parsed(files[recipe["file"]])[recipe["key"]], "<f8")
    if a.shape != shape:
        raise ValueError(f"shape {a.shape}")
    data = a.view(np.uint8).reshape(shape[0], -1)
    return Node(shape, QType.F64, lambda lo, hi: data[lo:hi])


def _cut(recipe: Any, of: Node) -> Node:
    first, last = (int(n) for n in recipe["rows"])
    if not 0 <= first <= last <= of.n_rows:
        raise ValueError(f"rows {first} to {last} of {of.n_rows}")
    shape = (last - first, *of.shape[1:])
    return Node(shape, of.type, lambda lo, hi: of.rows(first + lo, first + hi))


def _cat(parts: list[Node]) -> Node:
    first = parts[0]
    if any((p.type, p.elements) != (first.type, first.elements) for p in parts):
        raise ValueError("parts of different types or row lengths")

    def rows(lo: int, hi: int) -> Bytes:
        out, start = np.empty((hi - lo, first.width), np.uint8), 0
        for p in parts:
            a, b = max(lo, start), min(hi, start + p.n_rows)
            if a < b:
                out[a - lo : b - lo] = p.rows(a - start, b - start)
            start += p.n_rows
        return out

    return Node((sum(p.n_rows for p in parts), *first.shape[1:]), first.type, rows)


def _permute(recipe: Any, of: Node) -> Node:
    head_dim, to = int(recipe["head_dim"]), recipe["to"]
    if head_dim < 2 or head_dim % 2 or of.n_rows % head_dim or to not in ("half", "adjacent"):
        raise ValueError(f"heads of {head_dim} rows to {to}")

    def rows(lo: int, hi: int) -> Bytes:
        head, k = np.divmod(np.arange(lo, hi), head_dim)
        half = head_dim // 2
        # halves hold rows 0 2 4 ... 1 3 5 ... of adjacent pairs
        source = k % half * 2 + k // half if to == "half" else k % 2 * half + k // 2
        index = head * head_dim + source
        first = int(index.min())
        out: Bytes = of.rows(first, int(index.max()) + 1)[index - first]
        return out

    return Node(of.shape, of.type, rows)


def _transpose(_recipe: Any, of: Node) -> Node:
    if len(of.shape) != 2 or of.type not in PLAIN:
        raise ValueError(f"{of.type.name} of {len(of.shape)} axes")
    n, m = of.shape
    item = of.width // m if m else 0

    def rows(lo: int, hi: int) -> Bytes:
        out = np.empty((hi - lo, n, item), np.uint8)
        step = max((16 << 20) // max(of.width, 1), 1)
        for a in range(0, n, step):
            b = min(a + step, n)
            out[:, a:b] = of.rows(a, b).reshape(b - a, m, item)[:, lo:hi].swapaxes(0, 1)
        return out.reshape(hi - lo, n * item)

    return Node((m, n), of.type, rows)


def _encode(recipe: Any, of: Node) -> Node:
    t = encode(Tensor(of.shape, of.type, of.rows), QType[recipe["type"]], allow_nonfinite=True)
    return Node(t.shape, t.type, t.rows)


LEAVES = {"bytes": _bytes, "constant": _constant, "int8_groups": _int8_groups, "json": _json}
INNER = {"cut": _cut, "permute": _permute, "transpose": _transpose, "encode": _encode}


def redo(recipe: Any, files: Mapping[str, File], name: str) -> Node:
    """`build`, with every way in which a recipe can be wrong as a FormatError."""
    try:
        return build(recipe, files)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
        raise FormatError("the manifest holds a recipe that cannot be carried out", at=f"tensor {name}", got=e) from e


def is_bare(recipe: Any, depth: int = 0) -> bool:
    """Whether some leaf of a tree is {}: a tensor that was in memory, not in a file."""
    if depth > DEPTH or not isinstance(recipe, dict):
        return False
    of = recipe.get("of")
    if recipe == {}:
        return True
    return any(is_bare(p, depth + 1) for p in of) if isinstance(of, list) else of is not None and is_bare(of, depth + 1)

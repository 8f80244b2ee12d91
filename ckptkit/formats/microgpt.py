"""microgpt as JSON: what json.dump of its state_dict gives, with or without its sizes and characters.

| form   | object                                                                                                     |
|--------|------------------------------------------------------------------------------------------------------------|
| flat   | {"n_layer", "n_embd", "n_head", "block_size", "vocab_size", "bos", "uchars", ..., "state_dict": {...}}     |
| nested | {"config": {sizes}, "uchars": "...", "state_dict": {...}}                                                  |
| bare   | {name: rows}, the state_dict alone: characters are not stored, and the number of heads is taken to be four |

Numbers are Python floats, written by repr, so that float64 survives. A file is written back in the form, with the keys
and in the order in which it was read. The whole text is held in memory, which is why its size is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint import Checkpoint, Source
from ..errors import FormatError, UnsupportedError, brief, printable
from ..files import File, replacing
from ..layout import read_named
from ..quant.types import QType
from ..tensor import Tensor, from_array
from .microgpt_model import LAYOUT, SIZES, config_from, expected_shapes, stated_by, tokenizer_from
from .options import ReadOptions, WriteOptions, uniform

NAME = "microgpt"
LAYOUTS = {"microgpt": LAYOUT}
MIXTURES = ("f64",)
LIMIT = 256 << 20  # bytes of text
SIGN = re.compile(rb'"(state_dict|wte)"\s*:\s*[\[{]|"uchars"\s*:\s*["\[]')
plan = uniform


def detect(_path: Path, head: bytes, _size: int) -> bool:
    """A JSON object that begins with sizes, characters or the embedding of a microgpt."""
    return head.lstrip()[:1] == b"{" and SIGN.search(head) is not None


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Read the JSON; FormatError where it is not a state_dict of matrices that fit each other."""
    file = File(path)
    try:
        if file.size > LIMIT:
            raise UnsupportedError(
                "the JSON is too large", path=path, expected=f"{LIMIT:,} bytes", got=f"{file.size:,}"
            )
        whole = _parse(path, file.read(0, file.size).tobytes())
    finally:
        file.close()
    bare = "state_dict" not in whole
    state = whole if bare else whole["state_dict"]
    if not isinstance(state, dict):
        raise FormatError("state_dict is not an object", path=path, offset=0, at="state_dict", got=type(state).__name__)
    stated = {} if bare else _stated(path, whole)
    notes: list[str] = []
    arrays = {name: _matrix(path, name, rows) for name, rows in state.items()}
    config = config_from(path, {name: a.shape for name, a in arrays.items()}, stated, options, notes)
    tensors = read_named(LAYOUT, config, lambda name: _tensor(path, name, arrays[name]))
    tokenizer = None if options.tokenizer else tokenizer_from(path, stated, config, notes)
    # the object with names only in place of the tensors: what a writer fills in again
    template = {"state_dict": list(state)} if bare else whole | {"state_dict": list(state)}
    form = "bare" if bare else "nested" if "config" in whole else "flat"
    source = Source((path,), NAME, form, {"template": template}, tuple(notes))
    return Checkpoint(config, tensors, tokenizer, source)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    what, expected = "not valid JSON", "the JSON of a microgpt"
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as e:
        raise FormatError(what, path=path, offset=e.start, expected=expected, got=f"no UTF-8 ({e.reason})") from e
    except json.JSONDecodeError as e:
        at = len(e.doc[: e.pos].encode())
        raise FormatError(
            what, path=path, offset=at, expected=expected, got=e.msg, hint="the file was cut or edited by hand"
        ) from e
    except (RecursionError, ValueError) as e:  # nesting; integers of thousands of digits; a key twice
        got = "nesting too deep" if isinstance(e, RecursionError) else printable(e)
        raise FormatError(what, path=path, offset=0, expected=expected, got=got) from e
    if not isinstance(value, dict):
        raise FormatError("not an object", path=path, offset=0, expected=expected, got=type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError(f"a key occurs twice in {{{', '.join(k for k, _ in pairs)[:60]}}}")
    return out


def _stated(path: Path, whole: dict[str, Any]) -> dict[str, Any]:
    nested = whole.get("config", {})
    if not isinstance(nested, dict):
        raise FormatError("config is not an object", path=path, offset=0, at="config", got=type(nested).__name__)
    return {k: v for k, v in (whole | nested).items() if k in (*SIZES, "bos", "uchars")}


def _matrix(path: Path, name: str, rows: Any) -> npt.NDArray[np.float64]:
    """A list of equally long lists of numbers as an array."""
    ok = isinstance(rows, list) and rows and all(isinstance(r, list) and len(r) == len(rows[0]) for r in rows)
    if not ok or not rows[0] or not all(type(x) in (float, int) for r in rows for x in r):
        raise FormatError(
            f"{printable(name)[:60]} is no matrix", path=path, offset=0, at=name[:60], got=brief(rows),
            expected="rows of equally many numbers", hint="" if name == "wte" else "is the key part of a state_dict?",
        )  # fmt: skip
    try:
        return np.array(rows, np.float64)
    except OverflowError as e:
        raise FormatError(f"a number in {name} is too large", path=path, offset=0, at=name, expected="a float64") from e


def _tensor(path: Path, name: str, a: npt.NDArray[np.float64]) -> Tensor:
    t = from_array(a, QType.F64)
    t.origin.update(op="json", file=path.name, key=name, type="F64", shape=list(a.shape))
    return t


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, _options: WriteOptions) -> tuple[Path, ...]:
    """Write the form that was read, or the flat one; numbers as Python's repr."""
    stated = stated_by(ck, path)
    order = list(expected_shapes(ck.config))
    template = ck.source.metadata.get("template") if ck.source.format == NAME else None
    if not isinstance(template, dict) or not isinstance(template.get("state_dict"), list):
        template = stated | {"state_dict": order}
    elif sorted(template["state_dict"]) == sorted(order):
        order = template["state_dict"]
    bare = set(template) == {"state_dict"}
    with replacing(path) as out:
        for text in _object(stored, order) if bare else _filled(template, stored, order):
            out.write(text.encode())
    return (path,)


def _filled(template: dict[str, Any], stored: Mapping[str, Tensor], order: list[str]) -> Iterator[str]:
    """The text of the whole object, in json.dump's spacing."""
    for k, (key, value) in enumerate(template.items()):
        yield ("{" if k == 0 else ", ") + json.dumps(key) + ": "
        if key == "state_dict":
            yield from _object(stored, order)
        else:
            yield json.dumps(value)
    yield "}"


def _object(stored: Mapping[str, Tensor], order: list[str]) -> Iterator[str]:
    """The text of the state_dict, a chunk of rows at a time."""
    for k, name in enumerate(order):
        t = stored[name]
        yield ("{" if k == 0 else ", ") + json.dumps(name) + ": ["
        for lo, rows in t.chunks():
            text = json.dumps(rows.view("<f8").tolist())
            yield (", " if lo else "") + text[1:-1]
        yield "]"
    yield "}"

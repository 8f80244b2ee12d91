"""The safetensors container against the safetensors package, byte tables and hostile headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from ckptkit.errors import CkptError, FormatError, UnsupportedError
from ckptkit.files import File
from ckptkit.formats.safetensors_io import MAX_HEADER, detect, read_header, write_file
from ckptkit.quant.types import QType
from ckptkit.tensor import from_array

KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"}


def container(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(lo: int, hi: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [lo, hi]}


def read(path: Path, data: bytes):
    path.write_bytes(data)
    return read_header(File(path))


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    a = {f"w.{k}": rng.integers(-100, 100, (3, 5)).astype(d) for k, d in KINDS.items()}
    return a | {"mask": np.tril(np.ones((4, 4), bool)), "bytes": np.arange(7, dtype=np.uint8), "none": np.zeros((0, 4))}


def test_reads_what_the_package_wrote_and_writes_the_same_bytes(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save_file(arrays, theirs, {"über": "naïve\n\x1b"})
    metadata, tensors = read_header(File(theirs))
    assert metadata == {"über": "naïve\n\x1b"}
    assert set(tensors) == set(arrays)
    for name, a in arrays.items():
        assert tensors[name].shape == a.shape
        assert tensors[name].read().tobytes() == a.tobytes()
    assert tensors["w.F16"].type == QType.F16
    write_file(ours, tensors, metadata)
    assert ours.read_bytes() == theirs.read_bytes()


def test_package_reads_what_we_write(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "x.safetensors"
    kept = {n: a for n, a in arrays.items() if n.startswith("w.")}
    write_file(path, {n: from_array(a, QType[n[2:]]) for n, a in kept.items()}, {"b": "2", "a": "1"})
    for name, a in load_file(path).items():
        np.testing.assert_array_equal(a, kept[name])
    with safe_open(path, "np") as f:
        assert f.metadata() == {"a": "1", "b": "2"}
    assert list(tmp_path.iterdir()) == [path]


def test_bf16_hand_typed(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}' + b" "
    path = tmp_path / "x.safetensors"
    _, t = read(path, b"\x38" + bytes(7) + header + b"\x80\x3f\x00\xc0")  # 1, -2
    assert t["x"].type == QType.BF16
    assert t["x"].rows(1, 2).tobytes() == b"\x00\xc0"
    write_file(tmp_path / "y", t, {})
    assert (tmp_path / "y").read_bytes() == path.read_bytes()


def test_chunks_and_view_are_the_data(tmp_path: Path) -> None:
    a = np.arange(60, dtype=np.float32).reshape(10, 6)
    _, t = read(tmp_path / "x", container({"a": entry(0, 240, [10, 6])}, a.tobytes()))
    assert b"".join(rows.tobytes() for _, rows in t["a"].chunks(50)) == a.tobytes()
    assert t["a"].view is not None
    assert t["a"].view().tobytes() == a.tobytes()


def test_block_types_are_refused(tmp_path: Path) -> None:
    t = from_array(np.zeros((2, 34), np.uint8), QType.Q8_0, (2, 32))
    with pytest.raises(UnsupportedError, match="Q8_0"):
        write_file(tmp_path / "x", {"t": t}, {})
    assert not list(tmp_path.iterdir())


A = entry(0, 8, [2])
BROKEN = {
    "empty file": (b"", "ends early"),
    "cut in the length": (b"\x10\0\0\0", "ends early"),
    "length past the end": (struct.pack("<Q", 50) + b"{}", "ends early"),
    "length over the cap": (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "too long"),
    "length 2^63": (struct.pack("<Q", 2**63) + b"{}", "too long"),
    "header cut": (container(b'{"a":{"dtype"'), "not valid"),
    "empty header": (container(b""), "not valid"),
    "a list": (container(b"[1]"), "not valid"),
    "space before": (container(b" {}"), "not valid"),
    "not UTF-8": (container(b'{"\xff":1}'), "not valid"),
    "text after": (container(b"{}x"), "not valid"),
    "NaN": (container(b'{"a":NaN}'), "not valid"),
    "nested": (container(b'{"a":' * 5000 + b"1" + b"}" * 5000), "not valid"),
    "nested lists": (container(b'{"a":' + b"[" * 100_000), "not valid"),
    "long integer": (container(b'{"a":' + b"9" * 5000 + b"}"), "not valid"),
    "duplicate tensor": (container(b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2), bytes(8)), "not valid"),
    "duplicate key": (container(b'{"__metadata__":{"k":"1","k":"2"}}'), "not valid"),
    "metadata number": (container({"__metadata__": {"k": 1}}), "table of strings"),
    "metadata list": (container({"__metadata__": []}), "table of strings"),
    "entry is text": (container({"a": "F32"}), "incomplete"),
    "no shape": (container({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "incomplete"),
    "unknown dtype": (container({"a": entry(0, 8, [2], "F128")}, bytes(8)), "unknown dtype"),
    "dtype list": (container({"a": entry(0, 8, [2], [])}, bytes(8)), "unknown dtype"),  # type: ignore[arg-type]
    "negative size": (container({"a": entry(0, 8, [-2, -1])}, bytes(8)), "bad shape"),
    "fraction": (container({"a": entry(0, 8, [2.0])}, bytes(8)), "bad shape"),
    "boolean": (container({"a": entry(0, 4, [True])}, bytes(4)), "bad shape"),
    "many axes": (container({"a": entry(0, 4, [1] * 1000)}, bytes(4)), "bad shape"),
    "shape text": (container({"a": {**A, "shape": "2"}}, bytes(8)), "bad shape"),
    "huge size": (container({"a": entry(0, 8, [2**70])}, bytes(8)), "bad shape"),
    "product": (container({"a": entry(0, 8, [2**62, 4])}, bytes(8)), "disagree"),
    "reversed": (container({"a": entry(8, 0, [2])}, bytes(8)), "bad data_offsets"),
    "negative offset": (container({"a": entry(-8, 0, [2])}, bytes(8)), "bad data_offsets"),
    "three offsets": (container({"a": {**A, "data_offsets": [0, 8, 8]}}, bytes(8)), "bad data_offsets"),
    "too small": (container({"a": entry(0, 4, [2])}, bytes(8)), "disagree"),
    "overlap": (container({"a": A, "b": entry(4, 12, [2])}, bytes(12)), "overlaps"),
    "same bytes": (container({"a": A, "b": A}, bytes(8)), "overlaps"),
    "gap": (container({"a": A, "b": entry(12, 20, [2])}, bytes(20)), "gap"),
    "gap at the start": (container({"a": entry(4, 12, [2])}, bytes(12)), "gap"),
    "trailing byte": (container({"a": A}, bytes(9)), "bytes remain"),
    "one byte short": (container({"a": A}, bytes(7)), "ends early"),
}
STRICTER = {"many axes", "space before", "duplicate tensor", "duplicate key"}  # which the package lets through


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_give_one_error_with_its_place(tmp_path: Path, case: str) -> None:
    data, what = BROKEN[case]
    path = tmp_path / "bad.safetensors"
    with pytest.raises(FormatError, match=what) as e:
        read(path, data)
    assert e.value.path == path
    assert e.value.offset is not None
    assert e.value.expected is not None or "shrank" in e.value.what
    assert len(str(e.value)) < 1200
    if case not in STRICTER:
        with pytest.raises((SafetensorError, OSError)):
            load_file(path)


def test_terminal_escapes_in_names_do_not_reach_the_message(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as e:
        read(tmp_path / "x", container({"\x1b[2J": entry(0, 8, [3])}, bytes(8)))
    assert "\x1b" not in str(e.value)


def test_every_prefix_and_every_bit_flip_is_refused_or_agrees_with_the_package(tmp_path: Path) -> None:
    good = container({"__metadata__": {"k": "v"}, "a": A, "b": entry(8, 12, [2, 1], "F16")}, bytes(range(12)))
    path = tmp_path / "x"
    cases = [good[:n] for n in range(len(good))]
    cases += [good[:i] + bytes([good[i] ^ 1 << b]) + good[i + 1 :] for i in range(len(good) - 12) for b in range(8)]
    for data in cases:
        path.write_bytes(data)
        try:
            _, tensors = read_header(File(path))
        except CkptError:
            continue
        theirs = load_file(path)
        assert {n: t.shape for n, t in tensors.items()} == {n: a.shape for n, a in theirs.items()}


def test_detect_wants_a_length_that_fits_and_an_object() -> None:
    good = container({"a": A}, bytes(8))
    assert detect(good, len(good))
    assert not detect(good[:7], 7)
    assert not detect(struct.pack("<Q", 10**9) + b"{}", 10)
    assert not detect(b"GGUF" + bytes(100), 104)

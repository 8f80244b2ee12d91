"""GGUF: hand-made defects, every prefix and byte of a small file, and the `gguf` package as judge."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit import formats
from ckptkit.errors import CkptError, FormatError, UnsupportedError
from ckptkit.files import File
from ckptkit.formats import gguf_io
from fixtures.writers import gguf as w

W = np.arange(64, dtype=np.float32).reshape(2, 32)
ARCH = ("general.architecture", w.STRING, "foreign")


def header(path: Path) -> gguf_io.Header:
    file = File(path)
    try:
        head = gguf_io.read_header(file)
        gguf_io.tensors(head, file)
        return head
    finally:
        file.close()


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return w.string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(
    *infos: bytes, keys: bytes = b"", n_keys: int = 0, data: int = 512, counts: tuple[int, int] | None = None
) -> bytes:
    n_tensors, n_keys = counts or (len(infos), n_keys)
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + keys + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


def key(name: str, kind: int, payload: bytes) -> bytes:
    return w.string(name) + struct.pack("<I", kind) + payload


# what is wrong, the file, and a word that the message must hold
DEFECTS = {
    "not this magic": (b"GGUG" + bytes(60), "GGUF"),
    "reversed magic": (b"FUGG" + bytes(60), "GGUF"),
    "version 0": (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(8), "version"),
    "version 99": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^62 keys": (raw(counts=(0, 2**62)), "number of keys"),
    "2^63 tensors": (raw(counts=(2**63, 0)), "number of tensors"),
    "key length 2^63": (raw(keys=struct.pack("<Q", 2**63), n_keys=1), "length"),
    "empty key": (raw(keys=key("", w.U8, b"\1"), n_keys=1), "empty"),
    "key twice": (raw(keys=2 * key("a", w.U8, b"\1"), n_keys=2), "twice"),
    "value type 13": (raw(keys=key("a", 13, b"\1"), n_keys=1), "unknown type"),
    "string of 1 GiB": (raw(keys=key("a", w.STRING, struct.pack("<Q", 2**30 - 1)), n_keys=1), "length"),
    "array of 2^30": (raw(keys=key("a", w.ARRAY, struct.pack("<IQ", w.U8, 2**30)), n_keys=1), "array"),
    "array of 2^61 strings": (raw(keys=key("a", w.ARRAY, struct.pack("<IQ", w.STRING, 2**61)), n_keys=1), "array"),
    "string runs off": (raw(keys=key("a", w.ARRAY, struct.pack("<IQQ", w.STRING, 1, 2**40)), n_keys=1), "string 0"),
    "array of arrays": (raw(keys=key("a", w.ARRAY, struct.pack("<IQ", w.ARRAY, 1)), n_keys=1), "arrays"),
    "alignment 0": (raw(keys=key("general.alignment", w.U32, struct.pack("<I", 0)), n_keys=1), "alignment"),
    "alignment 3": (raw(keys=key("general.alignment", w.U32, struct.pack("<I", 3)), n_keys=1), "alignment"),
    "alignment as u64": (raw(keys=key("general.alignment", w.U64, struct.pack("<Q", 32)), n_keys=1), "alignment"),
    "five axes": (raw(info("t", [1] * 5, 0, 0)), "axes"),
    "type 255": (raw(info("t", [4], 255, 0)), "unknown type"),
    "zero axis": (raw(info("t", [4, 0], 0, 0)), "shape"),
    "2^32 x 2^32": (raw(info("t", [2**32, 2**32], 0, 0)), "shape"),
    "2^61 x 8": (raw(info("t", [2**61, 8], 0, 0)), "shape"),
    "part of a block": (raw(info("t", [33], 8, 0)), "blocks"),
    "name twice": (raw(info("t", [4], 0, 0), info("t", [4], 0, 32)), "twice"),
    "offset off the alignment": (raw(info("t", [4], 0, 4)), "multiple"),
    "offset past the end": (raw(info("t", [4], 0, 4096)), "ends early"),
    "offset 2^64 - 32": (raw(info("t", [4], 0, 2**64 - 32)), "ends early"),
    "larger than the file": (raw(info("t", [4096], 0, 0)), "ends early"),
    "overlap": (raw(info("a", [16], 0, 0), info("b", [16], 0, 32)), "overlaps"),
    "same bytes twice": (raw(info("a", [16], 0, 0), info("b", [16], 0, 0)), "overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_is_one_clear_error_quickly_and_cheaply(what: str, tmp_path: Path) -> None:
    data, word = DEFECTS[what]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises((FormatError, UnsupportedError)) as e:
        header(path)
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert word in str(e.value)
    assert "bad.gguf" in str(e.value)
    assert seconds < 1
    assert peak < 2**22


@pytest.mark.parametrize("align", [8, 16, 64, 4096])
def test_alignments_are_honoured(align: int, tmp_path: Path) -> None:
    """Tensors of 20 bytes, whose neighbours a wrong padding would read."""
    values = {f"t{k}": (np.full(5, k, np.float32), "f32") for k in range(3)}
    path = tmp_path / "a.gguf"
    path.write_bytes(w.gguf([ARCH, ("general.alignment", w.U32, align)], values, align=align))
    with formats.open(path) as ck:
        for k in range(3):
            assert ck.tensors[f"t{k}"].read().view("<f4").reshape(-1).tolist() == [k] * 5


SMALL = w.gguf(
    [ARCH, ("a.u8", w.U8, 7), ("a.f64", w.F64, 0.5), ("a.texts", w.ARRAY, (w.STRING, ["x", "", "yz"])),
     ("a.numbers", w.ARRAY, (w.I32, [1, -2, 3])), ("a.yes", w.BOOL, True)],
    {"w": (W, "f32"), "q": (W, "q8_0"), "v": (W[0], "f16")},
)  # fmt: skip


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    whole = len(SMALL) - (-len(W[0]) * 2 % 32)  # without the last tensor's padding nothing is missing
    for cut in range(whole):
        path.write_bytes(SMALL[:cut])
        with pytest.raises(CkptError):
            header(path)


def survives(path: Path, data: bytes) -> gguf_io.Header | None:
    """The header, or None for one clear refusal; anything else is a failure of the test."""
    path.write_bytes(data)
    try:
        with formats.open(path, "gguf") as ck:
            for t in ck.tensors.values():
                t.read()
        return header(path)
    except CkptError:
        return None


def test_every_flipped_byte_is_refused_or_read(tmp_path: Path) -> None:
    accepted = 0
    for k in range(len(SMALL) - 320):
        data = bytearray(SMALL)
        data[k] ^= 0xFF
        accepted += survives(tmp_path / "flip.gguf", bytes(data)) is not None
    assert accepted > 100  # bytes of names and values may be anything


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(SMALL) - 1), value=st.binary(min_size=1, max_size=12))
def test_what_is_accepted_is_what_the_package_reads(at: int, value: bytes, tmp_path: Path) -> None:
    import gguf

    data = bytearray(SMALL)
    data[at : at + len(value)] = value
    path = tmp_path / "mutated.gguf"
    found = survives(path, bytes(data))
    if found is None:
        return
    try:
        judge = gguf.GGUFReader(path)
    except Exception:
        return  # the package is stricter about a few values and has no message to compare
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in judge.tensors} == {i.name: i.shape for i in found.infos}
    assert {t.name: t.data_offset for t in judge.tensors} == {i.name: found.data_start + i.offset for i in found.infos}


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_q8_0", "llama_f16", "qwen2_bf16", "llama31"])
def test_the_package_reads_what_we_write(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    import gguf

    from ckptkit.conversion import Options, convert
    from ckptkit.formats.options import WriteOptions

    source, out = fixtures_dir / "gguf" / f"{name}.gguf", tmp_path / "out.gguf"
    convert(source, out, Options(write=WriteOptions(metadata={"general.name": "renamed"})))
    a, b = gguf.GGUFReader(source), gguf.GGUFReader(out)
    for theirs, ours in zip(a.tensors, b.tensors, strict=True):
        assert (theirs.name, theirs.tensor_type, theirs.shape.tolist()) == (
            ours.name,
            ours.tensor_type,
            ours.shape.tolist(),
        )
        np.testing.assert_array_equal(theirs.data, ours.data)
    for field in a.fields.values():
        if field.name not in ("general.name", "GGUF.kv_count"):
            assert field.contents() == b.fields[field.name].contents()
    assert b.fields["general.name"].contents() == "renamed"


def test_split_files_join_and_miss_each_other(fixtures_dir: Path, tmp_path: Path) -> None:
    names = sorted((fixtures_dir / "gguf" / "split").glob("*.gguf"))
    for name in names:
        (tmp_path / name.name).write_bytes(name.read_bytes())
    with formats.open(tmp_path / names[1].name) as ck:
        assert len(ck.source.paths) == 3
        assert "output_norm.weight" in ck.tensors
    (tmp_path / names[2].name).unlink()
    with pytest.raises(FormatError, match="shards are missing"):
        formats.open(tmp_path / names[0].name)
    (tmp_path / names[0].name).rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match="name"):
        formats.open(tmp_path / "renamed.gguf")


def test_split_writing_keeps_every_tensor(fixtures_dir: Path, tmp_path: Path) -> None:
    from ckptkit.conversion import Options, convert
    from ckptkit.formats.options import WriteOptions

    source = fixtures_dir / "gguf" / "llama.gguf"
    report = convert(source, tmp_path / "s.gguf", Options(write=WriteOptions(split_max_size=10_000)))
    assert len(report.paths) > 2
    assert report.paths[0].name == f"s-00001-of-{len(report.paths):05d}.gguf"
    with formats.open(source) as a, formats.open(report.paths[0]) as b:
        assert list(a.tensors) == list(b.tensors)
        for name, t in a.tensors.items():
            np.testing.assert_array_equal(t.read(), b.tensors[name].read())

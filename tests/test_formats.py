"""Every committed model file: read as its writer meant it, written back byte for byte, broken with care."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from cases import CASES, Case

from ckptkit import formats
from ckptkit.conversion import Options, convert
from ckptkit.errors import CkptError
from ckptkit.formats.options import ReadOptions
from ckptkit.inspect import offset

BIG_ENDIAN = "gguf/llama_big_endian.gguf"
READABLE = [c for c in CASES if c.name != BIG_ENDIAN]
FILES = [c for c in READABLE if not c.name.endswith("/")]


def opened(case: Case, path: Path):
    return formats.open(path, options=ReadOptions(**case.told))


@pytest.mark.parametrize("case", READABLE, ids=str)
def test_config_is_what_the_writer_meant(case: Case, fixtures_dir: Path) -> None:
    with opened(case, case.path(fixtures_dir)) as ck:
        assert ck.config.arch == case.arch
        for name, value in case.config.items():
            if name == "n_mtp_head" and not value:
                continue
            assert getattr(ck.config, name) == pytest.approx(value), name


def test_detectors_agree_on_one_format_each(fixtures_dir: Path) -> None:
    for case in READABLE:
        path = case.path(fixtures_dir)
        head, size = (b"", 0) if path.is_dir() else (path.read_bytes()[:4096], path.stat().st_size)
        assert len([m for m in map(formats.by_name, formats.FORMATS) if m.detect(path, head, size)]) == 1, case.name


def test_big_endian_gguf_is_refused_by_that_word(fixtures_dir: Path) -> None:
    with pytest.raises(CkptError, match="big-endian"):
        formats.open(fixtures_dir / BIG_ENDIAN)


NOT_SAME = {
    "gguf/llama_v2.gguf": "version 2 is read and version 3 written",
    "gguf/gpt2_v2.gguf": "version 2 is read and version 3 written",
    "llama2c/v2.bin": "int8 groups are read only",
    "llama2c/v2_tied.bin": "int8 groups are read only",
    "nx/weights.npz": "read only",
    "nx/weights.safetensors": "read only",
    "gguf/split/tiny-00001-of-00003.gguf": "a split file is written whole",
    "microgpt/nested.json": "the flat form is written",
    "nx/nx.gguf": "what it lacks is completed",
}


@pytest.mark.parametrize("case", [c for c in FILES if c.name not in NOT_SAME], ids=str)
def test_writing_back_gives_the_same_bytes(case: Case, fixtures_dir: Path, tmp_path: Path) -> None:
    source = case.path(fixtures_dir)
    with opened(case, source) as ck:
        format = ck.source.format
    target = tmp_path / source.name
    convert(source, target, Options(format=format, read=ReadOptions(**case.told)))
    assert target.read_bytes() == source.read_bytes()


def test_what_reading_accepts_closes_its_files(fixtures_dir: Path) -> None:
    for case in READABLE:
        with opened(case, case.path(fixtures_dir)) as ck:
            names = [str(p) for p in ck.source.paths]
            for t in list(ck.tensors.values())[:2]:
                if t.view is not None:
                    t.view()
        maps = Path("/proc/self/maps").read_text()
        assert not any(n in maps for n in names), case.name


def boundaries(path: Path) -> list[int]:
    """Offsets at which one thing ends and another begins, up to the end of the last tensor."""
    with formats.open(path) as ck:
        ends = [offset(t) + t.nbytes for t in ck.tensors.values() if offset(t) is not None]
        size = max(ends, default=path.stat().st_size)
    cuts = {0, 1, 3, 4, 8, 16, 28, 32, 40, 255, 256, 1023, 1024, size - 1, size // 2}
    with formats.open(path) as ck:
        for t in ck.tensors.values():
            origin = t.origin
            while "of" in origin and isinstance(origin["of"], dict):
                origin = origin["of"]
            if "offset" in origin:
                cuts |= {origin["offset"], origin["offset"] + 1}
    return sorted(c for c in cuts if 0 <= c < size)


def refused(path: Path) -> None:
    begin = time.perf_counter()
    try:
        with formats.open(path) as ck:
            for t in ck.tensors.values():
                t.read()
            pytest.fail(f"{path.name} was read as {ck.source.format}")
    except CkptError as e:
        found = e
    assert found.path is not None
    assert found.expected is not None or found.got is not None or found.hint
    assert time.perf_counter() - begin < 1


HOSTILE = [c for c in FILES if not c.told and "split" not in c.name]


@pytest.mark.parametrize("case", HOSTILE, ids=str)
def test_cut_files_are_refused(case: Case, fixtures_dir: Path, tmp_path: Path) -> None:
    source = case.path(fixtures_dir)
    data = source.read_bytes()
    for cut in boundaries(source):
        path = tmp_path / source.name
        path.write_bytes(data[:cut])
        refused(path)


@pytest.mark.parametrize("case", [c for c in HOSTILE if c.name.endswith(".bin")], ids=str)
@pytest.mark.parametrize("more", [True, False])
def test_one_byte_more_or_less_is_refused(case: Case, more: bool, fixtures_dir: Path, tmp_path: Path) -> None:
    data = case.path(fixtures_dir).read_bytes()
    path = tmp_path / case.path(fixtures_dir).name
    path.write_bytes(data + b"\0" if more else data[:-1])
    refused(path)


@pytest.mark.parametrize("value", [-1, 0, 1, 2**31 - 1])
@pytest.mark.parametrize("case", [c for c in HOSTILE if c.name.endswith(".bin")], ids=str)
def test_header_integers_that_lie_are_refused_or_harmless(
    case: Case, value: int, fixtures_dir: Path, tmp_path: Path
) -> None:
    """A header field set wrong is refused, or claims no more than the file holds (slots without meaning)."""
    source = case.path(fixtures_dir)
    data = bytearray(source.read_bytes())
    shutil.copytree(source.parent, tmp_path / "dir")
    path = tmp_path / "dir" / source.name
    for slot in range(16):
        broken = data.copy()
        broken[4 * slot : 4 * slot + 4] = np.array(value, "<i4").tobytes()
        if broken == data:
            continue
        path.write_bytes(broken)
        begin = time.perf_counter()
        try:
            with formats.open(path) as ck:
                assert all(t.n_elements <= len(data) for t in ck.tensors.values())
        except CkptError:
            pass
        assert time.perf_counter() - begin < 1, slot

"""Token shards and evaluation sets of llm.c, from independent writers and from llm.c itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptkit.errors import CkptError, FormatError
from ckptkit.formats.llmc_data import is_eval, is_shard, read_eval, read_tokens
from fixtures.writers import llmc

IDS = np.array([3, 65535, 0, 50256, 7], np.int64)
HOSTILE = (-1, 0, 1, 2**31 - 1)
EXAMPLES = [(2, [5, 6, 7], [[1], [2, 3], [4, 4, 4], [9]]), (0, [8], [[1, 2], [3], [5], [6, 7]])]


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("data", [llmc.shard(IDS, 16), llmc.shard(IDS, 32), llmc.headerless_shard(IDS)])
def test_shards_give_their_ids(tmp_path: Path, data: bytes) -> None:
    with read_tokens(put(tmp_path / "x.bin", data)) as tokens:
        assert len(tokens) == 5
        assert tokens[1:4].dtype == np.int32
        assert tokens[1:4].tolist() == [65535, 0, 50256]
        assert np.asarray(tokens).tolist() == IDS.tolist()
        assert int(tokens[-1]) == 7
        assert tokens[4:99].tolist() == [7]
        assert tokens[3:1].tolist() == []
        assert list(tokens) == IDS.tolist()


def test_shard_of_the_original_program(shared: Path) -> None:
    raw = (shared / "gpt2_tiny_val.bin").read_bytes()
    with read_tokens(shared / "gpt2_tiny_val.bin") as tokens:
        assert len(tokens) == 28860
        assert tokens[:].tolist() == np.frombuffer(raw, "<u2", offset=1024).tolist()
        tokens.check(509)


def test_magics() -> None:
    assert is_shard(llmc.shard(IDS, 16))
    assert is_shard(llmc.shard(IDS, 32)[:4])
    assert not is_shard(llmc.headerless_shard(IDS))
    assert not is_shard(b"")
    assert is_eval(llmc.eval_set(EXAMPLES))
    assert not is_eval(llmc.shard(IDS, 16))


def test_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    with read_tokens(put(tmp_path / "x", llmc.shard(IDS, 16))) as tokens, pytest.raises(FormatError) as e:
        tokens.check(50257)
    assert (e.value.offset, e.value.got) == (1024 + 2, 65535)


@pytest.mark.parametrize("bits", [16, 32])
def test_broken_shards(tmp_path: Path, bits: int) -> None:
    good = llmc.shard(IDS, bits)
    cases = [good[:n] for n in (0, 3, 4, 500, 1023, 1024, len(good) - 1)] + [good + b"\0"]
    cases += [llmc.shard(IDS, bits, header={slot: v}) for slot in (0, 1, 2) for v in HOSTILE if (slot, v) != (1, 1)]
    for data in cases:
        with pytest.raises(FormatError) as e:
            read_tokens(put(tmp_path / "x", data))
        assert e.value.path == tmp_path / "x"
        assert e.value.offset is not None
        assert e.value.expected is not None


def test_text_and_models_are_not_headerless_shards(tmp_path: Path) -> None:
    for data in (b"To be, or not to be!", np.ones(50, np.float32).tobytes(), b"GGUF" + bytes(40)):
        with pytest.raises(FormatError, match="not a token shard"):
            read_tokens(put(tmp_path / "x", data))


def test_evaluation_set(tmp_path: Path) -> None:
    found = read_eval(put(tmp_path / "x", llmc.eval_set(EXAMPLES)))
    assert [e.index for e in found] == [0, 1]
    assert [(e.label, e.context.tolist(), [c.tolist() for c in e.completions]) for e in found] == EXAMPLES


def error_of(folder: Path, data: bytes) -> CkptError | None:
    try:
        read_eval(put(folder / "x", data))
    except CkptError as e:
        return e if (e.path, e.offset is None) == (folder / "x", False) else None
    return None


def test_broken_evaluation_sets(tmp_path: Path) -> None:
    good = llmc.eval_set(EXAMPLES)
    cases = [good[:n] for n in (0, 4, 1023, *range(1024, len(good)))] + [good + b"\0", good + b"\0\0"]
    cases += [llmc.eval_set(EXAMPLES, header={slot: v}) for slot in range(4) for v in HOSTILE if (slot, v) != (1, 1)]
    body = np.frombuffer(good, "<u2", offset=1024)
    for i in (0, 1, 3, 4, 5, 9):  # every word that steers the reader
        for v in (0, 1, 40000, 65535):
            if v != body[i]:
                changed = body.copy()
                changed[i] = v
                cases.append(good[:1024] + changed.tobytes())
    accepted = [data for data in cases if error_of(tmp_path, data) is None]
    assert len(accepted) == 2  # labels 0 and 1 are as good as 2

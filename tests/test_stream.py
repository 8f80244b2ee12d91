"""Writing tensors on several cores: bytes in their places, pipes, and the same error however many threads there are."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from ckptkit import files, parallel
from ckptkit.checkpoint import Checkpoint, Config, Source
from ckptkit.manifest import Recorder
from ckptkit.parallel import spread
from ckptkit.quant.encode import ErrorStats, encode
from ckptkit.quant.types import QType
from ckptkit.stream import write_tensors
from ckptkit.tensor import PIECE, from_array, transpose

rng = np.random.default_rng(5)
LARGE = rng.standard_normal((1500, 700)).astype(np.float32)  # more than four pieces
SMALL = rng.standard_normal(3).astype(np.float32)
TENSORS = [from_array(a, QType.F32) for a in (SMALL, LARGE, SMALL, SMALL)] + [transpose(from_array(LARGE, QType.F32))]
PADDED = b"".join(
    part for a in (SMALL, LARGE, SMALL, SMALL, LARGE.T) for part in (a.tobytes(), bytes(-a.nbytes % 32))
)  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pieces_lie_where_they_belong(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: n)
    monkeypatch.setattr(files, "WRITEBACK", 1 << 20)
    assert LARGE.size > 4 * PIECE
    with (tmp_path / "x").open("wb") as out:
        out.write(b"head")
        write_tensors(out, TENSORS, 32)
        out.write(b"tail")
    assert (tmp_path / "x").read_bytes() == b"head" + PADDED + b"tail"


def test_a_pipe_gets_the_same_bytes() -> None:
    reader, writer = os.pipe()
    got = bytearray()

    def read() -> None:
        with os.fdopen(reader, "rb") as f:
            got.extend(f.read())

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "wb") as out:
        write_tensors(out, TENSORS, 32)
    thread.join()
    assert got == PADDED


def test_a_transposed_tensor_is_read_once_for_many_rows() -> None:
    assert list(TENSORS[-1].pieces()) == [(0, 700)]
    assert len(list(TENSORS[1].pieces())) > 4


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_earliest_error_is_raised_and_nothing_runs_after_it(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: n)
    taken: list[int] = []
    late = threading.Event()

    def task(k: int) -> None:
        taken.append(k)
        if k == 3:
            late.wait(0.2)  # later pieces fail first
        if k >= 3:
            late.set()
            raise ValueError(k)

    with pytest.raises(ValueError, match=r"^3$"):
        spread(task, range(1000))
    assert len(taken) < 3 + 2 * n
    before = len(taken)
    time.sleep(0.05)
    assert len(taken) == before


def test_every_piece_runs_once() -> None:
    seen: list[int] = []
    spread(seen.append, range(1000))
    assert sorted(seen) == list(range(1000))
    spread(seen.append, [])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_manifest_hashes_rows_in_their_order_and_encodes_them_once(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash is that of the bytes in the file, though threads finish in any order; each value is counted once."""
    monkeypatch.setattr(parallel, "threads", lambda: n)
    monkeypatch.setattr(parallel, "threads", lambda: n)
    stats = ErrorStats()
    plain = from_array(LARGE[:, :672], QType.F32)
    kept = Recorder(Checkpoint(Config(""), {}, None, Source((), "")), {"w": encode(plain, QType.Q8_0, stats=stats)})
    with (tmp_path / "x").open("wb") as out:
        write_tensors(out, kept.tensors.values())
    kept.save(tmp_path / "m.json", ())
    judged = gguf.quants.quantize(LARGE[:, :672], gguf.GGMLQuantizationType.Q8_0).tobytes()
    assert (tmp_path / "x").read_bytes() == judged
    assert json.loads((tmp_path / "m.json").read_text())["tensors"]["w"]["sha256"] == hashlib.sha256(judged).hexdigest()
    assert stats.count == plain.n_elements


def test_an_interrupt_waits_for_the_pieces_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the main thread, here while it waits for the others; none of them runs on after the error."""
    monkeypatch.setattr(parallel, "threads", lambda: 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts without it
    main, under_way, done = threading.main_thread(), threading.Event(), threading.Event()

    def task(_k: int) -> None:
        if threading.current_thread() is main:
            under_way.wait(5)
            return
        under_way.set()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        spread(task, range(2))
    assert done.is_set()

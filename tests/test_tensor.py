"""Tensors: every operation against numpy on the same values, at chunks of one row, some rows and all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.files import File
from ckptkit.quant.types import QType
from ckptkit.tensor import Tensor, cat, constant, cut, from_array, from_file, pad, permute, transpose

rng = np.random.default_rng(3)
A = rng.standard_normal((13, 6)).astype(np.float32)
V = rng.standard_normal(11).astype(np.float32)
ORDER = rng.permutation(13)


def values(t: Tensor, budget: int) -> np.ndarray:
    rows = [rows for _, rows in t.chunks(budget)]
    return np.concatenate(rows).view(np.float32).reshape(t.shape)


CASES = {
    "cut": (cut(from_array(A, QType.F32), 2, 9), A[2:9]),
    "cut vector": (cut(from_array(V, QType.F32), 1, 4), V[1:4]),
    "cut of cut": (cut(cut(from_array(A, QType.F32), 2, 9), 1, 3), A[3:5]),
    "cat": (cat([from_array(A, QType.F32), from_array(A[:2] * 2, QType.F32)]), np.concatenate([A, A[:2] * 2])),
    "cat vectors": (cat([from_array(V, QType.F32), from_array(V, QType.F32)]), np.concatenate([V, V])),
    "cut across parts": (
        cut(cat([from_array(A, QType.F32), from_array(A, QType.F32)]), 11, 15),
        np.concatenate([A, A])[11:15],
    ),
    "pad": (pad(from_array(A, QType.F32), 16), np.concatenate([A, np.zeros((3, 6), np.float32)])),
    "permute": (permute(from_array(A, QType.F32), ORDER), A[ORDER]),
    "transpose": (transpose(from_array(A, QType.F32)), A.T),
    "transpose twice": (transpose(transpose(from_array(A, QType.F32))), A),
    "ones": (constant((3, 4), 1.0), np.ones((3, 4), np.float32)),
}


@pytest.mark.parametrize("budget", [1, 60, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_operation_equals_numpy(name: str, budget: int) -> None:
    t, expected = CASES[name]
    assert t.shape == expected.shape
    np.testing.assert_array_equal(values(t, budget), expected)


def test_rows_of_block_types_move_as_bytes() -> None:
    blocks = rng.integers(0, 256, (10, 2 * 34), dtype=np.uint8)
    t = permute(cut(from_array(blocks, QType.Q8_0, (10, 64)), 1, 9), np.arange(8)[::-1].copy())
    np.testing.assert_array_equal(t.read(), blocks[1:9][::-1])


def test_transposing_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        transpose(from_array(np.zeros((4, 34), np.uint8), QType.Q8_0, (4, 32)))


@pytest.mark.parametrize("type", [QType.F32, QType.F16, QType.BF16, QType.F64])
def test_constant_one_in_every_plain_type(type: QType) -> None:
    from ckptkit.quant.encode import decode_rows

    np.testing.assert_array_equal(decode_rows(constant((2, 3), 1.0, type).read(), type), np.ones((2, 3), np.float32))


def test_file_tensor_reads_by_pread_and_maps_on_request(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"head" + A.tobytes())
    file = File(path)
    t = from_file(file, 4, A.shape, QType.F32)
    np.testing.assert_array_equal(values(t, 30), A)
    assert t.view is not None
    np.testing.assert_array_equal(t.view().view(np.float32), A)
    file.close()
    other = File(path)  # under the number that the closed one had
    with pytest.raises(OSError):
        t.read()
    other.close()


def test_file_that_is_too_short_says_where(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    file = File(path)
    with pytest.raises(FormatError) as e:
        from_file(file, 40, (4, 4), QType.F32, at="tensor w")
    assert (e.value.offset, e.value.at, e.value.expected, e.value.got) == (40, "tensor w", "64 bytes", "60 bytes")
    file.close()


def test_after_close_no_map_of_the_file_is_left(tmp_path) -> None:
    path = tmp_path / "mapped-model"
    path.write_bytes(A.tobytes())
    file = File(path)
    t = from_file(file, 0, A.shape, QType.F32)
    assert t.view is not None
    view = t.view()
    maps = Path("/proc/self/maps")
    assert "mapped-model" in maps.read_text()
    del view
    file.close()
    assert "mapped-model" not in maps.read_text()

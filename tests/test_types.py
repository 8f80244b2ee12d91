"""The table of ggml types against the `gguf` package."""

from __future__ import annotations

import gguf
import pytest

from ckptkit.quant.types import BLOCKS, PLAIN, QType, row_bytes


def test_every_type_of_the_package_is_known_with_its_number_and_block():
    theirs = {t.name: (int(t), gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    ours = {t.name: (int(t), (BLOCKS[t].elements, BLOCKS[t].nbytes)) for t in QType}
    assert {name: ours.get(name) for name in theirs} == theirs


def test_plain_types_are_those_of_one_floating_element():
    assert {t for t in PLAIN if BLOCKS[t].elements == 1} == set(PLAIN)
    assert {t.name for t in PLAIN} == {"F32", "F16", "BF16", "F64"}


@pytest.mark.parametrize(
    ("type", "elements", "nbytes"), [("F32", 7, 28), ("Q8_0", 64, 68), ("Q4_K", 512, 288), ("Q6_K", 256, 210)]
)
def test_row_bytes_counts_whole_blocks(type, elements, nbytes):
    assert row_bytes(QType[type], elements) == nbytes

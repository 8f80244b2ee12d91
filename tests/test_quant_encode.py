"""Encoders against libgguf (llama.cpp's own, in C), gguf.quants and llama-quantize's digests; refusals; statistics."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tracemalloc

import gguf
import libgguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptkit.errors import LossyError, UnsupportedError
from ckptkit.quant.encode import (
    K_QUANTS,
    LEGACY,
    WRITABLE,
    ErrorStats,
    decode,
    decode_rows,
    encode,
    encode_rows,
)
from ckptkit.quant.policy import MIXTURES, plan
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.tensor import constant, from_array, transpose

BLOCK_TYPES = [*LEGACY, *K_QUANTS]
HALVES = [QType.F16, QType.BF16]


def judge(rows, type):
    """What llama.cpp's C makes of float32 rows."""
    return (
        np.asarray(libgguf.quantize_rows(np.ascontiguousarray(rows), int(type))).view(np.uint8).reshape(len(rows), -1)
    )


def hard_rows(elements, seed=0):
    """Rows of each kind that has a rule of its own: ties, zeros of both signs, few levels, tiny, huge, one outlier."""
    r = np.random.default_rng(seed)
    n = lambda: r.standard_normal(elements)  # noqa: E731
    rows = [
        n(),
        n() * 0.02,
        r.standard_cauchy(elements),
        np.zeros(elements),
        -np.zeros(elements),
        np.where(r.random(elements) < 0.5, 0.0, -0.0),
        np.where(r.random(elements) < 0.9, 0.0, n()),
        np.full(elements, 0.37),
        np.full(elements, -1.5),
        np.abs(n()),
        -np.abs(n()),
        r.integers(-8, 9, elements) * 0.5,  # exact ties for many scales
        r.integers(-127, 128, elements) / 2.0,
        np.where(np.arange(elements) % 2, 1.0, -1.0),  # the largest magnitude with both signs
        np.where(np.arange(elements) % 2, -1.0, 1.0),
        r.choice([-0.0, 0.0, 1.0], elements),
        r.choice([-0.0, 0.0, -1.0], elements),
        n() * 1e-8,  # scales that are subnormal halves
        n() * 1e-12,
        n() * 1e-30,
        n() * 1e-38,
        r.integers(-50, 51, elements) * 1.4e-45,  # subnormal float32
        n() * 1e4,
        n() * 1e6,
        n() * 1e30,
        np.exp(r.uniform(-80, 80, elements)) * r.choice([-1, 1], elements),
        np.linspace(-1, 1, elements),
        np.arange(elements) * 1.0,
        1000 + n() * 1e-3,
        np.where(np.arange(elements) == 5, 1e3, n() * 1e-4),
    ]
    return np.array(rows).astype(np.float32)


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 16])
def test_blocks_are_those_of_llama_cpp_on_hard_rows(type, blocks):
    elements = blocks * BLOCKS[type].elements
    for seed in range(3):
        rows = hard_rows(elements, seed)
        ours, theirs = encode_rows(rows, type), judge(rows, type)
        wrong = np.flatnonzero((ours != theirs).any(axis=1))
        assert not len(wrong), f"rows {wrong} differ"


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=lambda t: t.name)
def test_blocks_are_those_of_llama_cpp_on_rows_of_32_to_4096(type):
    r = np.random.default_rng(int(type))
    for elements in (32, 64, 96, 256, 288, 512, 768, 1024, 1600, 2048, 4096):
        if elements % BLOCKS[type].elements == 0:
            rows = r.standard_normal((7, elements), dtype=np.float32) * np.float32(r.choice([1e-4, 0.02, 1, 30]))
            np.testing.assert_array_equal(encode_rows(rows, type), judge(rows, type))


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=lambda t: t.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_are_those_of_llama_cpp_on_any_finite_row(type, data):
    elements = BLOCKS[type].elements
    values = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
        [0.0, -0.0, 0.5, 1.0, -1.0, 2.5]
    )
    row = data.draw(hnp.arrays(np.float32, (1, elements), elements=values, fill=values))
    np.testing.assert_array_equal(encode_rows(row, type), judge(row, type))


@pytest.mark.parametrize("type", LEGACY, ids=lambda t: t.name)
def test_legacy_blocks_are_those_of_the_gguf_package(type):
    rows = np.random.default_rng(3).standard_normal((33, 320), dtype=np.float32)
    np.testing.assert_array_equal(encode_rows(rows, type), gguf.quants.quantize(rows, gguf.GGMLQuantizationType(type)))


@pytest.mark.parametrize("type", HALVES, ids=lambda t: t.name)
def test_halves_are_those_of_llama_cpp(type):
    rows = hard_rows(64)
    np.testing.assert_array_equal(encode_rows(rows, type), judge(rows, type))


def test_bf16_by_hand_ties_to_even_and_nan_stays_nan():
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFFC12345, 0xFF800000]], np.uint32)
    expected = [[0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFFC1, 0xFF80]]
    assert encode_rows(bits.view(np.float32), QType.BF16).view(np.uint16).tolist() == expected


def test_q8_0_by_hand_rounds_half_away_from_zero():
    row = np.zeros((1, 32), np.float32)
    row[0, :5] = [127, 0.5, -0.5, 1.5, -2.5]  # d is 1
    block = encode_rows(row, QType.Q8_0)[0]
    assert block[:2].view(np.float16)[0] == 1
    assert block[2:7].view(np.int8).tolist() == [127, 1, -1, 2, -3]


@pytest.mark.parametrize(
    "type", [t for t in QType if t.name not in ("F32", "Q8_1", "Q8_K", "Q1_0", "Q2_0")], ids=lambda t: t.name
)
def test_decoding_is_that_of_the_gguf_package(type):
    theirs = gguf.GGMLQuantizationType(type)
    rows = np.random.default_rng(int(type)).integers(0, 256, (5, 2 * BLOCKS[type].nbytes), np.uint8)
    if type in WRITABLE:
        rows = encode_rows(hard_rows(2 * BLOCKS[type].elements), type)
    with np.errstate(all="ignore"):
        if type in (QType.I8, QType.I16, QType.I32, QType.I64, QType.F64):
            expected = rows.view(type.name.lower().replace("i", "int").replace("f", "float")).astype(np.float32)
        else:
            expected = gguf.quants.dequantize(rows, theirs)
        np.testing.assert_array_equal(decode_rows(rows, type).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type", [*HALVES, *BLOCK_TYPES], ids=lambda t: t.name)
def test_decoding_any_bytes_is_that_of_the_gguf_package(type):
    rows = np.random.default_rng(int(type)).integers(0, 256, (40, 3 * BLOCKS[type].nbytes), np.uint8)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            decode_rows(rows, type), gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type))
        )


def test_a_type_that_nobody_decodes_is_refused():
    with pytest.raises(UnsupportedError, match="Q8_K cannot be decoded"):
        decode_rows(np.zeros((1, 292), np.uint8), QType.Q8_K)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("name", [m for m in MIXTURES if m not in ("F32", "Q2_K_S")])
def test_tiny256_types_and_bytes_are_those_of_llama_quantize(shared, name, pure):
    expected = json.loads((shared / "quant" / "tiny256.quantised.json").read_text())[name + " --pure" * pure]["tensors"]
    reader = gguf.GGUFReader(shared / "quant" / "tiny256.f32.gguf")
    tensors = {t.name: t.data for t in reader.tensors}
    heads = [int(reader.fields[f"llama.attention.{key}"].parts[-1][0]) for key in ("head_count", "head_count_kv")]
    types = plan([(n, a.shape) for n, a in tensors.items()], name, pure=pure, n_head=heads[0], n_kv_head=heads[1])
    got = {}
    for tensor, array in tensors.items():
        stored = encode(from_array(np.array(array), QType.F32), types[tensor], tensor)
        got[tensor] = [types[tensor].name, hashlib.sha256(stored.read()).hexdigest()]
    assert got == expected


@pytest.mark.parametrize("type", [t for t in WRITABLE if t != QType.F32], ids=lambda t: t.name)
def test_a_tensor_encodes_alike_however_its_rows_are_read(type):
    values = np.random.default_rng(1).standard_normal(
        (1031, 512), dtype=np.float32
    )  # several pieces, the last one short
    t = encode(from_array(values, QType.F32), type, "w")
    whole = t.read()
    assert (t.shape, t.type, whole.shape) == ((1031, 512), type, (1031, t.row_bytes))
    np.testing.assert_array_equal(whole, encode_rows(values, type))
    np.testing.assert_array_equal(np.concatenate([t.rows(0, 1), t.rows(1, 700), t.rows(700, 1031)]), whole)
    turned = encode(transpose(from_array(np.ascontiguousarray(values.T), QType.F32)), type)  # its bytes lie in no file
    np.testing.assert_array_equal(turned.read(), whole)


def test_the_same_type_is_the_same_tensor():
    t = from_array(np.array([[np.nan, 1]], np.float32), QType.F32)
    assert encode(t, QType.F32, "w") is t


def test_a_vector_of_one_block_type_and_back():
    values = np.arange(64, dtype=np.float32)
    t = encode(from_array(values, QType.F32), QType.Q8_0, "v")
    assert (t.shape, t.n_rows) == ((64,), 1)
    np.testing.assert_array_equal(t.read(), judge(values[None], QType.Q8_0))
    back = decode(t)
    assert (back.shape, back.n_rows) == ((64,), 64)
    np.testing.assert_array_equal(back.read().view(np.float32)[:, 0], decode_rows(t.read(), QType.Q8_0)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type", [t for t in WRITABLE if t not in (QType.F32, QType.F64)], ids=lambda t: t.name)
def test_a_value_that_is_not_finite_is_refused_with_tensor_and_index(type, value):
    values = np.ones((3000, 256), np.float32)
    values[2999, 77] = value
    t = encode(from_array(values, QType.F32), type, "blk.0.attn_q.weight")
    with pytest.raises(LossyError, match="not finite") as e:
        t.read()
    assert "tensor blk.0.attn_q.weight, element [2999, 77]" in str(e.value)
    assert "--allow-nonfinite" in str(e.value)
    assert encode(from_array(values, QType.F32), type, "w", allow_nonfinite=True).read().shape == (3000, t.row_bytes)


@pytest.mark.parametrize(
    ("type", "fits", "too_large"),
    [
        (QType.F16, 65519.0, 65520.0),
        (QType.BF16, 3.3895e38, 3.4e38),
        (QType.Q8_0, 127 * 65504.0, 127 * 65536.0),
        (QType.Q4_0, 8 * 65504.0, 8 * 65536.0),
        (QType.Q6_K, 65504.0, 1e12),
        (QType.Q4_K, 65504.0, 1e12),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_a_value_too_large_for_the_type_is_refused_and_one_below_is_not(type, fits, too_large):
    values = np.zeros((2, 256), np.float32)
    values[1, 200] = fits
    encode(from_array(values, QType.F32), type, "w").read()
    values[1, 200] = too_large
    with pytest.raises(LossyError, match=f"too large for {type.name}") as e:
        encode(from_array(values, QType.F32), type, "w").read()
    assert "tensor w, element [1, 200]" in str(e.value)  # in a block type, of those made infinite, the one to blame


def test_a_float64_too_large_for_float32_is_named_with_its_value():
    t = encode(from_array(np.array([[1.0, 1e300]]), QType.F64), QType.F32, "w")
    with pytest.raises(LossyError, match="too large for F32") as e:
        t.read()
    assert "element [0, 1]: got 1e+300" in str(e.value)


@pytest.mark.parametrize(("type", "elements"), [(QType.Q8_0, 48), (QType.Q4_K, 288), (QType.Q6_K, 32)])
def test_rows_that_are_not_whole_blocks_are_refused_before_anything_is_read(type, elements):
    t = from_array(np.zeros((2, elements), np.float32), QType.F32)
    with pytest.raises(UnsupportedError, match=f"whole {type.name} blocks") as e:
        encode(t, type, "w")
    assert str(elements) in str(e.value)


def test_a_type_without_an_encoder_is_refused():
    with pytest.raises(UnsupportedError, match="IQ4_XS cannot be written"):
        encode(from_array(np.zeros((1, 256), np.float32), QType.F32), QType.IQ4_XS, "w")


def test_errors_gathered_on_the_way_by_hand():
    values = np.array([[1.0, 65504.0, 3e-8, 2e-8, 0.0, 2049.0]], np.float32)
    stats = ErrorStats()
    encode(from_array(values, QType.F32), QType.F16, "w", stats=stats).read()
    assert stats.count == 6
    assert stats.underflows == 1  # 3e-8 becomes the smallest half, 5.96e-8; 2e-8 becomes 0
    assert stats.max_error == 1.0  # 2049 lies between 2048 and 2050
    assert stats.rms == pytest.approx((1 / 6) ** 0.5)


@pytest.mark.parametrize("type", [*HALVES, *BLOCK_TYPES], ids=lambda t: t.name)
def test_errors_gathered_over_pieces_are_those_of_the_whole(type):
    values = np.random.default_rng(2).standard_normal((2100, 256), dtype=np.float32)
    values[7:9] *= 1e-7  # many become zero
    stats = ErrorStats()
    stored = encode(from_array(values, QType.F32), type, "w", stats=stats).read()
    error = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(type)).astype(np.float64) - values
    assert stats.max_error == pytest.approx(np.abs(error).max(), rel=1e-6)
    assert stats.rms == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6)
    assert stats.underflows == np.count_nonzero((values != 0) & (values + error == 0))


def test_only_k_quants_import_numba():
    script = """if True:
        import sys, numpy as np
        from ckptkit.quant.encode import encode_rows
        from ckptkit.quant.types import QType
        x = np.ones((4, 64), np.float32)
        encode_rows(x, QType.F32)
        assert not {"llvmlite", "numba", "gguf"} & set(sys.modules), "plain"
        for t in (QType.F16, QType.BF16, QType.Q8_0):
            encode_rows(x, t)
        assert not {"numba", "gguf"} & set(sys.modules), "legacy"
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("type", HALVES, ids=lambda t: t.name)
@pytest.mark.parametrize("elements", [1, 7, 15, 16, 17, 31, 100])
def test_halves_of_any_row_length(type, elements):
    rows = np.random.default_rng(elements).standard_normal((3, elements), dtype=np.float32)
    np.testing.assert_array_equal(encode_rows(rows, type), judge(rows, type))
    stats = ErrorStats()
    encode(from_array(rows[0], QType.F32), type, "v", stats=stats).read()
    assert stats.count == elements


def test_memory_is_bounded_whatever_the_size_of_the_tensor():
    t = encode(constant((65536, 1024), 0.5), QType.Q8_0, "w")  # 256 MiB of float32
    encode_rows(np.ones((1, 1024), np.float32), QType.Q8_0)
    tracemalloc.start()
    try:
        assert sum(len(chunk) for _, chunk in t.chunks()) == 65536
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_one_core_gives_the_same_bytes(monkeypatch):
    values = np.random.default_rng(4).standard_normal((1500, 512), dtype=np.float32)
    expected = encode_rows(values, QType.Q5_K)
    monkeypatch.setattr("ckptkit.parallel.threads", lambda: 1)
    np.testing.assert_array_equal(encode(from_array(values, QType.F32), QType.Q5_K).read(), expected)

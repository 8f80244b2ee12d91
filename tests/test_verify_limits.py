"""The limits that verify states: what the `gguf` package encodes stays within them, what is one step off does not."""

from __future__ import annotations

import numpy as np
import pytest

from ckptkit.quant.encode import encode_rows
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.tensor import Tensor, from_array
from ckptkit.verify.limits import LIMITS
from ckptkit.verify.tensors import compare, same_values, within

N = (24, 1024)
LEGACY = (QType.Q8_0, QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1)
K_QUANTS = (QType.Q2_K, QType.Q3_K, QType.Q4_K, QType.Q5_K, QType.Q6_K)


def values(kind: str) -> np.ndarray:
    rng = np.random.default_rng(9)
    x = {
        "normal": lambda: rng.standard_normal(N),
        "heavy tails": lambda: rng.standard_t(2, N),
        "positive": lambda: rng.uniform(0, 1, N),
        "far from zero": lambda: 1 + 0.01 * rng.standard_normal(N),
        "two values": lambda: rng.choice([-1.0, 0.75], N),
        "tiny": lambda: 1e-7 * rng.standard_normal(N),
        "many scales": lambda: rng.standard_normal(N) * np.repeat(10 ** rng.uniform(-3, 0, (24, 32)), 32, axis=1),
    }[kind]()
    return x.astype(np.float32)


KINDS = ("normal", "heavy tails", "positive", "far from zero", "two values", "tiny", "many scales")


def encoded(x: np.ndarray, type: QType) -> Tensor:
    if type in LEGACY or type in (QType.F16, QType.BF16):
        from gguf import GGMLQuantizationType, quants

        with np.errstate(all="ignore"):
            rows = quants.quantize(x, GGMLQuantizationType(type)).view(np.uint8)
    else:
        rows = encode_rows(x, type)  # judged bit for bit elsewhere
    return from_array(rows, type, x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type", [QType.F16, QType.BF16, *LEGACY, *K_QUANTS], ids=lambda t: t.name)
def test_honest_encodings_are_within_their_limit(type: QType, kind: str) -> None:
    x = values(kind)
    a, b = from_array(x, QType.F32), encoded(x, type)
    found = compare("w", a, b)
    assert found.ok, found.share
    assert within(a, b)
    assert within(b, a)  # whichever side is the source


@pytest.mark.parametrize("type", [QType.Q8_0, QType.Q6_K], ids=lambda t: t.name)
def test_values_one_step_off_are_beyond_it(type: QType) -> None:
    x = values("normal")
    b = encoded(x, type).read().copy()
    if type == QType.Q8_0:
        q = b[:, 2:34].view(np.int8)
        q[:] = np.where(q > 0, q - 1, q + 1)  # floor for round
    else:
        b.reshape(-1, BLOCKS[type].nbytes)[:, 192:208] = 0  # the sub-blocks' scales lost
    assert not within(from_array(x, QType.F32), from_array(b, type, x.shape))


@pytest.mark.parametrize("type", LIMITS, ids=lambda t: t.name)
def test_another_tensor_is_beyond_every_limit(type: QType) -> None:
    x = values("normal")
    other = x[::-1].copy()
    if type in (QType.F32, QType.F64):
        b = from_array(other.astype("<f8") if type == QType.F64 else other, type)
    else:
        b = encoded(other, type)
    a = from_array(x.astype("<f8"), QType.F64) if type == QType.F32 else from_array(x, QType.F32)
    assert not within(a, b)


def test_bf16_cut_instead_of_rounded_is_beyond_the_limit() -> None:
    x = values("normal")
    cut = (x.view("<u4") >> 16).astype("<u2")
    assert not within(from_array(x, QType.F32), from_array(cut.view(np.uint8).reshape(24, -1), QType.BF16, N))


def test_equal_numbers_in_two_types_are_equal() -> None:
    x = values("normal").astype(np.float16)
    a, b = from_array(x, QType.F16), from_array(x.astype(np.float32), QType.F32)
    assert same_values(a, b)
    found = compare("w", a, b)
    assert found.equal
    assert not found.exact
    assert found.max_error == 0

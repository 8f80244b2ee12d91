"""Which tensor gets which type: what llama-quantize --dry-run printed for whole shapes, and single rules by hand."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from ckptkit.errors import UnsupportedError
from ckptkit.quant.policy import ALIASES, MIXTURES, file_type, mixture, plan, quantisable
from ckptkit.quant.types import QType


def model(arch, n_embd, n_ff, n_layer, n_head, n_kv_head, tied):
    """Names and shapes of a whole model as its GGUF stores them, blocks in descending order."""
    kv = n_embd // n_head * n_kv_head
    out = [("token_embd.weight", (32, n_embd)), ("output_norm.weight", (n_embd,))]
    out += [] if tied else [("output.weight", (32, n_embd))]
    out += [("position_embd.weight", (64, n_embd))] if arch == "gpt2" else []
    for i in reversed(range(n_layer)):
        b = f"blk.{i}."
        out += [(b + "attn_norm.weight", (n_embd,)), (b + "attn_output.weight", (n_embd, n_embd))]
        out += [(b + "ffn_up.weight", (n_ff, n_embd)), (b + "ffn_down.weight", (n_embd, n_ff))]
        if arch == "gpt2":
            out += [(b + "attn_qkv.weight", (3 * n_embd, n_embd)), (b + "attn_qkv.bias", (3 * n_embd,))]
        else:
            out += [(b + "attn_q.weight", (n_embd, n_embd)), (b + "attn_k.weight", (kv, n_embd))]
            out += [(b + "attn_v.weight", (kv, n_embd)), (b + "ffn_gate.weight", (n_ff, n_embd))]
    return out


MODELS = {
    "gpt2": ("gpt2", 256, 512, 12, 4, 4, True),
    "grouped": ("llama", 256, 512, 16, 4, 1, False),
    "rows of 288": ("qwen2", 288, 512, 8, 4, 2, False),
    "rows of 40": ("llama", 40, 64, 2, 2, 2, True),
    "80 layers": ("llama", 32, 256, 80, 4, 1, True),
}
# What llama-quantize --dry-run (llama.cpp 0c1e57098) chose, runs of equal types over the layers counted; the other
# matrices have the type called "rest".
Q4_K_M_12 = "1*Q6_K 2*Q4_K 1*Q6_K 2*Q4_K 1*Q6_K 2*Q4_K 3*Q6_K"
Q4_K_M_16 = "2*Q6_K 2*Q4_K 1*Q6_K 2*Q4_K 1*Q6_K 2*Q4_K 1*Q6_K 2*Q4_K 3*Q6_K"
CHOSEN = [
    ("gpt2", "F16", {"rest": "F16"}),
    ("gpt2", "Q4_K_M", {"rest": "Q4_K", "token_embd": "1*Q6_K", "ffn_down": Q4_K_M_12, "attn_qkv": Q4_K_M_12}),
    (
        "gpt2",
        "Q4_K_S",
        {"rest": "Q4_K", "token_embd": "1*Q6_K", "ffn_down": "1*Q5_K 11*Q4_K", "attn_qkv": "4*Q5_K 8*Q4_K"},
    ),
    (
        "gpt2",
        "Q3_K_M",
        {
            "rest": "Q3_K",
            "token_embd": "1*Q6_K",
            "attn_output": "12*Q4_K",
            "ffn_down": "12*Q4_K",
            "attn_qkv": "2*Q5_K 10*Q4_K",
        },
    ),
    (
        "gpt2",
        "Q2_K",
        {
            "rest": "Q2_K",
            "token_embd": "1*Q6_K",
            "attn_output": "12*Q3_K",
            "ffn_down": "12*Q3_K",
            "attn_qkv": "12*Q3_K",
        },
    ),
    ("gpt2", "Q4_0", {"rest": "Q4_0", "token_embd": "1*Q6_K"}),
    ("grouped", "Q4_K_M", {"rest": "Q4_K", "output": "1*Q6_K", "ffn_down": Q4_K_M_16, "attn_v": Q4_K_M_16}),
    (
        "grouped",
        "Q3_K_M",
        {
            "rest": "Q3_K",
            "output": "1*Q6_K",
            "attn_output": "16*Q4_K",
            "ffn_down": "1*Q5_K 15*Q4_K",
            "attn_v": "2*Q5_K 14*Q4_K",
        },
    ),
    (
        "grouped",
        "Q2_K",
        {"rest": "Q2_K", "output": "1*Q6_K", "attn_output": "16*Q3_K", "ffn_down": "16*Q3_K", "attn_v": "16*Q4_K"},
    ),
    (
        "grouped",
        "Q2_K_S",
        {"rest": "Q2_K", "output": "1*Q6_K", "ffn_down": "2*Q4_K 14*Q2_K", "attn_v": "16*Q4_K"},
    ),
    (
        "rows of 288",
        "Q4_K_M",
        {
            "rest": "Q5_0",
            "output": "1*Q8_0",
            "ffn_down": "1*Q6_K 2*Q4_K 1*Q6_K 2*Q4_K 2*Q6_K",
            "attn_v": "1*Q8_0 2*Q5_0 1*Q8_0 2*Q5_0 2*Q8_0",
        },
    ),
    (
        "rows of 288",
        "Q3_K_L",
        {"rest": "Q4_0", "output": "1*Q8_0", "attn_output": "8*Q5_1", "ffn_down": "8*Q5_K", "attn_v": "8*Q5_1"},
    ),
    ("rows of 288", "Q4_0", {"rest": "Q4_0", "output": "1*Q8_0"}),
    ("rows of 40", "Q4_K_M", {"rest": "F16", "ffn_down": "1*Q5_0 1*Q8_0"}),
    ("rows of 40", "Q4_0", {"rest": "F16", "ffn_down": "2*Q4_0"}),
    ("80 layers", "Q3_K_S", {"rest": "Q4_0", "token_embd": "1*Q8_0", "ffn_down": "80*Q3_K", "attn_v": "80*Q5_1"}),
    (
        "80 layers",
        "Q4_K_S",
        {"rest": "Q5_0", "token_embd": "1*Q8_0", "ffn_down": "10*Q5_K 70*Q4_K", "attn_v": "80*Q5_1"},
    ),
]


@pytest.mark.parametrize(("shape", "name", "chosen"), CHOSEN, ids=lambda v: v if isinstance(v, str) else "")
def test_types_of_a_whole_model_are_those_of_llama_quantize(shape, name, chosen):
    arch, *_, n_head, n_kv_head, _ = MODELS[shape]
    tensors = model(*MODELS[shape])
    types = plan(tensors, name, arch=arch, n_head=n_head, n_kv_head=n_kv_head)
    assert list(types) == [n for n, _ in tensors]
    for tensor, dims in tensors:
        prefix, _, rest = tensor.rpartition("blk.")
        layer, _, part = rest.partition(".") if "blk." in tensor else ("0", "", prefix or tensor)
        role = part.removesuffix(".weight")
        if len(dims) == 1 or role == "position_embd":
            expected = "F32"
        elif role in chosen:
            runs = [r.split("*") for r in chosen[role].split()]
            expected = list(chain.from_iterable(repeat(t, int(n)) for n, t in runs))[int(layer)]
        else:
            expected = chosen["rest"]
        assert (tensor, types[tensor].name) == (tensor, expected)


@pytest.mark.parametrize("name", list(MIXTURES))
def test_pure_gives_every_matrix_the_same_type(name):
    tensors = model("llama", 256, 512, 3, 4, 2, False)
    types = plan(tensors, name, pure=True)
    assert {types[n] for n, shape in tensors if len(shape) == 2} == {mixture(name).base}
    assert {types[n] for n, shape in tensors if len(shape) == 1} == {QType.F32}


def test_file_types_are_those_of_the_gguf_package():
    import gguf

    theirs = {t.name.removeprefix("MOSTLY_").removeprefix("ALL_"): int(t) for t in gguf.LlamaFileType}
    assert {name: file_type(name) for name in MIXTURES} == {name: theirs[name] for name in MIXTURES}


def test_names_are_found_in_any_case_and_by_their_short_form():
    assert mixture("q4_k_m") is mixture("Q4_K") is MIXTURES["Q4_K_M"]
    assert mixture("f32").base == QType.F32
    assert set(ALIASES.values()) <= set(MIXTURES)


def test_an_unknown_mixture_is_one_error_that_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="unknown type") as e:
        plan([], "q4_k_x")
    assert "Q4_K_M" in str(e.value)
    assert "q4_k_x" in str(e.value)


def test_tensors_that_are_not_quantised_keep_the_type_they_are_stored_in():
    tensors = [("blk.0.attn_norm.weight", (256,)), ("position_embd.weight", (64, 256)), ("token_embd.weight", (9, 256))]
    stored = {"position_embd.weight": QType.F16, "token_embd.weight": QType.F16}
    assert list(plan(tensors, "q8_0", stored=stored).values()) == [QType.F32, QType.F16, QType.Q8_0]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.attn_q.weight", (4, 32), True),
        ("blk.0.ffn_up.weight", (8, 4, 32), True),
        ("blk.0.attn_q.weight", (1, 32), False),  # a matrix of one row is a vector to ggml
        ("blk.0.attn_q.weight", (32, 1), True),
        ("blk.0.attn_q.bias", (4, 32), False),
        ("blk.0.ffn_gate_inp.weight", (4, 32), False),
        ("output_norm.weight", (4, 32), False),
    ],
)
def test_only_matrices_called_weight_are_quantised(name, shape, expected):
    assert quantisable(name, shape) is expected


def test_eight_experts_keep_keys_and_values_well():
    tensors = [(f"blk.0.{role}.weight", (256, 256)) for role in ("attn_k", "attn_v", "attn_output", "ffn_gate")]
    assert [t.name for t in plan(tensors, "Q4_K_M", n_expert=8).values()] == ["Q8_0", "Q8_0", "Q5_K", "Q4_K"]
    assert [t.name for t in plan(tensors, "Q3_K_L", n_expert=8).values()] == ["Q8_0", "Q8_0", "Q3_K", "Q3_K"]

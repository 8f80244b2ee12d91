"""The names under which safetensors files hold each arch, as layouts.

Sources of truth: modeling_llama.py, modeling_qwen2.py and modeling_gpt2.py of transformers, and the parameter list of
the Qwen2 trainer written in nx (seed 002), whose matrices are (in, out). GPT-2's Conv1D weights are (in, out) as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..layout import Layout, Row

B = "blk.{i}."


def _rope_model(prefix: str, biases: bool) -> Layout:
    layer = prefix + "layers.{i}."
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    rows = [Row(("token_embd.weight",), prefix + "embed_tokens.weight")]
    for theirs, ours in parts.items():
        rows.append(Row((f"{B}{ours}.weight",), f"{layer}{theirs}.weight"))
        if biases and ours in ("attn_q", "attn_k", "attn_v"):
            rows.append(Row((f"{B}{ours}.bias",), f"{layer}{theirs}.bias"))
    rows += [Row(("output_norm.weight",), prefix + "norm.weight"), Row(("output.weight",), "lm_head.weight")]
    return Layout(tuple(rows), rope_pairing="half")


def _gpt2(prefix: str) -> Layout:
    layer, qkv = prefix + "h.{i}.", ("attn_q", "attn_k", "attn_v")
    norms = {"ln_1": "attn_norm", "ln_2": "ffn_norm"}
    linear = {"attn.c_attn": qkv, "attn.c_proj": ("attn_output",), "mlp.c_fc": ("ffn_up",), "mlp.c_proj": ("ffn_down",)}
    rows = [
        Row(("token_embd.weight",), prefix + "wte.weight"),
        Row(("position_embd.weight",), prefix + "wpe.weight"),
    ]
    for kind in ("weight", "bias"):
        rows += [Row((f"{B}{ours}.{kind}",), f"{layer}{theirs}.{kind}") for theirs, ours in norms.items()]
        for theirs, parts in linear.items():
            ours = tuple(f"{B}{p}.{kind}" for p in parts)
            rows.append(Row(ours, f"{layer}{theirs}.{kind}", transposed=kind == "weight"))
        rows.append(Row((f"output_norm.{kind}",), f"{prefix}ln_f.{kind}"))
    return Layout((*rows, Row(("output.weight",), "lm_head.weight")))


# arch: prefix of its names (the first is written) and the layout under it
HF: dict[str, dict[str, Layout]] = {
    "llama": {prefix: _rope_model(prefix, biases=False) for prefix in ("model.", "")},
    "qwen2": {prefix: _rope_model(prefix, biases=True) for prefix in ("model.", "")},
    "gpt2": {prefix: _gpt2(prefix) for prefix in ("transformer.", "")},
}
FIRST = {"llama": "embed_tokens.weight", "qwen2": "embed_tokens.weight", "gpt2": "wte.weight"}  # is in every file
BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")  # constants that old files carry

NX = Layout(
    (
        Row(("token_embd.weight",), "E"),
        *(
            Row((f"{B}{ours}.weight",), f"L{{i}}.{theirs}", transposed=theirs.startswith("W"))
            for theirs, ours in {
                "Wq": "attn_q",
                "Wk": "attn_k",
                "Wv": "attn_v",
                "Wo": "attn_output",
                "Wg": "ffn_gate",
                "Wu": "ffn_up",
                "Wd": "ffn_down",
                "attn_gamma": "attn_norm",
                "ffn_gamma": "ffn_norm",
            }.items()
        ),
        *(Row((f"{B}attn_{c}.bias",), f"L{{i}}.b{c}") for c in "qkv"),
        Row(("output_norm.weight",), "final_gamma"),
        Row(("output.weight",), "Wlm", transposed=True),
    ),
    rope_pairing="half",
    tied=False,
)


def prefix_of(arch: str, names: Mapping[str, Any]) -> str:
    """The prefix under which a file has the tensors of an arch; the usual one where its embedding is missing."""
    return next((p for p in HF[arch] if p + FIRST[arch] in names), next(iter(HF[arch])))


def is_nx(names: Mapping[str, Any]) -> bool:
    """Whether these are the parameters of the Qwen2 trainer."""
    return {"E", "Wlm", "final_gamma", "L0.Wq"} <= names.keys()

"""Every committed model file with what a reader must find in it and its float64 judge.

CASES is what the parametrised tests run over: `case.path(fixtures_dir)`, `case.config` (fields of the package's
Config), `case.logits(ids)` in float64 (n, vocab). `told` holds what the file does not say and a reader must be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import judges
import numpy as np

from fixtures import make, models
from fixtures.models import Model
from fixtures.writers import llama2c, llmc, microgpt

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """One model on disk; a name that ends in "/" is a directory."""

    name: str
    format: str
    arch: str
    config: dict[str, Any]
    logits: Callable[[Array], Array]
    told: dict[str, Any] = field(default_factory=dict)

    def path(self, fixtures_dir: Path) -> Path:
        return fixtures_dir / self.name

    def ids(self, n: int | None = None, seed: int = 77) -> Array:
        """Token ids of the model's vocabulary; as many as the context holds, at most 16, unless told."""
        n = min(16, self.config["context_length"]) if n is None else n
        return models.Bits(seed).ids(n, self.config["vocab_size"])

    def __str__(self) -> str:
        return self.name


def _gpt2(name: str, format: str, m: Model) -> Case:
    d = m.dims
    config = {"context_length": d["max_t"], "vocab_size": d["vocab"], "n_layer": d["n_layer"], "n_head": d["n_head"]}
    config |= {"n_kv_head": d["n_head"], "n_embd": d["channels"], "n_ff": 4 * d["channels"]}
    config |= {"head_dim": d["channels"] // d["n_head"], "norm_eps": 1e-5, "tied_output": True}
    return Case(name, format, "gpt2", config, lambda ids: judges.gpt2_logits(m.p, ids, d["n_head"]))


def _llama(
    name: str,
    format: str,
    m: Model,
    *,
    arch: str = "llama",
    pairing: str = "adjacent",
    theta: float = 10000.0,
    eps: float = 1e-5,
    scaled: bool = False,
    n_pred: int = 1,
    told: dict[str, Any] | None = None,
) -> Case:
    """`pairing` is the file's; the model's own is half for qwen2 and adjacent for llama."""
    d = m.dims
    config = {"context_length": d["seq"], "vocab_size": d["vocab"], "n_layer": d["n_layer"], "n_head": d["n_head"]}
    config |= {"n_kv_head": d["n_kv_head"], "n_embd": d["dim"], "n_ff": d["hidden"], "norm_eps": eps}
    config |= {"head_dim": d["dim"] // d["n_head"], "rope_theta": theta, "rope_pairing": pairing, "n_mtp_head": n_pred}
    config["tied_output"] = "wcls" not in m.p
    own = "half" if arch == "qwen2" else "adjacent"
    scaling = judges.LLAMA31 if scaled else None
    how = {"n_head": d["n_head"], "n_kv_head": d["n_kv_head"], "theta": theta, "eps": eps, "scaling": scaling}
    how["pairing"] = own
    return Case(name, format, arch, config, lambda ids: judges.llama_logits(m.p, ids, **how), told or {})


def _nanoeuler(name: str, m: Model) -> Case:
    """Head 0; judges.nanoeuler_logits gives them all."""
    d = m.dims
    first = Model(d, m.p | {"wcls": m.p["wcls"][: d["vocab"]]})
    return _llama(name, "nanoeuler", first, n_pred=d["n_pred"])


def _microgpt(name: str, format: str, m: Model, told: dict[str, Any] | None = None) -> Case:
    d = m.dims
    config = {"context_length": d["block_size"], "vocab_size": d["vocab_size"], "n_layer": d["n_layer"]}
    config |= {"n_head": d["n_head"], "n_kv_head": d["n_head"], "n_embd": d["n_embd"], "n_ff": 4 * d["n_embd"]}
    config |= {"head_dim": d["n_embd"] // d["n_head"], "norm_eps": 1e-5, "tied_output": False}
    return Case(name, format, "microgpt", config, lambda ids: judges.microgpt_logits(m.p, ids, d["n_head"]), told or {})


def _nx(name: str, format: str) -> Case:
    d = make.NX.dims
    told = {"rope_theta": 1e6, "norm_eps": 1e-6, "context_length": 64}
    config = {"vocab_size": d["vocab"], "n_layer": d["n_layer"], "n_head": 1, "n_kv_head": 1, "n_embd": d["dim"]}
    config |= {"n_ff": d["hidden"], "head_dim": d["dim"], "rope_pairing": "half", "tied_output": False, **told}
    return Case(name, format, "qwen2", config, lambda ids: judges.nx_logits(make.NX.p, ids), told)


def q8_0(m: Model) -> Model:
    """The model a Q8_0 GGUF holds: int8 in blocks of 32 with a float16 scale, vectors untouched."""

    def trip(w: Array) -> Array:
        b = w.reshape(-1, 32)
        d = np.abs(b).max(1, keepdims=True) / np.float32(127)
        q = np.floor(np.abs(b * (1 / d)) + np.float32(0.5)) * np.sign(b)
        return (q * d.astype(np.float16).astype(np.float32)).reshape(w.shape)

    return Model(m.dims, {k: v if k.startswith("rms") else trip(v) for k, v in m.p.items()})


def f16(m: Model) -> Model:
    return Model(m.dims, {k: v if k.startswith("rms") else v.astype(np.float16) for k, v in m.p.items()})


RMS, BIAS = ("rms_att", "rms_ffn", "rms_final"), ("bq", "bk", "bv")
GPT2_BF16, GPT2_MIXED = models.rounded(make.GPT2), models.rounded(make.GPT2, keep=llmc.NORMS)
QWEN2_GGUF, QWEN2_HF = models.rounded(make.QWEN2, keep=RMS + BIAS), models.rounded(make.QWEN2)

CASES: tuple[Case, ...] = (
    _gpt2("llmc/gpt2_v1.bin", "llmc", make.GPT2),
    _gpt2("llmc/gpt2_v2.bin", "llmc", GPT2_MIXED),
    _gpt2("llmc/gpt2_v2_norms_last.bin", "llmc", GPT2_MIXED),
    _gpt2("llmc/gpt2_v3.bin", "llmc", make.GPT2),
    _gpt2("llmc/gpt2_v3_pad_rows.bin", "llmc", make.GPT2),
    _gpt2("llmc/gpt2_v4.bin", "llmc", GPT2_MIXED),
    _gpt2("llmc/gpt2_v5.bin", "llmc", GPT2_BF16),
    _llama("llmc_llama3/llama3_v3.bin", "llmc-llama3", make.LLAMA3, theta=make.LLAMA3_THETA),
    _llama("llmc_llama3/llama3_v5.bin", "llmc-llama3", models.rounded(make.LLAMA3), theta=make.LLAMA3_THETA),
    _llama("llmc_llama3/llama3_v3_scaled.bin", "llmc-llama3", make.LLAMA3, theta=make.SCALED_THETA, scaled=True),
    _nanoeuler("nanoeuler/nanoeuler.bin", make.NANOEULER),
    _nanoeuler("nanoeuler/same_bytes.bin", make.NANOEULER_SAME),
    _microgpt("microgpt/microgpt.json", "microgpt", make.MICROGPT),
    _microgpt("microgpt/nested.json", "microgpt", make.MICROGPT),
    _microgpt("microgpt/state_dict.json", "microgpt", make.MICROGPT, {"n_head": 3}),
    _microgpt("microgpt/microgpt_f64.safetensors", "microgpt", make.MICROGPT),
    _microgpt("microgpt/microgpt_f32.safetensors", "microgpt", microgpt.narrow(make.MICROGPT)),
    _nx("nx/nx.gguf", "gguf"),
    _nx("nx/weights.safetensors", "safetensors"),
    _nx("nx/weights.npz", "safetensors"),
    _llama("llama2c/v0.bin", "llama2c", make.LLAMA2C),
    _llama("llama2c/v0_tied.bin", "llama2c", make.LLAMA2C_TIED),
    _llama("llama2c/v1.bin", "llama2c", make.LLAMA2C),
    _llama("llama2c/v1_tied.bin", "llama2c", make.LLAMA2C_TIED),
    _llama("llama2c/v2.bin", "llama2c", llama2c.dequantised(make.LLAMA2C)),
    _llama("llama2c/v2_tied.bin", "llama2c", llama2c.dequantised(make.LLAMA2C_TIED)),
    _llama("gguf/llama.gguf", "gguf", make.LLAMA2C),
    _llama("gguf/llama_f16.gguf", "gguf", f16(make.LLAMA2C)),
    _llama("gguf/llama_v2.gguf", "gguf", make.LLAMA2C),
    _llama("gguf/llama_big_endian.gguf", "gguf", make.LLAMA2C),
    _llama("gguf/llama_q8_0.gguf", "gguf", q8_0(make.Q8)),
    _llama("gguf/llama31.gguf", "gguf", make.LLAMA31, theta=make.SCALED_THETA, scaled=True),
    _llama("gguf/qwen2_bf16.gguf", "gguf", QWEN2_GGUF, arch="qwen2", pairing="half", theta=1e6),
    _gpt2("gguf/gpt2.gguf", "gguf", make.GPT2),
    _gpt2("gguf/gpt2_v2.gguf", "gguf", make.GPT2),
    _llama("gguf/split/tiny-00001-of-00003.gguf", "gguf", make.LLAMA),
    _llama("hf_llama/", "safetensors", make.LLAMA, pairing="half"),
    _llama("hf_llama_sharded/", "safetensors", models.rounded(make.LLAMA), pairing="half"),
    _llama("hf_llama31/", "safetensors", make.LLAMA31, pairing="half", theta=make.SCALED_THETA, scaled=True),
    _llama("hf_qwen2/", "safetensors", QWEN2_HF, arch="qwen2", pairing="half", theta=1e6),
    _gpt2("hf_gpt2/", "safetensors", make.GPT2),
)

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}

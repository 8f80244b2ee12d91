"""Directories of random models by the independent writer, what they hold, and both ways through our format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.checkpoint import Checkpoint
from ckptkit.formats import safetensors
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from fixtures import models
from fixtures.models import Model
from fixtures.writers import safetensors as writer

LLAMA = models.llama(61)
QWEN2 = models.llama(62, bias=True, tied=True)
GPT2 = models.gpt2(63)
NX = models.nx(64)
MICROGPT = models.microgpt(65)
LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DIRECTORIES = {
    "llama": writer.directory(writer.llama_arrays(LLAMA), writer.llama_config(LLAMA)),
    "llama bf16 in shards": writer.directory(
        writer.llama_arrays(LLAMA), writer.llama_config(LLAMA), shards=3, bf16=True
    ),
    "llama 3.1": writer.directory(
        writer.llama_arrays(LLAMA), writer.llama_config(LLAMA, rope_theta=5e5, rope_scaling=LLAMA31)
    ),
    "qwen2": writer.directory(
        writer.llama_arrays(QWEN2, permute=False),
        writer.llama_config(QWEN2, "qwen2", rope_theta=1e6, use_sliding_window=False),
        bf16=True,
    ),
    "gpt2": writer.directory(writer.gpt2_arrays(GPT2), writer.gpt2_config(GPT2)),
    "gpt2 without prefix": writer.directory(writer.gpt2_arrays(GPT2, prefix=""), writer.gpt2_config(GPT2)),
}
LAYERS = {
    "attn_norm": "rms_att", "attn_q": "wq", "attn_k": "wk", "attn_v": "wv", "attn_output": "wo",
    "ffn_norm": "rms_ffn", "ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2",
}  # fmt: skip


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def opened(folder: Path, name: str, **options: Any) -> Checkpoint:
    return safetensors.read(put(folder / "in", DIRECTORIES[name]), ReadOptions(**options))


def values(ck: Checkpoint, name: str) -> np.ndarray:
    t = ck.tensors[name]
    raw = t.read().reshape(-1)
    if t.type == QType.BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(t.shape)
    return raw.view({QType.F32: "<f4", QType.F64: "<f8"}[t.type]).reshape(t.shape)


def canonical(m: Model, half: bool = False) -> dict[str, np.ndarray]:
    """A llama's or Qwen2's arrays by canonical name; `half`: as a file with half pairing holds them."""
    p = models.half_paired(m).p if half else m.p
    out = {"token_embd.weight": p["tok_emb"], "output_norm.weight": p["rms_final"]}
    out |= {"output.weight": p["wcls"]} if "wcls" in p else {}
    for i in range(m.dims["n_layer"]):
        out |= {f"blk.{i}.{ours}.weight": p[theirs][i] for ours, theirs in LAYERS.items()}
        out |= {f"blk.{i}.attn_{c}.bias": p["b" + c][i] for c in "qkv" if "b" + c in p}
    return out


def canonical_gpt2(m: Model) -> dict[str, np.ndarray]:
    p, c = m.p, m.dims["channels"]
    out = {"token_embd.weight": p["wte"], "position_embd.weight": p["wpe"]}
    out |= {"output_norm.weight": p["lnfw"], "output_norm.bias": p["lnfb"]}
    for i in range(m.dims["n_layer"]):
        for ours, theirs in {"attn_norm": "ln1", "attn_output": "attproj", "ffn_norm": "ln2", "ffn_up": "fc"}.items():
            out |= {f"blk.{i}.{ours}.weight": p[theirs + "w"][i], f"blk.{i}.{ours}.bias": p[theirs + "b"][i]}
        out |= {f"blk.{i}.ffn_down.weight": p["fcprojw"][i], f"blk.{i}.ffn_down.bias": p["fcprojb"][i]}
        for k, part in enumerate("qkv"):
            out[f"blk.{i}.attn_{part}.weight"] = p["qkvw"][i][k * c : (k + 1) * c]
            out[f"blk.{i}.attn_{part}.bias"] = p["qkvb"][i][k * c : (k + 1) * c]
    return out


def assert_holds(ck: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert set(ck.tensors) == set(expected)
    for name, a in expected.items():
        np.testing.assert_array_equal(values(ck, name), a, err_msg=name)


EXPECTED = {
    "llama": canonical(LLAMA, half=True),
    "llama bf16 in shards": canonical(models.rounded(LLAMA), half=True),
    "llama 3.1": canonical(LLAMA, half=True),
    "qwen2": canonical(models.rounded(QWEN2)),
    "gpt2": canonical_gpt2(GPT2),
    "gpt2 without prefix": canonical_gpt2(GPT2),
}


def write(ck: Checkpoint, path: Path, **options: Any) -> dict[str, bytes]:
    target = safetensors.targets(ck, WriteOptions(**options))[0]
    stored = write_rows(target.layout, ck.config, ck.tensors)
    safetensors.write(ck, stored, path, WriteOptions(**({"version": target.version} | options)))
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else {path.name: path.read_bytes()}

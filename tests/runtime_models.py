"""Random small models as checkpoints in memory, and their logits by the float64 judges."""

from __future__ import annotations

from pathlib import Path

import judges
import numpy as np

from ckptkit.arch import ARCHS, template
from ckptkit.checkpoint import Checkpoint, Config, Source
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.tensor import Tensor, from_array

CONFIGS = {
    "llama": Config("llama", 80, 53, 2, 6, 2, 96, 160, 16, rope_pairing="adjacent"),
    "qwen2": Config("qwen2", 80, 53, 2, 3, 1, 96, 224, 32, norm_eps=1e-6, rope_theta=1e6, rope_pairing="half"),
    "gpt2": Config("gpt2", 80, 53, 2, 3, 3, 96, 384, 32, tied_output=True),
    "microgpt": Config("microgpt", 80, 53, 2, 4, 4, 20, 36, 5),
}


def checkpoint(config: Config, seed: int = 0, encode=None) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """A random model, and the float64 values of its tensors. `encode(name, values)` may give (Tensor, decoded
    values)."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    values: dict[str, np.ndarray] = {}
    for name, shape, must in ARCHS[config.arch].names(config):
        if not must and (name != "output.weight" or config.tied_output):
            continue
        x = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("norm.weight"):
            x = 1 + 0.3 * x
        elif name.endswith("bias"):
            x *= 0.3
        elif "embd" not in name:
            x *= 1.5 / np.sqrt(shape[-1])
        tensors[name], values[name] = (encode and encode(name, x)) or (from_array(x, QType.F32), x)
    ck = Checkpoint(config, tensors, None, Source((Path("memory"),), "test"))
    return ck, {n: np.asarray(v, np.float64) for n, v in values.items()}


def truth(config: Config, w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """float64 logits (n, vocab) by the judge of the arch."""
    slabs: dict[str, list[np.ndarray]] = {}
    for name, x in w.items():
        slabs.setdefault(template(name).replace("blk.{i}.", ""), []).append(x)
    s = {n: np.stack(x) for n, x in slabs.items()}
    if config.arch == "microgpt":
        p = {"wte": w["token_embd.weight"], "wpe": w["position_embd.weight"], "lm_head": w["output.weight"]}
        names = {"attn_q": "attn_wq", "attn_k": "attn_wk", "attn_v": "attn_wv", "attn_output": "attn_wo", "ffn_up": "mlp_fc1", "ffn_down": "mlp_fc2"}  # fmt: skip  # noqa: E501
        for i in range(config.n_layer):
            p |= {f"layer{i}.{theirs}": w[f"blk.{i}.{ours}.weight"] for ours, theirs in names.items()}
        return judges.microgpt_logits(p, ids, config.n_head)
    if config.arch == "gpt2":
        p = {"wte": w["token_embd.weight"], "wpe": w["position_embd.weight"]}
        for ours, theirs in {
            "attn_norm": "ln1",
            "ffn_norm": "ln2",
            "attn_output": "attproj",
            "ffn_up": "fc",
            "ffn_down": "fcproj",
        }.items():
            p |= {theirs + kind[0]: s[f"{ours}.{kind}"] for kind in ("weight", "bias")}
        for kind in ("weight", "bias"):
            p["qkv" + kind[0]] = np.concatenate([s[f"attn_{c}.{kind}"] for c in "qkv"], 1)
        p |= {"lnfw": w["output_norm.weight"], "lnfb": w["output_norm.bias"]}
        return judges.gpt2_logits(p, ids, config.n_head)
    p = {"tok_emb": w["token_embd.weight"], "rms_final": w["output_norm.weight"], "rms_att": s["attn_norm.weight"], "rms_ffn": s["ffn_norm.weight"]}  # fmt: skip  # noqa: E501
    p |= {
        "wo": s["attn_output.weight"],
        "w1": s["ffn_gate.weight"],
        "w3": s["ffn_up.weight"],
        "w2": s["ffn_down.weight"],
    }
    p |= {"w" + c: s[f"attn_{c}.weight"] for c in "qkv"}
    p |= {"b" + c: s[f"attn_{c}.bias"] for c in "qkv" if f"attn_{c}.bias" in s}
    if "output.weight" in w:
        p["wcls"] = w["output.weight"]
    how = {"pairing": config.rope_pairing, "eps": config.norm_eps, "theta": config.rope_theta}
    return judges.llama_logits(p, ids, n_head=config.n_head, n_kv_head=config.n_kv_head, **how)


def random_blocks(type: QType, shape: tuple[int, int], scale: float, seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """Random bytes as a tensor with sane scales, and its values by the `gguf` package."""
    import gguf

    rng = np.random.default_rng(seed)
    block = BLOCKS[type]
    if type in (QType.F32, QType.F16):
        x = (rng.standard_normal(shape) * scale).astype(np.float32 if type == QType.F32 else np.float16)
        return from_array(x, type), x.astype(np.float64)
    if type == QType.BF16:
        bits = ((rng.standard_normal(shape) * scale).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return from_array(bits, type), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    n = shape[0] * shape[1] // block.elements
    data = rng.integers(0, 256, (n, block.nbytes), dtype=np.uint8)
    # Halves that scale (and shift) a block: at its start, but at the end of Q6_K and Q3_K, and after 80 bytes in Q2_K.
    at, count, size = {
        QType.Q8_0: (0, 1, 1 / 127), QType.Q4_0: (0, 1, 1 / 8), QType.Q5_0: (0, 1, 1 / 16), QType.Q4_1: (0, 2, 1 / 8),
        QType.Q5_1: (0, 2, 1 / 16), QType.Q4_K: (0, 2, 1 / 500), QType.Q5_K: (0, 2, 1 / 1000), QType.Q6_K: (208, 1, 1 / 3000),  # noqa: E501
        QType.Q3_K: (108, 1, 1 / 100), QType.Q2_K: (80, 2, 1 / 30),
    }[type]  # fmt: skip
    halves = (rng.uniform(0.5, 1, (n, count)) * scale * size * rng.choice([-1, 1], (n, count))).astype(np.float16)
    data[:, at : at + 2 * count] = halves.view(np.uint8)
    rows = data.reshape(shape[0], -1)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(type)))
    return from_array(rows, type, shape), values.reshape(shape).astype(np.float64)

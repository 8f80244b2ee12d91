"""Readers with struct and numpy only, so that tests can look into a file without trusting the package.

Each takes the bytes of a well-formed file and gives (sizes, arrays) under the program's own names; nothing is checked.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

Array = np.ndarray


def _bf16(raw: bytes) -> Array:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def llmc_gpt2(raw: bytes) -> tuple[dict[str, int], dict[str, Array]]:
    """llm.c GPT-2 version 3 or 5; wte keeps its padded rows."""
    _, version, t, v, n, heads, c, vp = np.frombuffer(raw, "<i4", 8).tolist()
    flat = np.frombuffer(raw, "<f4", offset=1024) if version == 3 else _bf16(raw[1024:])
    shapes = {"wte": (vp, c), "wpe": (t, c), "ln1w": (n, c), "ln1b": (n, c), "qkvw": (n, 3 * c, c), "qkvb": (n, 3 * c)}
    shapes |= {"attprojw": (n, c, c), "attprojb": (n, c), "ln2w": (n, c), "ln2b": (n, c), "fcw": (n, 4 * c, c)}
    shapes |= {"fcb": (n, 4 * c), "fcprojw": (n, c, 4 * c), "fcprojb": (n, c), "lnfw": (c,), "lnfb": (c,)}
    return {"max_t": t, "vocab": v, "n_layer": n, "n_head": heads, "channels": c}, _slice(flat, shapes)


def llmc_state(raw: bytes, vocab: int) -> dict[str, Array]:
    """x, y, logits and loss of a GPT-2 debug state; the vocabulary size comes from the model."""
    _, _, b, t = np.frombuffer(raw, "<i4", 4).tolist()
    n = b * t
    ids = np.frombuffer(raw, "<i4", 2 * n, 1024).reshape(2, b, t)
    rest = np.frombuffer(raw, "<f4", n * vocab + 1, 1024 + 8 * n)
    return {"x": ids[0], "y": ids[1], "logits": rest[:-1].reshape(b, t, vocab), "loss": rest[-1]}


def llmc_tokens(raw: bytes) -> list[bytes]:
    """The tokens of an llm.c tokenizer file."""
    tokens, at = [], 1024
    while at < len(raw):
        tokens.append(raw[at + 1 : at + 1 + raw[at]])
        at += 1 + raw[at]
    return tokens


def nanoeuler(raw: bytes) -> tuple[dict[str, int], list[tuple[int, int]], dict[str, Array]]:
    """Sizes, merges, arrays."""
    v, c, nh, nkv, nl, t, h, k, _, n = struct.unpack_from("<10i", raw)
    a, b = np.frombuffer(raw, "<i4", 2 * n, 40).reshape(2, n).tolist()
    qkv = c + 2 * nkv * (c // nh)
    shapes = {"tok": (v, c), "rms1g": (nl, c), "qkvw": (nl, qkv, c), "attprojw": (nl, c, c), "rms2g": (nl, c)}
    shapes |= {"gatew": (nl, h, c), "upw": (nl, h, c), "downw": (nl, c, h), "rmsfg": (c,), "headw": (k * v, c)}
    sizes = {"V": v, "C": c, "NH": nh, "NKV": nkv, "NL": nl, "T": t, "H": h, "K": k}
    return sizes, list(zip(a, b, strict=True)), _slice(np.frombuffer(raw, "<f4", offset=40 + 8 * n), shapes)


def safetensors(raw: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    """Metadata and arrays; BF16 comes as float32."""
    n = struct.unpack_from("<Q", raw)[0]
    infos = json.loads(raw[8 : 8 + n])
    meta = infos.pop("__metadata__", {})
    out = {}
    for name, info in infos.items():
        lo, hi = info["data_offsets"]
        blob = raw[8 + n + lo : 8 + n + hi]
        kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "BOOL": "?"}
        flat = _bf16(blob) if info["dtype"] == "BF16" else np.frombuffer(blob, kinds[info["dtype"]])
        out[name] = flat.reshape(info["shape"])
    return meta, out


def gguf(raw: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Keys and arrays (numpy order) of a GGUF v2 or v3 of either byte order; F32, F16 and BF16 tensors only."""
    order = "<" if struct.unpack_from("<I", raw, 4)[0] < 65536 else ">"
    at = 8

    def take(code: str) -> Any:
        nonlocal at
        (x,) = struct.unpack_from(order + code, raw, at)
        at += struct.calcsize(order + code)
        return x

    def text() -> str:
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n : at].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = take("I"), take("Q")
            return [value(inner) for _ in range(n)]
        return take("BbHhIif?..Qqd"[kind])

    n_tensors, n_keys = take("Q"), take("Q")
    keys = {text(): value(take("I")) for _ in range(n_keys)}
    infos = []
    for _ in range(n_tensors):
        name, n_dims = text(), take("I")
        dims = [take("Q") for _ in range(n_dims)]
        infos.append((name, dims[::-1], take("I"), take("Q")))
    align = keys.get("general.alignment", 32)
    start = at + -at % align
    out = {}
    for name, shape, kind, offset in infos:
        n = int(np.prod(shape))
        if kind == 30:
            bits = np.frombuffer(raw, order + "u2", n, start + offset).astype(np.uint32)
            flat = (bits << np.uint32(16)).view(np.float32)
        else:
            flat = np.frombuffer(raw, order + {0: "f4", 1: "f2"}[kind], n, start + offset)
        out[name] = flat.reshape(shape)
    return keys, out


def nx_arrays(tensors: dict[str, Array]) -> dict[str, Array]:
    """The Qwen2 trainer's in-major arrays out of its own GGUF's tensors."""
    out = {"E": tensors["token_embd.weight"], "Wlm": tensors["output.weight"].T}
    out["final_gamma"] = tensors["output_norm.weight"]
    names = {"attn_output": "Wo", "ffn_gate": "Wg", "ffn_up": "Wu", "ffn_down": "Wd"}
    names |= {f"attn_{c}": f"W{c}" for c in "qkv"}
    for i in range(sum(k.endswith("attn_q.weight") for k in tensors)):
        for theirs, ours in names.items():
            out[f"L{i}.{ours}"] = tensors[f"blk.{i}.{theirs}.weight"].T
        out |= {f"L{i}.b{c}": tensors[f"blk.{i}.attn_{c}.bias"] for c in "qkv"}
        out |= {f"L{i}.{c}_gamma": tensors[f"blk.{i}.{c}_norm.weight"] for c in ("attn", "ffn")}
    return out


def _slice(flat: Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    out, at = {}, 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        out[name] = flat[at : at + n].reshape(shape)
        at += n
    return out

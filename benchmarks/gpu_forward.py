"""Whole models on the card against float64: the stored references of trained files, and numpy on random weights of
every type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ckptkit.runtime as runtime
from ckptkit import formats
from ckptkit.arch import ARCHS
from ckptkit.checkpoint import Checkpoint, Config
from ckptkit.quant.encode import decode_rows
from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime.sampler import Sampler, Sampling

from .gpu_check import Array, Finding, collected, reference_act, reference_norm, rotate
from .gpu_shapes import random_model

TRAINED = Path(__file__).parent.parent / "fixtures" / "trained"
GREEDY = Sampling(temp=0)

TINY = {
    "gpt2": Config("gpt2", 64, 509, 2, 4, 4, 256, 512, 64),
    "llama": Config("llama", 320, 300, 2, 4, 2, 256, 512, 64, rope_pairing="adjacent"),
    "qwen2": Config("qwen2", 320, 301, 2, 8, 2, 256, 768, 32, 1e-6, 1e6, "half", tied_output=True),
    "microgpt": Config("microgpt", 64, 40, 2, 4, 4, 256, 512, 64),
}

Q = QType
TYPES = {  # every type under one arch, every arch under some
    "gpt2": (Q.F32, Q.BF16, Q.Q8_0),
    "llama": (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K),
    "qwen2": (Q.F16, Q.Q4_0, Q.Q4_K), "microgpt": (Q.F32, Q.Q8_0),
}  # fmt: skip


def values(ck: Checkpoint, name: str) -> Array | None:
    """A tensor in float64; None if there is none."""
    t = ck.tensors.get(name)
    return None if t is None else decode_rows(t.read(), t.type).astype(np.float64).reshape(t.shape)


def reference(ck: Checkpoint, ids: Array) -> Array:
    """Logits (n, vocab_size) of a whole prompt in float64."""
    c, arch, n = ck.config, ARCHS[ck.config.arch], len(ids)
    angle = np.arange(n)[:, None] * c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)

    def get(name: str) -> Array:
        found = values(ck, name)
        assert found is not None
        return found

    def linear(x: Array, name: str) -> Array:
        bias = values(ck, name + ".bias")
        return x @ get(name + ".weight").T + (0 if bias is None else bias)

    def norm(x: Array, name: str) -> Array:
        return reference_norm(x, arch.norm, values(ck, name + ".weight"), values(ck, name + ".bias"), c.norm_eps)

    x = get("token_embd.weight")[ids]
    if arch.position == "learned":
        x = x + get("position_embd.weight")[:n]
    if arch.embd_norm:
        x = reference_norm(x, arch.norm, None, None, c.norm_eps)
    for i in range(c.n_layer):
        b = f"blk.{i}."
        h = norm(x, b + "attn_norm")
        q, key, v = (linear(h, b + f"attn_{p}").reshape(n, -1, c.head_dim) for p in "qkv")
        q, key = rotate(q, angle, c.rope_pairing), rotate(key, angle, c.rope_pairing)
        heads = np.empty_like(q)
        for j in range(c.n_head):
            kv = j * c.n_kv_head // c.n_head
            s = q[:, j] @ key[:, kv].T / np.sqrt(c.head_dim)
            s[np.triu_indices(n, 1)] = -np.inf
            p = np.exp(s - s.max(1, keepdims=True))
            heads[:, j] = p / p.sum(1, keepdims=True) @ v[:, kv]
        x = x + linear(heads.reshape(n, -1), b + "attn_output")
        h = norm(x, b + "ffn_norm")
        names = ("ffn_gate", "ffn_up") if arch.act == "silu_gate" else ("ffn_up",)
        x = x + linear(reference_act(arch.act, np.concatenate([linear(h, b + m) for m in names], 1)), b + "ffn_down")
    x = norm(x, "output_norm") if arch.final_norm else x
    return x @ get("output.weight" if "output.weight" in ck.tensors else "token_embd.weight").T


def judge(model: Any, ids: Array, want: Array, what: str, limit: float) -> list[Finding]:
    """The prompt at once, and token by token after half of it, against the same logits."""
    found = [Finding(what + " prompt", float(np.abs(model.forward(ids) - want).max()), limit)]
    cache, half = model.new_cache(), len(ids) // 2
    worst = float(np.abs(model.forward(ids[:half], cache) - want[:half]).max()) if half else 0.0
    for i in range(half, len(ids)):
        worst = max(worst, float(np.abs(model.forward(ids[i : i + 1], cache, logits="last") - want[i]).max()))
    return [*found, Finding(what + " steps", worst, limit)]


def greedy(model: Any, prompt: Array, n: int) -> list[int]:
    """`n` greedy tokens after a prompt, by the device's own loop."""
    cache = model.new_cache()
    first = int(model.forward(prompt, cache, logits="last").argmax())
    out = [first]
    for token in model.decode(cache, first, Sampler(GREEDY), []):
        if len(out) >= n:
            break
        out.append(token)
    return out[:n]


def run(say: Callable[[str], Any], precision: str = "exact") -> bool:
    """All models; says the worst difference of each. True if all are within their limits."""
    with collected() as plans:
        compare_all(lambda _line: None, precision)
    gpu.load(plans)
    found = compare_all(say, precision)
    failed = [f for f in found if not f.ok]
    worst = max(found, key=lambda f: f.error / max(f.limit, 1e-30))
    say(
        f"forward {precision}: {len(found)} cases, {len(failed)} failed; "
        f"worst {worst.what}: {worst.error:.1e} of {worst.limit:.1e}"
    )
    for f in failed[:20]:
        say(f"  FAILED {f.what}: {f.error:.2e} > {f.limit:.1e}")
    return not failed


def compare_all(say: Callable[[str], Any], precision: str) -> list[Finding]:
    """Every comparison, made."""
    found: list[Finding] = []
    near = (
        2e-4 if precision == "exact" else 0.1
    )  # fast is judged by its mean nll and its first choices, not by single logits
    files = (
        ("gpt2_tiny.bin", "gpt2_tiny_fp32", "prompt", "prompt_logits"),
        ("nanoeuler_main.bin", "nanoeuler_main", "prompt", "logits_head0"),
        ("nx_ours_qwen.gguf", "nx_ours_qwen", "tokens", "logits"),
        ("microgpt_names.json", "microgpt_names", "tokens", "logits"),
    )
    for file, name, ids, logits in files:
        ck = formats.open(TRAINED / file)
        with np.load(TRAINED / f"{name}.ref.npz") as stored:
            ref = dict(stored)
        if "rope_base" in ref:
            ck = replace(
                ck, config=replace(ck.config, rope_theta=float(ref["rope_base"]), norm_eps=float(ref["rms_eps"]))
            )
        context = min(ck.config.context_length, 2048)
        with runtime.load(ck, "cuda", precision, context=context) as model:
            found += judge(model, ref[ids], ref[logits], file, near)
            if "x" in ref:
                found += judge(model, ref["x"][0], ref["logits_row0"], file, near)
            if "greedy" in ref and ids == "prompt":
                want = (
                    ref["greedy"][-40:].tolist()
                    if len(ref["greedy"]) <= 40
                    else ref["greedy"][len(ref[ids]) :].tolist()
                )
                got = greedy(model, ref[ids], len(want))
                say(f"  {file} greedy: {sum(a == b for a, b in zip(got, want, strict=True))} of {len(want)} equal")
    rng = np.random.default_rng(5)
    for arch, config in TINY.items():
        for type in TYPES[arch]:
            ck = random_model(config, type, pool_values=1 << 18)
            ids = rng.integers(0, config.vocab_size, 50 if config.context_length == 64 else 300)
            want = reference(ck, ids)
            types = ("f16", "f16") if type == QType.F16 else ("f32", "f32")
            with runtime.load(ck, "cuda", precision, type_k=types[0], type_v=types[1]) as model:
                scale = float(np.abs(want).max())
                limit = scale * (2e-3 if types[0] == "f16" else 1e-4) if precision == "exact" else scale * 0.05
                found += judge(model, ids[-60:], reference(ck, ids[-60:]), f"{arch} {type.name}", limit)
                if len(ids) > 60:
                    found.append(
                        Finding(f"{arch} {type.name} long", float(np.abs(model.forward(ids) - want).max()), limit)
                    )
                full = greedy(model, ids[:20], 40)
                cache = model.new_cache()
                step = [int(model.forward(ids[:20], cache, logits="last").argmax())]
                while len(step) < 40:
                    step.append(int(model.forward(step[-1:], cache, logits="last").argmax()))
                found.append(Finding(f"{arch} {type.name} greedy loop", float(full != step), 0.0))
    return found

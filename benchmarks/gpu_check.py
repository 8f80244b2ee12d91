"""Every CUDA kernel on odd shapes against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckptkit.quant.encode import decode_rows
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.runtime import cuda_driver as gpu
from ckptkit.runtime import kernels_cuda as k
from ckptkit.runtime.cuda_layout import LAYOUTS
from ckptkit.runtime.weights import Norm
from ckptkit.tensor import Tensor, from_array

from .gpu_shapes import random_blocks

Array = np.ndarray[Any, Any]

# integers of 4 to 6 bits are multiplied as they are stored, and their offset is taken from the sum
LIMITS = dict.fromkeys((t for t in LAYOUTS if LAYOUTS[t].values > 16), 2e-5)


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest difference over the largest value, and what is allowed."""

    what: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """NaN is never within a limit."""
        return bool(self.error <= self.limit)


def compare(what: str, got: Array, want: Array, limit: float, typical: float = 1e-30) -> Finding:
    """Largest difference, relative to the largest expected value, or to a typical one where the few there are may be
    small."""
    return Finding(what, float(np.abs(got - want).max() / max(float(np.abs(want).max()), typical)), limit)


def work(**more: Any) -> Any:
    """A workspace for single kernels."""
    w = k.workspace(threads=1, fast=False, max_tokens=64, widest=1, head_dim=1, n_head=1, n_kv_head=1, context=1)
    for name, value in more.items():
        setattr(w, name, value)
    return w


def batch(w: Any, **arrays: Any) -> Any:
    """What kernels read of a batch."""
    return SimpleNamespace(work=w, **{n: gpu.upload(np.asarray(a, np.int32)) for n, a in arrays.items()})


def matrix(rng: np.random.Generator, type: QType, n_rows: int, n_in: int) -> tuple[Tensor, Array]:
    """A random tensor and its values in float64."""
    blocks = random_blocks(type, n_rows * n_in // BLOCKS[type].elements, rng, 0.5)
    t = from_array(blocks.reshape(n_rows, -1), type, (n_rows, n_in))
    return t, decode_rows(t.read(), type).astype(np.float64)


def reference_norm(x: Array, kind: str, gain: Array | None, bias: Array | None, eps: float) -> Array:
    """Norms as their papers write them, in float64."""
    x = x.astype(np.float64)
    if kind == "layer":
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
    elif kind == "rms":
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + eps)
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def reference_act(act: str, v: Array) -> Array:
    """Activations in float64."""
    if act == "silu_gate":
        gate, up = np.split(v, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up
    if act == "gelu_tanh":
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    return np.maximum(v, 0) if act == "relu" else v


def products(rng: np.random.Generator) -> Iterator[Callable[[], Finding]]:
    """norm_linear, norm_ffn and linear_add of every type."""
    shapes = {
        1: ((1, 31), (31, 33), (33, 100), (700, 896), (50, 4864)),
        32: ((1, 32), (31, 96), (33, 160), (700, 896), (50, 4864)),
        256: ((1, 256), (33, 768), (700, 2048)),
    }
    for type in LAYOUTS:
        for n_rows, n_in in shapes[BLOCKS[type].elements]:
            for kind, act, n in (
                ("rms", "", 1),
                ("layer", "gelu_tanh", 3),
                ("", "add", 2),
                ("rms", "silu_gate", 1),
                ("", "relu", 1),
                ("layer", "picked", 2),
                ("rms", "silu_gate", 40),
                ("", "add", 33),
                ("layer", "", 17),
            ):
                yield lambda type=type, n_rows=n_rows, n_in=n_in, kind=kind, act=act, n=n: product(
                    rng, type, n_rows, n_in, kind, act, n
                )


def product(rng: np.random.Generator, type: QType, n_rows: int, n_in: int, kind: str, act: str, n: int) -> Finding:
    """One product; a bias with every activation, a norm bias with layer."""
    rows = 2 * n_rows if act == "silu_gate" else n_rows
    t, w = matrix(rng, type, rows, n_in)
    bias = rng.standard_normal(rows, np.float32) if act else None
    weight = k.place([t], None if bias is None else [from_array(bias, QType.F32)])
    gain = rng.uniform(0.5, 1.5, n_in).astype(np.float32)
    shift = rng.standard_normal(n_in, np.float32) if kind == "layer" else None
    norm = Norm(kind, gpu.upload(gain), None if shift is None else gpu.upload(shift), 1e-5) if kind else None
    x = (rng.standard_normal((n, n_in)) * 2 + 0.5).astype(np.float32)
    y = rng.standard_normal((n, n_rows)).astype(np.float32)
    out, source = gpu.upload(y), gpu.upload(x)
    picked = [1, 1] if act == "picked" else list(range(n))
    b = batch(work(), rows=picked)
    if act == "add":
        k.linear_add(out, source, weight, b)
    elif act in ("", "picked"):
        k.norm_linear(out, source, norm, weight, b, b.rows if act else None)
    else:
        k.norm_ffn(out, source, norm, weight, act, b)
    inner = reference_norm(x, kind, gain if kind else None, shift, 1e-5)[picked]
    typical = float(np.linalg.norm(inner, axis=1).max() * np.linalg.norm(w, axis=1).max() / np.sqrt(n_in))
    want = reference_act(act, inner @ w.T + (0 if bias is None else bias)) + (y if act == "add" else 0)
    what = f"{type.name} {n_rows}x{n_in} n={n} {kind or '-'} {act or 'linear'}"
    return compare(what, gpu.download(out), want, LIMITS.get(type, 3e-6), typical)


def rotate(x: Array, angle: Array, pairing: str) -> Array:
    """Rotary positions in float64: x (n, heads, head_dim), angle (n, head_dim / 2)."""
    if not pairing:
        return x
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = np.empty_like(x)
    half = x.shape[2] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if pairing == "adjacent" else (x[..., :half], x[..., half:])
    first, second = a * cos - b * sin, a * sin + b * cos
    if pairing == "adjacent":
        out[..., 0::2], out[..., 1::2] = first, second
    else:
        out[..., :half], out[..., half:] = first, second
    return out


def attentions(rng: np.random.Generator) -> Iterator[Callable[[], Finding]]:
    """Attention over short and long caches, every pairing and cache type."""
    for n_head, n_kv, head_dim in (
        (1, 1, 8),
        (3, 1, 24),
        (4, 2, 64),
        (14, 2, 64),
        (28, 4, 128),
        (6, 6, 80),
        (5, 1, 256),
    ):
        for past, n in ((0, 1), (37, 1), (255, 1), (256, 1), (700, 1), (5, 3), (300, 7), (0, 33), (520, 130)):
            for pairing, types in (
                ("", (np.float32, np.float32)),
                ("adjacent", (np.float16, np.float32)),
                ("half", (np.float16, np.float16)),
            ):
                yield lambda h=n_head, kv=n_kv, d=head_dim, past=past, n=n, p=pairing, t=types: attention(
                    rng, h, kv, d, past, n, p, t
                )


def deep_attentions(rng: np.random.Generator) -> Iterator[Callable[[], Finding]]:
    """The kernel for long caches, at short ones too."""
    for n_head, n_kv, head_dim in ((1, 1, 8), (3, 1, 24), (14, 2, 64), (28, 4, 128), (6, 6, 80), (16, 1, 64)):
        for past, n in ((0, 1), (15, 1), (16, 1), (700, 1), (2100, 3), (8191, 1)):
            for pairing, types in (
                ("", (np.float32, np.float32)),
                ("adjacent", (np.float16, np.float32)),
                ("half", (np.float16, np.float16)),
            ):
                yield lambda h=n_head, kv=n_kv, d=head_dim, past=past, n=n, p=pairing, t=types: attention(
                    rng, h, kv, d, past, n, p, t, deep_from=0
                )


def attention(
    rng: np.random.Generator, n_head: int, n_kv: int, d: int, past: int, n: int, pairing: str, types: Any,
    deep_from: int = 1 << 30,
) -> Finding:  # fmt: skip
    """`n` tokens of sequence 1 after `past` cached ones."""
    context, width = past + n + 3, -(-d // 16) * 16
    keys, values = (np.zeros((2, n_kv, context, width), t) for t in types)
    keys[1, :, :past, :d] = rng.standard_normal((n_kv, past, d))
    values[1, :, :past, :d] = rng.standard_normal((n_kv, past, d))
    qkv = rng.standard_normal((n, (n_head + 2 * n_kv) * d)).astype(np.float32)
    angle = np.arange(context)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    table = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    pos = np.arange(past, past + n)
    b = batch(work(reach=context, n_head=n_head, deep_from=deep_from), pos=pos, seq=np.ones(n))
    slack = np.zeros(16 * width, np.float32)
    dk, dv = (
        gpu.upload(np.concatenate([c.reshape(-1), slack.astype(c.dtype)]))[: c.size].reshape(c.shape)
        for c in (keys, values)
    )
    out = gpu.upload(np.full((n, n_head * d), np.nan, np.float32))
    k.attention(out, gpu.upload(qkv), gpu.upload(table) if pairing else None, pairing, dk, dv, b)
    q, new_k, new_v = np.split(qkv.astype(np.float64).reshape(n, -1, d), [n_head, n_head + n_kv], axis=1)
    q, new_k = rotate(q, angle[pos], pairing), rotate(new_k, angle[pos], pairing)
    all_k, all_v = keys[1, :, :, :d].astype(np.float64), values[1, :, :, :d].astype(np.float64)
    all_k[:, pos] = new_k.transpose(1, 0, 2).astype(np.float32).astype(types[0])
    all_v[:, pos] = new_v.transpose(1, 0, 2).astype(np.float32).astype(types[1])
    want = np.empty((n, n_head, d))
    for h in range(n_head):
        s = q[:, h] @ all_k[h * n_kv // n_head].T / np.sqrt(d)
        s[np.arange(context)[None] > pos[:, None]] = -np.inf
        p = np.exp(s - s.max(1, keepdims=True))
        want[:, h] = p / p.sum(1, keepdims=True) @ all_v[h * n_kv // n_head]
    got = gpu.download(out)
    stored = gpu.download(dk)[1][:, pos, :d].astype(np.float64)
    kept = compare("", stored, all_k[:, pos], 0).error
    limit = 2e-6 if np.float16 not in types else 1e-3  # a key that is stored as f16 may round to the neighbouring half
    kinds = "/".join(np.dtype(t).name for t in types)
    what = f"{'attention' if deep_from else 'deep'} {n_head}/{n_kv}x{d} past={past} n={n} {pairing or '-'} {kinds}"
    worst = compare(what, got, want.reshape(n, -1), limit)
    return worst if kept <= 1e-3 else Finding(what + " stored keys", kept, 1e-3)


def small(rng: np.random.Generator) -> Iterator[Callable[[], Finding]]:
    """Embedding of every type, norms, argmax."""
    for type in LAYOUTS:
        yield lambda type=type: embedding(rng, type)
    for kind in ("rms", "layer"):
        for width in (1, 31, 33, 896):
            yield lambda kind=kind, width=width: plain_norm(rng, kind, width)
    for n in (1, 31, 1000, 151936):
        yield lambda n=n: pick(rng, n)


def embedding(rng: np.random.Generator, type: QType) -> Finding:
    """Rows of a matrix plus learned positions."""
    t, w = matrix(rng, type, 40, 512)
    positions = rng.standard_normal((9, 512), np.float32)
    b = batch(work(), tokens=[39, 0, 17], pos=[8, 0, 3])
    out = gpu.upload(np.full((3, 512), np.nan, np.float32))
    k.embed(out, k.place([t], None), gpu.upload(positions), b)
    return compare(
        f"embed {type.name}", gpu.download(out), w[[39, 0, 17]] + positions[[8, 0, 3]].astype(np.float64), 1e-6
    )


def plain_norm(rng: np.random.Generator, kind: str, width: int) -> Finding:
    """A norm in place, without gain."""
    x = (rng.standard_normal((3, width)) + 1).astype(np.float32)
    buffer = gpu.upload(x)
    k.norm(buffer, buffer, Norm(kind, None, None, 1e-5), batch(work()))
    return compare(f"norm {kind} {width}", gpu.download(buffer), reference_norm(x, kind, None, None, 1e-5), 2e-6)


def pick(rng: np.random.Generator, n: int) -> Finding:
    """argmax with ties: the lowest index wins."""
    x = rng.integers(0, max(n // 3, 2), (3, n)).astype(np.float32)
    x[1, n // 2] = np.nan
    out = gpu.upload(np.full(3, -1, np.int32))
    k.argmax(out, gpu.upload(x), batch(work()))
    want = np.nanargmax(np.where(np.isnan(x), -np.inf, x), axis=1)
    return compare(f"argmax {n}", gpu.download(out).astype(np.float64), want.astype(np.float64), 0.0)


def noted_steps(model: Any, cache: Any, _sequences: Any, _tokens: Any, samplers: Any, _histories: Any) -> None:
    """In place of own_steps: only what they launch."""
    k.ready(model, cache, samplers, 1)


@contextmanager
def collected() -> Iterator[list[Any]]:
    """Notes the kernels that would be launched, so that all can be compiled at once; what comes out of them is
    nonsense."""
    plans: list[Any] = []
    kept = {name: getattr(gpu, name) for name in ("launch", "capture", "replay", "load", "forget")}
    gpu.launch = lambda plan, *_args, **_more: plans.append(plan)
    gpu.capture = lambda fn: gpu.Graph(fn())
    gpu.replay = gpu.forget = lambda _graph: None  # type: ignore[assignment]
    gpu.load = lambda wanted, *_more: plans.extend(wanted)
    own_steps, k.own_steps = k.own_steps, noted_steps  # which would wait for tokens that nobody picks
    try:
        yield plans
    finally:
        k.own_steps = own_steps
        for name, function in kept.items():
            setattr(gpu, name, function)


def run(say: Callable[[str], Any], only: str = "", every: int = 1) -> bool:
    """All checks, or every n-th; says what failed and the worst of each group. True if none failed."""
    from .gpu_check_pick import picks

    rng = np.random.default_rng(1)
    groups = {"product": products, "attention": attentions, "deep": deep_attentions, "small": small, "pick": picks}
    good = True
    for name, group in groups.items():
        if only and only != name:
            continue
        tests = list(group(rng))[::every]
        with collected() as plans, np.errstate(all="ignore"):
            for test in tests:
                test()
        gpu.load(plans)
        findings = [test() for test in tests]
        failed = [f for f in findings if not f.ok]
        worst = max(findings, key=lambda f: f.error / max(f.limit, 1e-30))
        say(
            f"{name}: {len(findings)} cases, {len(failed)} failed, {len(set(plans))} kernels; "
            f"worst {worst.what}: {worst.error:.1e}"
        )
        for f in failed[:12]:
            say(f"  FAILED {f.what}: {f.error:.2e} > {f.limit:.0e}")
        good &= not failed
    return good

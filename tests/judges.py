"""Independent float64 forward passes in plain numpy, transcribed from the programs; they import nothing of the package.

| function         | program                                              | arrays                                     |
|------------------|------------------------------------------------------|--------------------------------------------|
| gpt2_logits      | llm.c train_gpt2.c                                   | its 16 names, slabs (L, ...)               |
| llama_logits     | llama2.c run.c; with bq bk bv: Qwen2                 | its names, slabs (L, out, in), w1 = gate   |
| llama3_logits    | llm.c train_llama3.py                                | its names, slabs; c_fc = up, c_fc2 = gate  |
| nanoeuler_logits | nanoeuler_cuda.cu forward_cpu                        | its 10 names, slabs, K heads               |
| nx_logits        | the Qwen2 trainer in nx                              | its names, matrices (in, out)              |
| microgpt_logits  | microgpt.py                                          | its state_dict                             |

`ids` is one sequence from position 0; the answer is (n, vocab) unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray
LLAMA31 = {"factor": 8.0, "low": 1.0, "high": 4.0, "context": 8192.0}  # the constants of train_llama3.py


def nll(logits: Array, targets: Sequence[int] | Array) -> Array:
    """-log p(target) per position, in nats: logits (n, vocab), targets (n,)."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), np.asarray(targets)]


def choice_nll(logits: Array, n_context: int, completion: Sequence[int]) -> float:
    """Mean nll of a completion, as llm.c ranks them: logits (n_context + n, vocab) of the whole."""
    return float(nll(logits[n_context - 1 : n_context - 1 + len(completion)], completion).mean())


def _softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _f64(p: Mapping[str, Array]) -> dict[str, Array]:
    return {k: np.asarray(v, np.float64) for k, v in p.items()}


def _attend(q: Array, k: Array, v: Array, n_head: int, n_kv_head: int) -> Array:
    """Causal attention, head by head: q (n, n_head * hd), k and v (n, n_kv_head * hd)."""
    n = len(q)
    hd = q.shape[1] // n_head
    out = np.empty_like(q)
    mask = np.triu(np.full((n, n), -np.inf), 1)
    for h in range(n_head):
        g = h // (n_head // n_kv_head)
        qh, kh, vh = q[:, h * hd : (h + 1) * hd], k[:, g * hd : (g + 1) * hd], v[:, g * hd : (g + 1) * hd]
        out[:, h * hd : (h + 1) * hd] = _softmax(qh @ kh.T / np.sqrt(hd) + mask) @ vh
    return out


def gpt2_logits(p: Mapping[str, Array], ids: Sequence[int] | Array, n_head: int, vocab: int | None = None) -> Array:
    """LayerNorm 1e-5, tanh GELU, learned positions, tied output; padded rows of wte are cut at `vocab`."""
    w = _f64(p)
    ids = np.asarray(ids)

    def norm(x: Array, g: Array, b: Array) -> Array:
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-5) * g + b

    x = w["wte"][ids] + w["wpe"][: len(ids)]
    for i in range(len(w["ln1w"])):
        qkv = norm(x, w["ln1w"][i], w["ln1b"][i]) @ w["qkvw"][i].T + w["qkvb"][i]
        q, k, v = np.split(qkv, 3, axis=1)
        x = x + _attend(q, k, v, n_head, n_head) @ w["attprojw"][i].T + w["attprojb"][i]
        h = norm(x, w["ln2w"][i], w["ln2b"][i]) @ w["fcw"][i].T + w["fcb"][i]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w["fcprojw"][i].T + w["fcprojb"][i]
    return norm(x, w["lnfw"], w["lnfb"]) @ w["wte"][:vocab].T


def _rms(x: Array, g: Array | float, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * g


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rope_freqs(hd: int, theta: float, scaling: Mapping[str, float] | None = None) -> Array:
    """Radians per position of each pair (hd / 2,); `scaling` as in Llama 3.1."""
    freqs = theta ** (-np.arange(0, hd, 2, dtype=np.float64) / hd)
    if scaling is None:
        return freqs
    out = []
    for f in freqs:
        turns = scaling["context"] * f / (2 * np.pi)  # how often the pair turns within the old context
        if turns > scaling["high"]:
            out.append(f)
        elif turns < scaling["low"]:
            out.append(f / scaling["factor"])
        else:
            smooth = (turns - scaling["low"]) / (scaling["high"] - scaling["low"])
            out.append((1 - smooth) * f / scaling["factor"] + smooth * f)
    return np.array(out)


def _rope(x: Array, freqs: Array, pairing: str) -> Array:
    """Rotate x (n, heads * hd), the first row at position 0, pair by pair."""
    half = len(freqs)
    x = x.reshape(len(x), -1, 2 * half).copy()
    for pos in range(len(x)):
        for j, f in enumerate(freqs):
            a, b = {"adjacent": (2 * j, 2 * j + 1), "half": (j, j + half)}[pairing]
            c, s = np.cos(pos * f), np.sin(pos * f)
            xa, xb = x[pos, :, a].copy(), x[pos, :, b].copy()
            x[pos, :, a], x[pos, :, b] = xa * c - xb * s, xa * s + xb * c
    return x.reshape(len(x), -1)


def llama_hidden(
    p: Mapping[str, Array],
    ids: Sequence[int] | Array,
    *,
    n_head: int,
    n_kv_head: int,
    pairing: str = "adjacent",
    eps: float = 1e-5,
    theta: float = 10000.0,
    scaling: Mapping[str, float] | None = None,
) -> Array:
    """What the output matrix sees, after the last norm: (n, dim)."""
    w = _f64(p)
    x = w["tok_emb"][np.asarray(ids)]
    freqs = rope_freqs(w["wq"].shape[1] // n_head, theta, scaling)
    for i in range(len(w["wq"])):
        h = _rms(x, w["rms_att"][i], eps)
        q, k, v = (h @ w["w" + c][i].T + (w["b" + c][i] if "b" + c in w else 0) for c in "qkv")
        o = _attend(_rope(q, freqs, pairing), _rope(k, freqs, pairing), v, n_head, n_kv_head)
        x = x + o @ w["wo"][i].T
        h = _rms(x, w["rms_ffn"][i], eps)
        x = x + (_silu(h @ w["w1"][i].T) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return _rms(x, w["rms_final"], eps)


def llama_logits(p: Mapping[str, Array], ids: Sequence[int] | Array, **how: object) -> Array:
    """Tied when there is no `wcls`; keywords as for llama_hidden."""
    return llama_hidden(p, ids, **how) @ np.asarray(p.get("wcls", p["tok_emb"]), np.float64).T  # type: ignore[arg-type]


def _split_qkv(fused: Array, n_head: int, n_kv_head: int) -> dict[str, Array]:
    """q, k and v of slabs (L, (n_head + 2 n_kv_head) * hd, in)."""
    hd = fused.shape[1] // (n_head + 2 * n_kv_head)
    q, k, v = np.split(fused, [n_head * hd, (n_head + n_kv_head) * hd], axis=1)
    return {"wq": q, "wk": k, "wv": v}


def llama3_logits(
    p: Mapping[str, Array],
    ids: Sequence[int] | Array,
    *,
    n_head: int,
    n_kv_head: int,
    theta: float = 500000.0,
    scaled: bool = False,
) -> Array:
    """c_proj(silu(c_fc2 x) * c_fc x), adjacent pairs, eps 1e-5, untied."""
    w = _split_qkv(p["c_attn"], n_head, n_kv_head)
    w |= {"tok_emb": p["wte"], "rms_att": p["ln_1"], "wo": p["attn_c_proj"], "rms_ffn": p["ln_2"]}
    w |= {"w3": p["c_fc"], "w1": p["c_fc2"], "w2": p["mlp_c_proj"], "rms_final": p["ln_f"], "wcls": p["lm_head"]}
    how = {"n_head": n_head, "n_kv_head": n_kv_head, "theta": theta, "scaling": LLAMA31 if scaled else None}
    return llama_logits(w, ids, **how)


def nanoeuler_logits(p: Mapping[str, Array], ids: Sequence[int] | Array, *, n_head: int, n_kv_head: int) -> Array:
    """(K, n, V): head j predicts the token j + 1 ahead; adjacent pairs, base 10000, eps 1e-5."""
    w = _split_qkv(p["qkvw"], n_head, n_kv_head)
    w |= {"tok_emb": p["tok"], "rms_att": p["rms1g"], "wo": p["attprojw"], "rms_ffn": p["rms2g"]}
    w |= {"w1": p["gatew"], "w3": p["upw"], "w2": p["downw"], "rms_final": p["rmsfg"]}
    h = llama_hidden(w, ids, n_head=n_head, n_kv_head=n_kv_head)
    heads = np.asarray(p["headw"], np.float64).reshape(-1, *p["tok"].shape)  # (K, V, C)
    return np.einsum("nc,kvc->knv", h, heads)


def nx_logits(p: Mapping[str, Array], ids: Sequence[int] | Array, *, eps: float = 1e-6, theta: float = 1e6) -> Array:
    """One head, biases on q, k, v; RoPE as the trainer does it: x * cos + (x @ ROT) * sin."""
    w = _f64(p)
    x = w["E"][np.asarray(ids)]
    n, d = x.shape
    half = d // 2
    rot = np.zeros((d, d))
    rot[np.arange(half) + half, np.arange(half)] = -1
    rot[np.arange(half), np.arange(half) + half] = 1
    angle = np.arange(n)[:, None] * np.exp(-2 * np.arange(half) / d * np.log(theta))
    cos, sin = np.tile(np.cos(angle), 2), np.tile(np.sin(angle), 2)
    for i in range(sum(k.endswith(".Wq") for k in w)):
        h = _rms(x, w[f"L{i}.attn_gamma"], eps)
        q, k, v = (h @ w[f"L{i}.W{c}"] + w[f"L{i}.b{c}"] for c in "qkv")
        q, k = (t * cos + (t @ rot) * sin for t in (q, k))
        scores = q @ k.T / np.sqrt(d) + np.triu(np.full((n, n), -np.inf), 1)
        x = x + _softmax(scores) @ v @ w[f"L{i}.Wo"]
        h = _rms(x, w[f"L{i}.ffn_gamma"], eps)
        x = x + (_silu(h @ w[f"L{i}.Wg"]) * (h @ w[f"L{i}.Wu"])) @ w[f"L{i}.Wd"]
    return _rms(x, w["final_gamma"], eps) @ w["Wlm"]


def microgpt_logits(p: Mapping[str, Array], ids: Sequence[int] | Array, n_head: int) -> Array:
    """Norms without gains, one after the embedding, none before lm_head; ReLU."""
    w = _f64(p)
    x = _rms(w["wte"][np.asarray(ids)] + w["wpe"][: len(ids)], 1.0, 1e-5)
    for i in range(sum(k.endswith(".attn_wq") for k in w)):
        h = _rms(x, 1.0, 1e-5)
        q, k, v = (h @ w[f"layer{i}.attn_w{c}"].T for c in "qkv")
        x = x + _attend(q, k, v, n_head, n_head) @ w[f"layer{i}.attn_wo"].T
        h = np.maximum(_rms(x, 1.0, 1e-5) @ w[f"layer{i}.mlp_fc1"].T, 0)
        x = x + h @ w[f"layer{i}.mlp_fc2"].T
    return x @ w["lm_head"].T

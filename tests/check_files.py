"""GGUF files with one fault each: the rule of `check` that must find it, and the words in which llama.cpp refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from fixtures.make import BPE, GPT2, LLAMA2C, QWEN2, SPM
from fixtures.models import llama
from fixtures.writers import gguf

Keys = list[gguf.Key]
Tensors = dict[str, tuple[np.ndarray, str]]
Edit = Callable[[Keys, Tensors], tuple[Keys, Tensors]]
T = "tokenizer.ggml."
EPS, RMS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
D, L = GPT2.dims, LLAMA2C.dims
HEAD = L["dim"] // L["n_head"]
SOURCES: dict[str, tuple[Keys, Tensors]] = {
    "gpt2": (gguf.gpt2_keys(GPT2) + BPE, gguf.gpt2_tensors(GPT2)),
    "llama": (gguf.llama_keys(LLAMA2C) + SPM, gguf.llama_tensors(LLAMA2C)),
    "qwen2": (gguf.llama_keys(QWEN2, "qwen2", theta=1e6) + BPE, gguf.llama_tensors(QWEN2)),
}


def build(*edits: Edit, arch: str = "gpt2", **how: int) -> bytes:
    keys, stored = SOURCES[arch]
    for edit in edits:
        keys, stored = edit(list(keys), dict(stored))
    return gguf.gguf(keys, stored, **how)  # type: ignore[arg-type]


def without(*names: str) -> Edit:
    return lambda k, t: ([x for x in k if x[0] not in names], {n: v for n, v in t.items() if n not in names})


def put(name: str, kind: int, value: object) -> Edit:
    return lambda k, t: ([*(x for x in k if x[0] != name), (name, kind, value)], t)


def array(name: str, kind: int, values: list[object]) -> Edit:
    return put(name, gguf.ARRAY, (kind, values))


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray] | None = None, kind: str = "f32") -> Edit:
    """A tensor changed, or stored in another type; a new one of zeros where there is none."""

    def edit(keys: Keys, stored: Tensors) -> tuple[Keys, Tensors]:
        values = stored[name][0] if name in stored else np.zeros((4, 32), np.float32)
        return keys, stored | {name: (change(values) if change else values, kind)}

    return edit


def tokens(change: Callable[[list[str]], list[str]]) -> Edit:
    def edit(keys: Keys, stored: Tensors) -> tuple[Keys, Tensors]:
        old = next(list(k[2][1]) for k in keys if k[0] == f"{T}tokens")
        return array(f"{T}tokens", gguf.STRING, change(old))(keys, stored)

    return edit


def gapped() -> bytes:
    """32 bytes that belong to no tensor behind the first; all others lie where their offsets say."""
    data, names = bytearray(build()), gguf.gpt2_tensors(GPT2)
    (_, (values, _)), *others = names.items()
    for name, (a, _) in others:
        at = data.index(gguf.string(name)) + 8 + len(name) + 4 + 8 * a.ndim + 4
        struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] + 32)
    size = sum(-(-a.size * 4 // 32) * 32 for a, _ in names.values())
    at = len(data) - size + -(-values.size * 4 // 32) * 32
    return bytes(data[:at] + bytes(32) + data[at:])


def heads(dim: int, n_head: int, n_kv_head: int) -> bytes:
    """A llama of another shape, whose keys and tensors agree."""
    m = llama(10, dim=dim, hidden=20, vocab=L["vocab"], n_head=n_head, n_kv_head=n_kv_head)
    return gguf.gguf(gguf.llama_keys(m) + SPM, gguf.llama_tensors(m))


def patched(old: bytes, new: bytes) -> bytes:
    data = build()
    assert data.count(old) == 1
    return data.replace(old, new)


BIAS = b"blk.0.attn_norm.bias" + struct.pack("<IQ", 1, D["channels"])  # the type follows
U32, I32, U64, F32, F64, STRING = gguf.U32, gguf.I32, gguf.U64, gguf.F32, gguf.F64, gguf.STRING
V, N = D["vocab"], L["vocab"]

# rule, file, what llama.cpp says ("" where it only dies); it refuses each, or dies of it
REFUSED: dict[str, tuple[str, bytes, str]] = {
    # the container
    "cut": ("unreadable", build()[:-5000], "not within the file bounds"),
    "alignment-3": ("unreadable", build(put("general.alignment", U32, 3)), "not a power of 2"),
    "alignment-u64": ("unreadable", build(put("general.alignment", U64, 32)), "must be of type"),
    "version-1": ("unreadable", patched(b"GGUF\3", b"GGUF\1"), "no longer supported"),
    "version-4": ("unreadable", patched(b"GGUF\3", b"GGUF\4"), "only supports up to version 3"),
    "big-endian": ("unreadable", gguf.gguf(*SOURCES["gpt2"], order=">"), "mismatch between the host and model endian"),
    "empty-name": ("unreadable", build(put("", U32, 1)), "is empty"),
    "name-twice": ("unreadable", gguf.gguf([*SOURCES["gpt2"][0], SOURCES["gpt2"][0][1]], {}), "duplicate key"),
    "type-4": ("unreadable", patched(BIAS + b"\0", BIAS + b"\4"), "not a multiple of block size"),
    "type-99": ("unreadable", patched(BIAS + b"\0", BIAS + b"\x63"), ""),
    "odd-row": ("unreadable", patched(BIAS + b"\0", BIAS + b"\2"), "not a multiple of block size"),
    "five-axes": ("unreadable", build(tensor("token_embd.weight", lambda a: a[None, None, None])), "number of dimensi"),
    "lone-shard": ("unreadable", build(put("split.count", gguf.U16, 2)), "split.no"),
    "gap": ("offsets", gapped(), "failed to load"),
    "alignment-8": ("alignment", build(put("general.alignment", U32, 8), align=8), "must be aligned"),
    # keys
    "no-arch": ("arch-missing", build(without("general.architecture")), "unknown model architecture: ''"),
    "microgpt": ("arch-unknown", build(put("general.architecture", STRING, "microgpt")), "unknown model arch"),
    "no-eps": ("key-missing", build(without(f"gpt2.{EPS}")), f"not found in model: gpt2.{EPS}"),
    "no-rms-eps": ("key-missing", build(without(f"llama.{RMS}"), arch="llama"), f"not found in model: llama.{RMS}"),
    "no-context": ("key-missing", build(without("gpt2.context_length")), "not found in model: gpt2.context_length"),
    "no-ff": ("key-missing", build(without("gpt2.feed_forward_length")), "wrong shape"),
    "no-width": ("key-missing", build(without("gpt2.embedding_length")), "not found in model: gpt2.embedding_length"),
    "no-layers": ("key-missing", build(without("gpt2.block_count")), "not found in model: gpt2.block_count"),
    "no-heads": ("key-missing", build(without("llama.attention.head_count"), arch="llama"), "wrong shape"),
    "context-u64": ("key-type", build(put("gpt2.context_length", U64, D["max_t"])), "has wrong type u64"),
    "eps-f64": ("key-type", build(put(f"gpt2.{EPS}", F64, 1e-5)), "has wrong type f64"),
    "base-f64": ("key-type", build(put("llama.rope.freq_base", F64, 1e4), arch="llama"), "has wrong type f64"),
    "file-type-u64": ("key-type", build(put("general.file_type", U64, 0)), "has wrong type u64"),
    "bos-i32": ("key-type", build(put(f"{T}bos_token_id", I32, 0)), "has wrong type i32"),
    "add-bos-u32": ("key-type", build(put(f"{T}add_bos_token", U32, 0)), "has wrong type u32"),
    "heads-short": ("key-array", build(array("gpt2.attention.head_count", U32, [3])), "wrong array length"),
    "heads-u64": ("key-array", build(array("gpt2.attention.head_count", U64, [3, 3])), "wrong array element type"),
    "labels": ("key-array", build(array("gpt2.classifier.output_labels", U32, [1])), "wrong array element type"),
    "no-blocks": ("key-value", build(put("gpt2.block_count", U32, 0)), "n_layer_all > 0"),
    "blocks-600": ("key-value", build(put("gpt2.block_count", U32, 600)), "n_layer_all > 0"),
    "context-0": ("key-value", build(put("llama.context_length", U32, 0), arch="llama"), "n_ctx > 0"),
    "context-2^31": ("key-value", build(put("llama.context_length", U32, 1 << 31), arch="llama"), "n_ctx > 0"),
    "eps-minus": ("key-value", build(put(f"llama.{RMS}", F32, -1.0), arch="llama"), "eps >= 0.0f"),
    "eps-nan": ("key-value", build(put(f"llama.{RMS}", F32, float("nan")), arch="llama"), "eps >= 0.0f"),
    "scaling": ("key-value", build(put("llama.rope.scaling.type", STRING, "llama3"), arch="llama"), "rope_scaling"),
    "experts": ("key-value", build(put("llama.expert_count", U32, 2), arch="llama"), "n_expert_used_max > 0"),
    "experts-used": ("key-value", build(put("gpt2.expert_used_count", U32, 2)), "n_expert_used_max <= "),
    "groups": ("head-groups", heads(16, 4, 3), "ggml_can_mul_mat"),
    "odd-heads": ("head-size", heads(12, 4, 2), "n_dims % 2 == 0"),
    "heads-of-one": ("head-size", build(put("gpt2.attention.head_count", U32, 18)), "ggml_can_mul_mat"),
    "rotated": ("head-size", build(put("llama.rope.dimension_count", U32, HEAD // 2), arch="llama"), "invalid n_rot"),
    "values": ("head-size", build(put("llama.attention.value_length", U32, 2 * HEAD), arch="llama"), "wrong shape"),
    "qwen2-heads": ("head-size", build(put("qwen2.attention.key_length", U32, 4), arch="qwen2"), "n_embd_head"),
    "qwen2-rotated": ("head-size", build(put("qwen2.rope.dimension_count", U32, 2), arch="qwen2"), "n_rot"),
    # tensors
    "no-tensors": ("no-tensors", build(lambda k, _: (k, {})), "'token_embd.weight' not found"),
    "extra": ("tensor-extra", build(tensor("mtp.1.weight")), "wrong number of tensors"),
    "extra-layer": ("tensor-extra", build(put("gpt2.block_count", U32, 1)), "wrong number of tensors"),
    "qwen2-bias": ("tensor-extra", build(tensor("blk.0.ffn_up.bias"), arch="qwen2"), "wrong number of tensors"),
    "missing": ("tensor-missing", build(without("blk.0.attn_qkv.bias")), "'blk.0.attn_qkv.bias' not found"),
    "llama-missing": ("tensor-missing", build(without("blk.0.ffn_gate.weight"), arch="llama"), "ffn_gate.weight' not"),
    "no-layer": ("tensor-missing", build(put("gpt2.block_count", U32, 3)), "'blk.2.attn_norm.weight' not found"),
    "shape": ("tensor-shape", build(tensor("blk.0.ffn_up.weight", lambda a: a[:-1])), "wrong shape"),
    "layers-270": ("tensor-missing", build(put("gpt2.block_count", U32, 270)), "'blk.2.attn_norm.weight' not found"),
    "no-ff-0": ("tensor-shape", build(put("gpt2.feed_forward_length", U32, 0)), "wrong shape"),
    "rows": ("vocabulary-rows", build(tensor("token_embd.weight", lambda a: np.vstack([a, a[:3]]))), "wrong shape"),
    "no-rows": ("vocabulary-rows", build(tokens(lambda t: [*t, "more"]), without(f"{T}token_type")), "wrong shape"),
    "positions": ("position-rows", build(put("gpt2.context_length", U32, D["max_t"] + 1)), "wrong shape"),
    "f16-norm": ("vector-type", build(tensor("blk.0.attn_norm.weight", kind="f16")), "unsupported types"),
    "bf16-bias": ("vector-type", build(tensor("blk.0.ffn_up.bias", kind="bf16")), "unsupported types"),
    "f16-factors": (
        "vector-type",
        build(tensor("rope_freqs.weight", lambda _: np.ones(HEAD // 2, np.float32), "f16"), arch="llama"),
        "GGML_TYPE_F32",
    ),
    **{
        f"{kind}-matrix": ("matrix-type", build(tensor("token_embd.weight", kind=kind)), "ops.cpp")
        for kind in ("i8", "i16", "i64", "f64")
    },
    "i32-matrix": ("matrix-type", build(tensor("blk.0.ffn_up.weight", kind="i32")), ""),
    # the vocabulary
    "no-model": ("tokenizer-missing", build(without(f"{T}model")), f"not found in model: {T}model"),
    "no-vocab": ("no-vocabulary", build(put(f"{T}model", STRING, "no_vocab")), "LLAMA_VOCAB_TYPE_NONE"),
    "model": ("tokenizer-unknown", build(put(f"{T}model", STRING, "chars")), "unknown tokenizer: 'chars'"),
    "no-tokens": ("tokens-missing", build(without(f"{T}tokens")), "cannot find tokenizer vocab"),
    "tokens-i32": ("tokenizer-array", build(array(f"{T}tokens", I32, [1] * V)), f"invalid gguf type for {T}tokens"),
    "tokens-text": ("tokenizer-array", build(put(f"{T}tokens", STRING, "a")), f"invalid gguf type for {T}tokens"),
    "types-u32": ("tokenizer-array", build(array(f"{T}token_type", U32, [1] * V)), f"gguf type for {T}token_type"),
    "scores-f64": ("tokenizer-array", build(array(f"{T}scores", F64, [0.0] * N), arch="llama"), f"type for {T}scores"),
    "merges-i32": ("tokenizer-array", build(array(f"{T}merges", I32, [1])), f"invalid gguf type for {T}merges"),
    "suppressed": ("tokenizer-array", build(array(f"{T}suppress_tokens", U32, [1])), "type for tokenizer.ggml.supp"),
    "types-short": ("array-length", build(array(f"{T}token_type", I32, [1, 1])), "array bounds for toktypes (2 < 29)"),
    "scores-short": ("array-length", build(array(f"{T}scores", F32, [0.0] * 9), arch="llama"), "bounds for scores (9"),
    "pre": ("pre-unknown", build(put(f"{T}pre", STRING, "nanoeuler")), "unknown pre-tokenizer type: 'nanoeuler'"),
    "merges": ("merges-missing", build(without(f"{T}merges")), "cannot find tokenizer merges"),
    "equal": ("vocabulary-equal", build(tokens(lambda t: [*t[:-1], t[-2]])), "token_to_id.size()"),
    "equal-name": ("vocabulary-equal", build(tokens(lambda t: ["[EMPTY_1]", "", *t[2:]])), "token_to_id.size()"),
    "equal-nul": ("vocabulary-equal", build(tokens(lambda t: [*t[:-2], "q", "q\0x"])), "token_to_id.size()"),
    "byte-token": ("byte-token", build(tokens(lambda t: [*t[:3], "<0", *t[4:]]), arch="llama"), "basic_string::substr"),
    "template": ("template-syntax", build(put("tokenizer.chat_template", STRING, "{% if %}")), "model loading error"),
}  # fmt: skip

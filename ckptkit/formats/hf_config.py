"""config.json of a Hugging Face model and our Config, both ways.

Source of truth: configuration_llama.py, configuration_qwen2.py and configuration_gpt2.py of transformers (what a
missing key means) and modeling_rope_utils.py (rope_scaling, and rope_parameters, which in new files holds the same and
rope_theta too).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Config, RopeScaling
from ..errors import FormatError, UnsupportedError, brief, printable
from ..files import File
from ..quant.types import QType
from .options import ReadOptions, chosen

LIMIT = 16 << 20  # bytes of config.json, a thousand times what there is

_ROPE = {
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_ff": "intermediate_size",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
}
KEYS: dict[str, dict[str, str]] = {
    "llama": _ROPE,
    "qwen2": _ROPE,
    "gpt2": {
        "context_length": "n_positions",
        "vocab_size": "vocab_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_ff": "n_inner",
        "norm_eps": "layer_norm_epsilon",
    },
}
DERIVED = ("n_kv_head", "n_ff", "head_dim")  # may be absent or null
CONTEXT = {"llama": 2048, "qwen2": 32768, "gpt2": 1024}  # what a missing key means
ACTIVATION = {
    "llama": ("hidden_act", ("silu",)),
    "qwen2": ("hidden_act", ("silu",)),
    "gpt2": ("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
}
TIED = {"llama": False, "qwen2": False, "gpt2": True}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel"}
# What else would change the mathematics: the value that changes nothing, which is also what a missing key means.
NEUTRAL: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
    "qwen2": {"partial_rotary_factor": 1.0},
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
}
DTYPES = {QType.F64: "float64", QType.F32: "float32", QType.F16: "float16", QType.BF16: "bfloat16"}


def load(path: Path, limit: int = LIMIT) -> dict[str, Any]:
    """A JSON object from a file of sane size; FormatError with the place where it is not one."""
    file = File(path)
    try:
        if file.size > limit:
            raise FormatError("the JSON is too large", path=path, offset=0, expected=f"{limit:,}", got=f"{file.size:,}")
        raw = file.read(0, file.size).tobytes()
    finally:
        file.close()
    return parse(path, raw)


def parse(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; `path` is for errors."""
    got: object
    offset = 0
    try:
        value = json.loads(raw.decode())
        if isinstance(value, dict):
            return value
        got = type(value).__name__
    except UnicodeDecodeError as e:
        got, offset = f"no UTF-8 ({e.reason})", e.start
    except json.JSONDecodeError as e:
        got, offset = e.msg, len(e.doc[: e.pos].encode())
    except RecursionError:
        got = "nesting too deep"
    except ValueError as e:
        got = printable(e)
    raise FormatError(
        "not valid JSON", path=path, offset=offset, expected="an object", got=got, hint="the file was cut or damaged"
    )


def read_config(path: Path, raw: Mapping[str, Any], options: ReadOptions, notes: list[str]) -> Config:
    """The Config that a config.json stands for; `raw["model_type"]` must be one of KEYS."""
    arch = str(raw["model_type"])
    named, values = KEYS[arch], dict[str, int]()
    for ours, theirs in named.items():
        value = raw.get(theirs)
        if ours == "norm_eps" or (value is None and ours in DERIVED):
            continue
        if ours == "context_length":
            value = chosen(
                options.context_length, _whole(path, theirs, 0 if value is None else value), CONTEXT[arch], ours, notes
            )
        if value is None:
            raise FormatError(f"{theirs} is missing", path=path, offset=0, at="config", expected="a number", got="null")
        values[ours] = _whole(path, theirs, value)
    _check_neutral(path, arch, raw)
    n_head, n_embd = values["n_head"], values["n_embd"]
    values.setdefault("n_kv_head", n_head)
    values.setdefault("n_ff", 4 * n_embd)
    values.setdefault("head_dim", n_embd // n_head if n_head > 0 else 0)
    config = Config(
        arch,
        **values,  # type: ignore[arg-type]
        norm_eps=_eps(path, named["norm_eps"], raw, options, notes),
        sliding_window=_window(path, arch, raw),
        tied_output=_truth(path, "tie_word_embeddings", raw.get("tie_word_embeddings"), TIED[arch]),
    )
    if arch != "gpt2":
        config = _rope(path, raw, config, options, notes)
    config.check(path)
    if arch == "gpt2" and n_embd % n_head:
        raise FormatError(
            "channels do not divide into heads", path=path, offset=0, expected="n_embd a multiple of n_head",
            got=f"n_embd {n_embd}, n_head {n_head}",
        )  # fmt: skip
    return config


def _check_neutral(path: Path, arch: str, raw: Mapping[str, Any]) -> None:
    key, known = ACTIVATION[arch]
    if raw.get(key, known[0]) not in known:
        raise UnsupportedError(
            f"{key} is not that of {arch}", path=path, at="config", expected=" or ".join(known), got=brief(raw[key])
        )
    for key, value in NEUTRAL[arch].items():
        if raw.get(key) not in (None, value):
            raise UnsupportedError(
                f"{key} is not supported", path=path, at="config", expected=value, got=brief(raw[key])
            )
    if raw.get("quantization_config"):
        raise UnsupportedError(
            "the model is quantised in Hugging Face's own way", path=path, at="quantization_config",
            got=brief(raw["quantization_config"]), hint="start from the unquantised model",
        )  # fmt: skip


def _whole(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise FormatError(
            f"{name} is no whole number", path=path, offset=0, at="config", expected="a number", got=brief(value)
        )
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise FormatError(
            f"{name} is no number", path=path, offset=0, at="config", expected="a number", got=brief(value)
        )
    return float(value)


def _truth(path: Path, name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FormatError(f"{name} is no truth value", path=path, offset=0, at="config", got=brief(value))
    return value


def _eps(path: Path, key: str, raw: Mapping[str, Any], options: ReadOptions, notes: list[str]) -> float:
    stored = _number(path, key, raw[key]) if raw.get(key) is not None else None
    if stored is None and options.norm_eps is None:
        raise FormatError(
            f"{key} is missing", path=path, offset=0, at="config", expected="a number", got="none",
            hint="give it with --norm-eps",
        )  # fmt: skip
    return float(chosen(options.norm_eps, stored, 0.0, "norm_eps", notes)) if options.norm_eps else stored or 0.0


def _window(path: Path, arch: str, raw: Mapping[str, Any]) -> int:
    """The sliding window in use, or 0."""
    if arch != "qwen2" or not _truth(path, "use_sliding_window", raw.get("use_sliding_window"), False):
        return 0
    window = raw.get("sliding_window")
    return 0 if window is None else _whole(path, "sliding_window", window)


def _rope(path: Path, raw: Mapping[str, Any], config: Config, options: ReadOptions, notes: list[str]) -> Config:
    """Base and scaling, in the old keys or the new one."""
    together = raw.get("rope_parameters")
    scaling = together if together is not None else raw.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise FormatError("rope_scaling is no object", path=path, offset=0, at="config", got=brief(scaling))
    scaling = scaling or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    theta = _number(path, "rope_theta", theta) if theta is not None else 0.0
    theta = float(chosen(options.rope_theta, theta, 10000.0, "rope_theta", notes))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str):
        raise FormatError("rope_type is no text", path=path, offset=0, at="config", got=brief(kind))
    return replace(config, rope_theta=theta, rope_pairing="half", rope_scaling=_scaling(path, kind, scaling))


def _scaling(path: Path, kind: str, raw: Mapping[str, Any]) -> RopeScaling | None:
    if kind == "default":
        return None
    numbers = {k: _number(path, k, raw.get(k)) for k in ("factor",) if kind in ("linear", "llama3") or k in raw}
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            numbers[key] = _number(path, key, raw.get(key))
        original = _whole(path, "original_max_position_embeddings", raw.get("original_max_position_embeddings"))
        if not (0 < numbers["low_freq_factor"] < numbers["high_freq_factor"] and original > 0):
            raise FormatError(
                "rope_scaling cannot be", path=path, offset=0, at="config", got=brief(dict(raw)),
                expected="0 < low_freq_factor < high_freq_factor and a positive original context",
            )  # fmt: skip
        numbers["original_context"] = original
    if not numbers.get("factor", 1.0) > 0:
        raise FormatError("rope_scaling cannot be", path=path, offset=0, expected="factor > 0", got=numbers["factor"])
    return RopeScaling(kind, **numbers)  # type: ignore[arg-type]


def model_config(c: Config, dtype: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json of a model; `ids`: of bos and eos, where its tokenizer has them."""
    out: dict[str, Any] = {
        "architectures": [CLASSES[c.arch]],
        "model_type": c.arch,
        ACTIVATION[c.arch][0]: ACTIVATION[c.arch][1][0],
        "tie_word_embeddings": c.tied_output,
        "torch_dtype": dtype,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ids.get("eos"),
        "transformers_version": "4.40.0",  # that of the keys used here
    }
    out |= {theirs: getattr(c, ours) for ours, theirs in KEYS[c.arch].items()}
    out[KEYS[c.arch]["norm_eps"]] = short(c.norm_eps)
    if c.arch == "gpt2":
        out["n_inner"] = None if c.n_ff == 4 * c.n_embd else c.n_ff
        out["n_ctx"] = c.context_length
        return out
    out["rope_theta"] = short(c.rope_theta)
    out["rope_scaling"] = rope_scaling(c.rope_scaling)
    if c.head_dim * c.n_head == c.n_embd:
        del out["head_dim"]
    if c.arch == "qwen2":
        out["use_sliding_window"] = bool(c.sliding_window)
        out["sliding_window"] = c.sliding_window or None
    elif c.sliding_window:
        raise UnsupportedError("a llama has no sliding window", got=c.sliding_window, hint="write it as GGUF")
    return out


def rope_scaling(s: RopeScaling | None) -> dict[str, Any] | None:
    """The object under rope_scaling; UnsupportedError for a kind that we cannot state in full."""
    if s is None:
        return None
    if s.type not in ("linear", "llama3"):
        raise UnsupportedError(f"rope scaling {s.type} cannot be written", expected="linear or llama3", got=s.type)
    out: dict[str, Any] = {"rope_type": s.type, "factor": short(s.factor)}
    if s.type == "llama3":
        out |= {"low_freq_factor": short(s.low_freq_factor), "high_freq_factor": short(s.high_freq_factor)}
        out["original_max_position_embeddings"] = s.original_context
    return out


def short(x: float) -> float:
    """The float64 with the fewest digits that is the same float32, if `x` is no more than a float32: 1e-05."""
    return float(str(np.float32(x))) if float(np.float32(x)) == x else x


def dump(config: Mapping[str, Any], sort: bool = True) -> bytes:
    """JSON as transformers writes it."""
    return (json.dumps(config, indent=2, sort_keys=sort) + "\n").encode()

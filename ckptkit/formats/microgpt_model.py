"""What microgpt's JSON and safetensors files have in common: names, sizes, characters.

Source of truth: Karpathy's microgpt.py (seed 001 is its port). The program saves nothing; copies of it dump its
state_dict, most with sizes and characters beside it. All matrices are (out, in): wte (vocab, embd), wpe (block, embd),
lm_head (vocab, embd), and per layer layer{i}.attn_wq, attn_wk, attn_wv, attn_wo (embd, embd), mlp_fc1 (ff, embd),
mlp_fc2 (embd, ff). Tokens are the sorted characters, then BOS. Norms have no gains and the epsilon 1e-5; one stands
behind the embedding, none before lm_head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, Config
from ..errors import FormatError, UnsupportedError, brief, some
from ..layout import Layout, Row, stored_shape
from ..tokenizer import Tokenizer
from ..tokenizer.chars import CharTokenizer
from .options import ReadOptions, chosen

B = "blk.{i}."
PARTS = {
    "attn_wq": "attn_q",
    "attn_wk": "attn_k",
    "attn_wv": "attn_v",
    "attn_wo": "attn_output",
    "mlp_fc1": "ffn_up",
    "mlp_fc2": "ffn_down",
}
LAYOUT = Layout(
    (
        Row(("token_embd.weight",), "wte"),
        Row(("position_embd.weight",), "wpe"),
        Row(("output.weight",), "lm_head"),
        *(Row((f"{B}{ours}.weight",), f"layer{{i}}.{theirs}") for theirs, ours in PARTS.items()),
    ),
    tied=False,
)
SIZES = ("n_layer", "n_embd", "n_head", "block_size", "vocab_size")
DEFAULT_HEADS = 4  # of the program
Shapes = Mapping[str, tuple[int, ...]]


def is_model(names: Mapping[str, Any]) -> bool:
    """Whether these are the tensors of a microgpt."""
    return {"wte", "wpe", "lm_head", "layer0.attn_wq"} <= names.keys()


def config_from(
    path: Path, shapes: Shapes, stated: Mapping[str, Any], options: ReadOptions, notes: list[str]
) -> Config:
    """The config that the shapes give; what the file states besides must agree with them. Every tensor is checked."""
    for name in ("wte", "wpe", "lm_head", "layer0.mlp_fc1"):
        if len(shapes.get(name, ())) != 2:
            raise FormatError(
                f"no matrix {name}", path=path, offset=0, expected="a microgpt state_dict", got=some(shapes)
            )
    sizes = {name: _whole(path, name, stated[name]) for name in (*SIZES, "bos") if name in stated}
    (vocab, n_embd), (block, _) = shapes["wte"], shapes["wpe"]
    n_layer = sum(1 for name in shapes if name.endswith(".attn_wq"))
    found = {"n_layer": n_layer, "n_embd": n_embd, "block_size": block, "vocab_size": vocab}
    for name, value in found.items():
        if sizes.get(name, value) != value:
            raise FormatError(
                f"{name} and the tensors disagree", path=path, offset=0, at=name, expected=f"{value} by the tensors",
                got=sizes[name],
            )  # fmt: skip
    n_head = chosen(options.n_head, sizes.get("n_head"), DEFAULT_HEADS, "n_head", notes)
    config = Config(
        "microgpt",
        context_length=block,
        vocab_size=vocab,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_head,
        n_embd=n_embd,
        n_ff=shapes["layer0.mlp_fc1"][0],
        head_dim=n_embd // n_head if n_head > 0 else 0,
        norm_eps=options.norm_eps or 1e-5,
    )
    config.check(path)
    if n_embd % n_head:
        raise FormatError(
            "channels do not divide into heads", path=path, offset=0, at="n_head", expected=f"a divisor of {n_embd}",
            got=n_head, hint="give the number of heads with --heads",
        )  # fmt: skip
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            raise FormatError(
                f"tensor {name} has another shape", path=path, offset=0, at=name, expected=shape,
                got=shapes.get(name, "no such tensor"),
            )  # fmt: skip
    extra = [name for name in shapes if name not in expected]
    if extra:
        raise FormatError("tensors that microgpt does not have", path=path, offset=0, got=some(extra), expected="none")
    return config


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the program's order: wte, wpe, lm_head, then layer by layer."""
    shapes = {row.theirs: stored_shape(row, config) for row in LAYOUT.rows}
    once = {name: shape for name, shape in shapes.items() if "{i}" not in name}
    return once | {
        name.replace("{i}", str(i)): shape
        for i in range(config.n_layer)
        for name, shape in shapes.items()
        if "{i}" in name
    }


def tokenizer_from(path: Path, stated: Mapping[str, Any], config: Config, notes: list[str]) -> CharTokenizer | None:
    """The tokenizer of the characters that a file states (a list, a text, or JSON of a list); None without any."""
    chars = stated.get("uchars")
    if isinstance(chars, str) and chars.startswith('["'):
        try:
            chars = json.loads(chars)
        except (ValueError, RecursionError) as e:
            raise FormatError("uchars is not a list of characters", path=path, offset=0, at="uchars", got=str(e)) from e
    if chars is None:
        notes.append("no characters in the file; --tokenizer gives them")
        return None
    if not isinstance(chars, list | str) or not all(isinstance(c, str) and len(c) == 1 for c in chars):
        raise FormatError("uchars is not a list of characters", path=path, offset=0, at="uchars", got=brief(chars))
    bos = _whole(path, "bos", stated["bos"]) if "bos" in stated else len(chars)
    if len(chars) + 1 != config.vocab_size or bos != len(chars):
        raise FormatError(
            "characters and BOS do not make up the vocabulary", path=path, offset=0, at="uchars",
            expected=f"{config.vocab_size - 1} characters, then BOS", got=f"{len(chars)} characters, BOS {bos}",
        )  # fmt: skip
    try:
        return CharTokenizer.from_chars(list(chars))
    except FormatError as e:
        e.path = path
        raise


def chars_of(ck: Checkpoint, path: Path) -> list[str] | None:
    """The characters to write; UnsupportedError for a tokenizer that is not characters and then BOS."""
    tokenizer: Tokenizer | None = ck.tokenizer
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, CharTokenizer) or tokenizer.bos != tokenizer.vocab_size - 1:
        raise UnsupportedError(
            "microgpt's tokens are characters, then BOS", path=path, expected="a character tokenizer",
            got=tokenizer.kind or "another",
        )  # fmt: skip
    chars = tokenizer.chars
    if any(len(c) != 1 for c in chars):
        raise UnsupportedError("microgpt's tokens are single characters", path=path, got=repr(max(chars, key=len)))
    return chars


def stated_by(ck: Checkpoint, path: Path) -> dict[str, Any]:
    """Sizes and characters in the order in which files state them."""
    c = ck.config
    if c.head_dim * c.n_head != c.n_embd or c.n_kv_head != c.n_head or np.float32(c.norm_eps) != np.float32(1e-5):
        raise UnsupportedError(
            "microgpt has no place for these heads or this norm", path=path, expected="n_embd / n_head each, eps 1e-05",
            got=f"{c.n_head} heads of {c.head_dim}, {c.n_kv_head} for keys, eps {c.norm_eps:g}",
        )  # fmt: skip
    chars = chars_of(ck, path)
    values = (c.n_layer, c.n_embd, c.n_head, c.context_length, c.vocab_size)
    out: dict[str, Any] = dict(zip(SIZES, values, strict=True))
    return out if chars is None else out | {"bos": len(chars), "uchars": chars}


def _whole(path: Path, name: str, value: Any) -> int:
    """An int, or a text of one as safetensors' metadata has it."""
    text = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not (text.isdecimal() and text.isascii() and len(text) < 12):
        raise FormatError(
            f"{name} is no whole number", path=path, offset=0, at=name, expected="a number", got=brief(value)
        )
    return int(text)

"""llm.c Llama-3 checkpoints (train_llama3.py write_model): version 3 is float32, version 5 bfloat16.

int32[256], then every tensor, all layers of a kind together, rows (out, in), no gaps, no padding, untied:
wte | ln_1 | c_attn (q, k, v) | attn.c_proj | ln_2 | c_fc | c_fc2 | mlp.c_proj | ln_f | lm_head

| slot | what                              | slot | what                                        |
|------|-----------------------------------|------|---------------------------------------------|
| 0    | magic 20240803                    | 8    | ffn_dim_multiplier, 1.3 stored as 1         |
| 1    | version                           | 9    | multiple_of                                 |
| 2    | context                           | 10   | norm epsilon, 1e-5 stored as 0              |
| 3    | vocabulary                        | 11   | RoPE base                                   |
| 4    | layers                            | 12   | use_scaled_rope: Llama 3.1's rule, 0 or 1   |
| 5, 6 | heads, key and value heads        | 13   | max_gen_batch_size                          |
| 7    | embedding width                   | 14   | major and minor version of the model, 3 1   |

The header is an integer tensor, so fractions are cut off: the feed-forward width follows from the file's size, the
epsilon is the one the program trains with. c_fc is the up projection, c_fc2 the gate: c_proj(silu(c_fc2 x) * c_fc x).
Rotary pairs are adjacent. A debug state begins with the same magic number; it has no model sizes in slots 3 and up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint, Config, RopeScaling, Source
from ..errors import FormatError, UnsupportedError
from ..files import File, reading, replacing
from ..layout import Layout, Row, end_of, places, read_sequential
from ..quant.types import QType
from ..stream import write_tensors
from ..tensor import Tensor
from .llmc_tokenizer import find_tokenizer, write_tokenizer_beside
from .options import ReadOptions, Target, WriteOptions, chosen, origin, refuse_version, uniform

NAME = "llmc-llama3"
MAGIC, HEADER = 20240803, 1024
MIXTURES = ("f32", "bf16")
VERSIONS = {3: QType.F32, 5: QType.BF16}
SCALED = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)  # constants of train_llama3.py apply_scaling
EPS, THETA = 1e-5, 500000.0

B = "blk.{i}."
LAYOUT = Layout(
    (
        Row(("token_embd.weight",)),
        Row((B + "attn_norm.weight",)),
        Row((B + "attn_q.weight", B + "attn_k.weight", B + "attn_v.weight")),
        Row((B + "attn_output.weight",)),
        Row((B + "ffn_norm.weight",)),
        Row((B + "ffn_up.weight",)),
        Row((B + "ffn_gate.weight",)),
        Row((B + "ffn_down.weight",)),
        Row(("output_norm.weight",)),
        Row(("output.weight",)),
    ),
    rope_pairing="adjacent",
    tied=False,
)
LAYOUTS = {"llama": LAYOUT}
plan = uniform


def is_state(header: list[int]) -> bool:
    """Whether a header with the magic number is a debug state's, which has B and T in slots 1 and 2 and no more."""
    return not any(header[3:16])


def detect(_path: Path, head: bytes, _size: int) -> bool:
    """By the magic number; a debug state is told apart by `read`, which can say what it is good for."""
    return head[:4] == MAGIC.to_bytes(4, "little")


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Read the header, solve the feed-forward width from the size of the file, place the tensors."""
    return reading(path, lambda file: _read(file, options))


def _read(file: File, options: ReadOptions) -> Checkpoint:
    header = file.ints(0, HEADER // 4, at="header").tolist()
    if header[0] != MAGIC:
        raise FormatError("not an llm.c Llama-3 file", path=file.path, offset=0, expected=MAGIC, got=header[0])
    if is_state(header):
        raise UnsupportedError(
            "this is a debug state (a batch, its logits and gradients), not a model", path=file.path, offset=4,
            got=f"B {header[1]}, T {header[2]}, no model sizes", hint="`verify MODEL --state FILE` compares them",
        )  # fmt: skip
    if header[1] not in VERSIONS:
        raise UnsupportedError(
            "unknown version of an llm.c Llama-3 file", path=file.path, offset=4, expected="3 or 5", got=header[1]
        )
    type, notes = VERSIONS[header[1]], list[str]()
    if header[12] not in (0, 1):
        raise FormatError(
            "use_scaled_rope is no truth value", path=file.path, offset=48, expected="0 or 1", got=header[12]
        )
    context, vocab, n_layer, n_head, n_kv_head, n_embd = header[2:8]
    config = Config(
        "llama",
        context_length=context,
        vocab_size=vocab,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_embd=n_embd,
        n_ff=1,
        head_dim=n_embd // n_head if n_head > 0 else 0,
        norm_eps=chosen(options.norm_eps, header[10], EPS, "norm_eps", notes),
        rope_theta=float(chosen(options.rope_theta, header[11], THETA, "rope_theta", notes)),
        rope_pairing="adjacent",
        rope_scaling=SCALED if header[12] else None,
    )
    config.check(file.path, 8)
    if n_embd % n_head:
        raise FormatError(
            "channels do not divide into heads", path=file.path, offset=20, expected="a multiple of the heads",
            got=f"embd {n_embd}, heads {n_head}",
        )  # fmt: skip
    config = replace(config, n_ff=_solve_n_ff(file, config, type, header[9]))
    notes.append(f"n_ff {config.n_ff:,} follows from the size of the file; the header holds no more than {header[8]} x")
    found, _ = places(LAYOUT, config, HEADER, type)
    tokenizer, paths, said = find_tokenizer(file.path, vocab, options.tokenizer)
    metadata = {"llmc_version": str(header[1]), "llmc_llama3_rest": ",".join(map(str, (*header[8:11], *header[13:16])))}
    source = Source((file.path, *paths), NAME, f"version {header[1]}", metadata, (*notes, *said))
    return Checkpoint(config, read_sequential(found, config, file), tokenizer, source, (file,))


def _solve_n_ff(file: File, config: Config, type: QType, multiple_of: int) -> int:
    """The width that makes the sizes add up to the file."""
    # end(n) = end(1) + (n - 1) * step
    one, two = (end_of(LAYOUT, replace(config, n_ff=n), HEADER, type) for n in (1, 2))
    step = two - one
    n_ff, rest = divmod(file.size - one + step, step)
    if rest or n_ff < 1 or not _divides(multiple_of, n_ff):
        raise FormatError(
            "the sizes in the header do not add up to the file for any feed-forward width", path=file.path,
            offset=HEADER, at="start of parameters", expected=f"{one - step:,} bytes and {step:,} more for "
            f"each unit of a width that is a multiple of {multiple_of}", got=f"{file.size:,} bytes",
            hint="the file was cut, or its header is wrong",
        )  # fmt: skip
    return n_ff


def targets(ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """Version 5 if it loses nothing, else version 3."""
    known = {str(n): Target(str(n), LAYOUT, QType(type).name.lower()) for n, type in VERSIONS.items()}
    if options.version and options.version not in known:
        raise refuse_version(ck.source.paths[0], options.version, tuple(known))
    first = options.version or str(origin(ck.source, "llmc_version"))
    order = (first,) if options.version else tuple(dict.fromkeys((first, "5", "3")))
    return [known[version] for version in order if version in known]


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> tuple[Path, ...]:
    """Write the planned version, and the tokenizer beside it where llm.c's file can hold it."""
    c = ck.config
    places_for = {
        "rope_scaling": (c.rope_scaling in (None, SCALED), "none, or Llama 3.1's (8, 1, 4, 8192)", c.rope_scaling),
        "rope_theta": (c.rope_theta == int(c.rope_theta) and c.rope_theta < 2**31, "a whole number", c.rope_theta),
        "norm_eps": (np.float32(c.norm_eps) == np.float32(EPS), f"{EPS:g}", c.norm_eps),
        "head_dim": (c.head_dim * c.n_head == c.n_embd, c.n_embd // c.n_head, c.head_dim),
        "sliding_window": (not c.sliding_window, "none", c.sliding_window),
    }
    for name, (fits, expected, got) in places_for.items():
        if not fits:
            raise UnsupportedError(f"llm.c has no place for this {name}", path=path, expected=expected, got=got)
    header = np.zeros(HEADER // 4, "<i4")
    header[:8] = MAGIC, int(options.version), c.context_length, c.vocab_size, c.n_layer, c.n_head, c.n_kv_head, c.n_embd
    header[[8, 9, 10, 13, 14, 15]] = _rest(ck)
    header[11:13] = int(c.rope_theta), c.rope_scaling is not None
    with replacing(path) as out:
        out.write(header.tobytes())
        write_tensors(out, stored.values())
    return (path, *write_tokenizer_beside(path, ck.tokenizer))


def _rest(ck: Checkpoint) -> list[int]:
    """Slots 8, 9, 10 and 13 to 15: as they were found, or values that Llama 3's own reader would agree with."""
    found = origin(ck.source, "llmc_llama3_rest")
    if isinstance(found, str):
        try:
            values = [int(x) for x in found.split(",")]
        except ValueError:
            values = []
        if len(values) == 6 and all(-(2**31) <= v < 2**31 for v in values) and _divides(values[1], ck.config.n_ff):
            return values
    multiple_of = next(n for n in (1024, 256, 64, 32, 8, 4, 2, 1) if ck.config.n_ff % n == 0)
    return [1, multiple_of, 0, 4, 3, 1 if ck.config.rope_scaling else 0]


def _divides(a: int, b: int) -> bool:
    return a > 0 and b % a == 0

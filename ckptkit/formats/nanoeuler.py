"""nanoeuler .bin (seed 000: the fwrite calls at the end of training; native C structs, little-endian here).

int32[8] V C NH NKV NL T H K | int32 VOCAB | int32 n_merges | int32[n] left ids | int32[n] right ids | float32 params

No magic, no version: the file is recognised by its vocabulary, which it states three times over. Rotary pairs are
adjacent; K prediction heads follow one another, the first is the ordinary output. Byte-level BPE on ids: 0..255 are
bytes, 256 + m is merge m.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint, Config, Source
from ..errors import FormatError, UnsupportedError
from ..files import File, reading, replacing
from ..layout import Layout, Row, end_of, places, read_sequential
from ..quant.types import QType
from ..stream import write_tensors
from ..tensor import Tensor
from ..tokenizer import nanoeuler_bpe
from .options import ReadOptions, WriteOptions, uniform

NAME = "nanoeuler"
MIXTURES = ("f32",)
HEADER = 40
FIELDS = ("V", "C", "NH", "NKV", "NL", "T", "H", "K")
NOTE = "no magic number; recognised because the sizes add up"

B = "blk.{i}."
LAYOUT = Layout(
    (
        Row(("token_embd.weight",)),
        Row((B + "attn_norm.weight",)),
        Row((B + "attn_q.weight", B + "attn_k.weight", B + "attn_v.weight")),
        Row((B + "attn_output.weight",)),
        Row((B + "ffn_norm.weight",)),
        Row((B + "ffn_gate.weight",)),
        Row((B + "ffn_up.weight",)),
        Row((B + "ffn_down.weight",)),
        Row(("output_norm.weight",)),
        Row(("output.weight",)),
        Row(("mtp.{j}.weight",)),
    ),
    rope_pairing="adjacent",
    tied=False,
)
LAYOUTS = {"llama": LAYOUT}
plan = uniform


def _config(fields: list[int]) -> Config:
    vocab, n_embd, n_head, n_kv_head, n_layer, context, n_ff, n_heads_ahead = fields
    return Config(
        "llama",
        context_length=context,
        vocab_size=vocab,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_embd=n_embd,
        n_ff=n_ff,
        head_dim=n_embd // n_head if n_head > 0 else 0,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_pairing="adjacent",
        n_mtp_head=n_heads_ahead,
    )


def detect(path: Path, head: bytes, _size: int) -> bool:
    """By the vocabulary stated three times over and sane sizes; whether those add up to the file, `read` says."""
    if len(head) < HEADER:
        return False
    fields = np.frombuffer(head, "<i4", 10).tolist()
    vocab, n_merges = fields[8:]
    if not (0 <= n_merges < 2**24 and fields[0] == vocab == 256 + n_merges):
        return False
    try:
        _config(fields[:8]).check(path)
    except FormatError:
        return False
    return bool(fields[4] <= 1 << 16)


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Read header and merges and place the tensors; FormatError where sizes do not add up to the file."""
    return reading(path, lambda file: _read(file, options))


def _read(file: File, options: ReadOptions) -> Checkpoint:
    path = file.path
    fields = file.ints(0, 10, at="header").tolist()
    config = _config(fields[:8])
    config.check(path)
    vocab, n_merges = fields[8:]
    if not vocab == 256 + n_merges == config.vocab_size:
        raise FormatError(
            "the vocabulary sizes contradict each other",
            path=path,
            offset=32,
            expected=f"V = VOCAB = 256 + merges, V {config.vocab_size}",
            got=f"VOCAB {vocab}, merges {n_merges}",
            hint="this is no nanoeuler file, or its header is damaged",
        )
    if config.n_embd % config.n_head or config.n_layer > 1 << 16:
        raise FormatError(
            "the header is not sane",
            path=path,
            offset=4,
            expected="C a multiple of NH, at most 65,536 layers",
            got=f"C {config.n_embd}, NH {config.n_head}, NL {config.n_layer}",
        )
    merges = file.ints(HEADER, 2 * n_merges, at="merges").reshape(2, n_merges)
    wrong = np.flatnonzero((merges < 0) | (merges >= 256 + np.arange(n_merges)))
    if len(wrong):
        row, k = divmod(int(wrong[0]), n_merges)
        raise FormatError(
            f"merge {k} joins a token that does not exist yet",
            path=path,
            offset=HEADER + 4 * int(wrong[0]),
            expected=f"0 to {255 + k}",
            got=int(merges[row, k]),
        )
    start = HEADER + 8 * n_merges
    end = end_of(LAYOUT, config, start, QType.F32)
    if end != file.size:
        raise FormatError(
            "the sizes in the header do not add up to the file",
            path=path,
            offset=start,
            at="start of parameters",
            expected=f"{end:,} bytes in all",
            got=f"{file.size:,}",
            hint="the file was cut, or its header is wrong",
        )
    if options.tokenizer:
        raise UnsupportedError("the file carries its tokenizer", path=path, hint="leave --tokenizer out")
    tokenizer = nanoeuler_bpe.NanoeulerBPE(merges[0], merges[1])
    source = Source((path,), NAME, "", dict(zip(FIELDS, fields, strict=False)), (NOTE,))
    return Checkpoint(
        config, read_sequential(places(LAYOUT, config, start, QType.F32)[0], config, file), tokenizer, source, (file,)
    )


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, _options: WriteOptions) -> tuple[Path, ...]:
    """Write a checkpoint that has nanoeuler's tokenizer, widths, base and norm constant; others are refused."""
    c = ck.config
    facts = {
        "norm_eps": (1e-5, c.norm_eps),
        "rope_theta": (10000.0, c.rope_theta),
        "rope_scaling": (None, c.rope_scaling),
        "head_dim": (c.n_embd // c.n_head, c.head_dim),
    }
    for name, (fixed, value) in facts.items():
        if fixed != value and not (isinstance(value, float) and np.float32(fixed) == np.float32(value)):
            raise UnsupportedError(f"nanoeuler has no place for another {name}", path=path, expected=fixed, got=value)
    if not isinstance(ck.tokenizer, nanoeuler_bpe.NanoeulerBPE):
        raise UnsupportedError(
            "nanoeuler stores its own tokenizer, and this model has another",
            path=path,
            expected="256 bytes and merges of ids",
            got=ck.tokenizer.kind if ck.tokenizer else "no tokenizer",
        )
    left, right = ck.tokenizer.merges()
    header = [
        c.vocab_size,
        c.n_embd,
        c.n_head,
        c.n_kv_head,
        c.n_layer,
        c.context_length,
        c.n_ff,
        c.n_mtp_head,
        c.vocab_size,
        len(left),
    ]
    with replacing(path) as out:
        out.write(
            np.array(header, "<i4").tobytes() + np.asarray(left, "<i4").tobytes() + np.asarray(right, "<i4").tobytes()
        )
        write_tensors(out, stored.values())
    return (path,)

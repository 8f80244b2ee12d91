"""All pairs: every readable fixture to every writable format that can hold it, and back, with nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import CASES, Case

from ckptkit import formats
from ckptkit.arch import with_pairing
from ckptkit.conversion import Options, convert
from ckptkit.errors import LossyError, UnsupportedError
from ckptkit.formats.options import ReadOptions
from ckptkit.quant.encode import decode_rows
from ckptkit.quant.types import QType

READABLE = [c for c in CASES if c.name != "gguf/llama_big_endian.gguf"]
WRITABLE = [m for m in map(formats.by_name, formats.FORMATS) if hasattr(m, "write")]
TARGETS = {"safetensors": "out"}


def values(t) -> np.ndarray:
    rows = t.read()
    return rows.view("<f8") if t.type == QType.F64 else decode_rows(rows, t.type)


def same(a, b) -> None:
    """The same canonical model: config, and every tensor's values once the pairing is the same."""
    b = with_pairing(b, a.config.rope_pairing)
    for name in ("context_length", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ff", "head_dim"):
        assert getattr(a.config, name) == getattr(b.config, name), name
    for name in ("norm_eps", "rope_theta"):
        assert np.float32(getattr(a.config, name)) == np.float32(getattr(b.config, name)), name
    assert (a.config.rope_scaling is None) == (
        b.config.rope_scaling is None
    ) or "rope_freqs.weight" in a.tensors | b.tensors
    for name, t in a.tensors.items():
        if name in ("rope_freqs.weight", "token_embd.padding"):
            continue
        if name == "output.weight" and name not in b.tensors:
            assert np.array_equal(values(t), values(b.tensors["token_embd.weight"]))
            continue
        assert np.array_equal(values(t).reshape(-1), values(b.tensors[name]).reshape(-1)), name


@pytest.mark.parametrize("target", WRITABLE, ids=lambda m: m.NAME)
@pytest.mark.parametrize("case", READABLE, ids=str)
def test_there_and_back(case: Case, target, fixtures_dir: Path, tmp_path: Path) -> None:
    source = case.path(fixtures_dir)
    out = tmp_path / TARGETS.get(target.NAME, f"out{formats.FORMATS[target.NAME]}")
    told = ReadOptions(**case.told)
    try:
        convert(source, out, Options(format=target.NAME, read=told))
    except (UnsupportedError, LossyError) as e:
        refusal = e
    else:
        refusal = None
    if refusal is not None:
        assert refusal.got is not None or refusal.at or refusal.hint, "a refusal names what would be lost"
        assert not out.exists()
        return
    facts = {k: v for k, v in case.told.items() if target.NAME == "microgpt"}
    with formats.open(source, options=told) as a, formats.open(out, options=ReadOptions(**facts)) as b:
        assert b.source.format == target.NAME
        same(a, b)
    if case.name.endswith("/") or not hasattr(formats.by_name(a.source.format), "write"):
        return
    back = tmp_path / f"back{source.suffix}"
    try:
        convert(out, back, Options(format=a.source.format, read=ReadOptions(**facts)))
    except (UnsupportedError, LossyError):
        return
    with formats.open(source, options=told) as a, formats.open(back, options=told) as c:
        same(a, c)


EXACT = [
    ("llmc/gpt2_v1.bin", "gguf"), ("llmc/gpt2_v2.bin", "gguf"), ("llmc/gpt2_v2_norms_last.bin", "gguf"),
    ("llmc/gpt2_v3.bin", "gguf"), ("llmc/gpt2_v4.bin", "gguf"), ("llmc/gpt2_v5.bin", "gguf"),
    ("llmc/gpt2_v3.bin", "safetensors"), ("llmc/gpt2_v5.bin", "safetensors"),
    ("llmc_llama3/llama3_v3.bin", "gguf"), ("llmc_llama3/llama3_v5.bin", "gguf"),
    ("llmc_llama3/llama3_v3_scaled.bin", "gguf"),
    ("nanoeuler/nanoeuler.bin", "gguf"), ("nanoeuler/same_bytes.bin", "gguf"),
    ("llama2c/v0.bin", "gguf"), ("llama2c/v0_tied.bin", "gguf"), ("llama2c/v1.bin", "gguf"),
    ("microgpt/microgpt_f64.safetensors", "microgpt"), ("microgpt/microgpt_f64.safetensors", "gguf"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "through"), EXACT)
def test_there_and_back_gives_the_same_bytes(name: str, through: str, fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / name
    out, back = tmp_path / TARGETS.get(through, f"out.{through}"), tmp_path / source.name
    with formats.open(source) as ck:
        format = ck.source.format
    convert(source, out, Options(format=through))
    convert(out, back, Options(format=format))
    assert back.read_bytes() == source.read_bytes()

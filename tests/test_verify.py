"""Two files compared: every fault is planted by the independent writers, and verify must name that one and no other."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ckptkit import formats
from ckptkit.cli import cli
from ckptkit.errors import CkptError
from ckptkit.formats.options import ReadOptions
from ckptkit.verify import Options, Report, verify
from fixtures import make, models
from fixtures.models import Array, Model
from fixtures.writers import gguf, llmc, nanoeuler, safetensors

Tensors = dict[str, tuple[Array, str]]
LLAMA, QWEN2, GPT2, Q8 = make.LLAMA2C, make.QWEN2, make.GPT2, make.Q8
SQUARE = models.llama(61, dim=12, hidden=20, n_kv_head=3)  # k and v as large as q


def llama(
    m: Model = LLAMA,
    change: Callable[[Tensors], Tensors] | None = None,
    arch: str = "llama",
    kind: str = "f32",
    **k: Any,
) -> bytes:
    """A GGUF of a llama or qwen2 model, its tensors changed before they are written."""
    tensors = gguf.llama_tensors(m, kind)
    return gguf.gguf(gguf.llama_keys(m, arch, **k), change(tensors) if change else tensors)


def gpt2(change: Callable[[Tensors], Tensors] | None = None) -> bytes:
    tensors = gguf.gpt2_tensors(GPT2)
    return gguf.gguf(gguf.gpt2_keys(GPT2), change(tensors) if change else tensors)


def each(part: str, f: Callable[[Array], Array]) -> Callable[[Tensors], Tensors]:
    """Change every tensor whose name holds `part`."""
    return lambda t: {n: (np.ascontiguousarray(f(a)) if part in n else a, kind) for n, (a, kind) in t.items()}


def without(end: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {n: v for n, v in t.items() if not n.endswith(end)}


def exchanged(x: str, y: str) -> Callable[[Tensors], Tensors]:
    """Every tensor of x under the name of y and the other way round."""

    def change(t: Tensors) -> Tensors:
        return {n: t[n.replace(x, "\0").replace(y, x).replace("\0", y)] for n in t}

    return change


def compared(tmp_path: Path, a: bytes, b: bytes, suffix: str = ".gguf", options: Options | None = None) -> Report:
    first, second = tmp_path / f"a{suffix}", tmp_path / "b.gguf"
    first.write_bytes(a)
    second.write_bytes(b)
    with formats.open(first) as x, formats.open(second) as y:
        return verify(x, y, options)


# ------------------------------------------------------------------ no fault


CONTROLS = {
    "the same file": (llama(), llama(), ".gguf"),
    "qwen2": (llama(QWEN2, arch="qwen2", theta=1e6), llama(QWEN2, arch="qwen2", theta=1e6), ".gguf"),
    "llm.c against gguf": (llmc.gpt2(GPT2, 3), gpt2(), ".bin"),
    "trained padding rows": (llmc.gpt2(GPT2, 3, pad_rows=make.PAD_ROWS), gpt2(), ".bin"),
    "tied output stored twice": (
        llama(make.LLAMA2C_TIED),
        llama(make.LLAMA2C_TIED, lambda t: t | {"output.weight": t["token_embd.weight"]}),
        ".gguf",
    ),
    "qwen2 with zero biases is a llama in halves": (
        llama(SQUARE),
        llama(
            models.half_paired(SQUARE),
            lambda t: t | {f"blk.{i}.attn_{c}.bias": (np.zeros(12, "f4"), "f32") for i in range(2) for c in "qkv"},
            "qwen2",
        ),
        ".gguf",
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_files_that_say_the_same_agree_on_every_level(tmp_path: Path, name: str) -> None:
    a, b, suffix = CONTROLS[name]
    r = compared(tmp_path, a, b, suffix)
    assert r.ok, (r.structure.differences, r.causes)
    assert r.structure.ok
    assert r.causes == r.unexplained == ()
    assert all(t.exact for t in r.tensors)
    assert r.logits is not None
    assert r.logits.max_dlogp < 1e-5
    assert r.logits.top1_agree == r.logits.tokens == 16


def test_hugging_face_halves_equal_gguf_pairs(fixtures_dir: Path) -> None:
    with (
        formats.open(fixtures_dir / "hf_llama") as a,
        formats.open(fixtures_dir / "gguf/split/tiny-00001-of-00003.gguf") as b,
    ):
        r = verify(a, b)
    assert r.ok
    assert any("permuted from adjacent to half" in note for note in r.structure.notes)


def test_rope_factors_as_a_tensor_equal_those_in_a_config(fixtures_dir: Path) -> None:
    with formats.open(fixtures_dir / "hf_llama31") as a, formats.open(fixtures_dir / "gguf/llama31.gguf") as b:
        assert verify(a, b).ok


def test_hashes_are_of_the_stored_bytes(tmp_path: Path) -> None:
    r = compared(tmp_path, llama(), llama(kind="bf16"))
    found = {t.name: t for t in r.tensors}["blk.1.ffn_down.weight"]
    w = LLAMA.p["w2"][1]
    assert found.sha256_a == hashlib.sha256(w.astype("<f4").tobytes()).hexdigest()
    assert found.sha256_b == hashlib.sha256(models.bf16_bits(w).astype("<u2").tobytes()).hexdigest()
    assert found.max_error == pytest.approx(np.abs(w - models.bf16(w)).max(), rel=1e-6)
    assert found.rms_error == pytest.approx(np.sqrt(np.mean((w - models.bf16(w)).astype("f8") ** 2)), rel=1e-6)
    assert not found.exact
    assert r.ok


# ------------------------------------------------------------------ faults, each with its name


def dropped_bias(part: str) -> Callable[[Tensors], Tensors]:
    return each(part, np.zeros_like)


FAULTS: dict[str, tuple[bytes, bytes, str, set[str]]] = {
    "q and k in halves": (
        llama(),
        llama(models.half_paired(LLAMA)),
        "rope_pairing",
        {"attn_q.weight", "attn_k.weight"},
    ),
    "qwen2 in adjacent pairs": (
        llama(models.half_paired(QWEN2), arch="qwen2"),
        llama(QWEN2, arch="qwen2"),
        "rope_pairing",
        {"attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias"},
    ),
    "biases left in the other pairing": (
        llama(models.half_paired(QWEN2), arch="qwen2"),
        llama(
            models.half_paired(QWEN2),
            lambda t: t | {n: v for n, v in gguf.llama_tensors(QWEN2).items() if "bias" in n},
            "qwen2",
        ),
        "rope_pairing",
        {"attn_q.bias", "attn_k.bias"},
    ),
    "qwen2 renamed llama without permuting": (
        llama(SQUARE),
        llama(models.half_paired(SQUARE)),
        "rope_pairing",
        {"attn_q.weight", "attn_k.weight"},
    ),
    "base 500000": (llama(), llama(theta=500000.0), "rope_base", set()),
    "base 1000000": (llama(), llama(theta=1000000.0), "rope_base", set()),
    "base 10000 for 1000000": (llama(theta=1e6), llama(), "rope_base", set()),
    "base left out": (
        llama(theta=1e6),
        gguf.gguf([k for k in gguf.llama_keys(LLAMA) if "freq_base" not in k[0]], gguf.llama_tensors(LLAMA)),
        "rope_base",
        set(),
    ),
    "eps 1e-6": (llama(), llama(eps=1e-6), "norm_eps", set()),
    "eps 1e-12": (llama(), llama(eps=1e-12), "norm_eps", set()),
    "eps 1e-5 for 1e-6": (llama(eps=1e-6), llama(), "norm_eps", set()),
    "attn_output not transposed": (
        llama(),
        llama(change=each("attn_output", np.transpose)),
        "transpose",
        {"attn_output.weight"},
    ),
    "ffn_down not transposed": (gpt2(), gpt2(each("ffn_down.weight", np.transpose)), "transpose", {"ffn_down.weight"}),
    "gate and up": (llama(), llama(change=exchanged("gate", "up")), "gate_up", {"ffn_gate.weight", "ffn_up.weight"}),
    "k and v": (llama(), llama(change=exchanged("attn_k", "attn_v")), "k_v", {"attn_k.weight", "attn_v.weight"}),
    "norms": (
        llama(),
        llama(change=exchanged("attn_norm", "ffn_norm")),
        "norms",
        {"attn_norm.weight", "ffn_norm.weight"},
    ),
    "qkv biases left out": (
        llama(QWEN2, arch="qwen2"),
        llama(QWEN2, without(".bias"), "qwen2"),
        "bias",
        {"attn_q.bias", "attn_k.bias", "attn_v.bias"},
    ),
    "one bias zero": (gpt2(), gpt2(dropped_bias("ffn_up.bias")), "bias", {"ffn_up.bias"}),
    "final norm's bias zero": (gpt2(), gpt2(dropped_bias("output_norm.bias")), "bias", {"output_norm.bias"}),
    "rows cut": (
        llama(),
        llama(change=lambda t: {n: (a[:250] if len(a) == 270 else a, k) for n, (a, k) in t.items()}),
        "rows",
        {"token_embd.weight", "output.weight"},
    ),
    "positions cut": (
        gpt2(),
        gpt2(lambda t: t | {"position_embd.weight": (GPT2.p["wpe"][:9], "f32")}),
        "rows",
        {"position_embd.weight"},
    ),
    "padding kept": (
        gpt2(),
        gpt2(lambda t: t | {"token_embd.weight": (llmc.padded(GPT2.p["wte"], 128), "f32")}),
        "padding",
        {"token_embd.weight"},
    ),
    "output dropped": (
        llama(),
        llama(change=lambda t: {n: v for n, v in t.items() if n != "output.weight"}),
        "tied",
        {"output.weight"},
    ),
    "output made up": (
        llama(make.LLAMA2C_TIED),
        llama(make.LLAMA2C_TIED, lambda t: t | {"output.weight": (LLAMA.p["wcls"], "f32")}),
        "tied",
        {"output.weight"},
    ),
    "rope factors left out": (
        make.gguf_llama31(),
        gguf.gguf(gguf.llama_keys(make.LLAMA31, theta=make.SCALED_THETA) + make.BPE, gguf.llama_tensors(make.LLAMA31)),
        "rope_scaling",
        set(),
    ),
    "quantised and in halves": (
        llama(Q8),
        llama(models.half_paired(Q8), kind="q8_0"),
        "rope_pairing",
        {"attn_q.weight", "attn_k.weight"},
    ),
    "quantised and not transposed": (
        llama(Q8),
        llama(Q8, each("attn_output", np.transpose), kind="q8_0"),
        "transpose",
        {"attn_output.weight"},
    ),
    "quantised, gate and up": (
        llama(Q8),
        llama(Q8, exchanged("gate", "up"), kind="q8_0"),
        "gate_up",
        {"ffn_gate.weight", "ffn_up.weight"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_fault_is_named_and_its_repair_removes_the_difference(tmp_path: Path, name: str) -> None:
    a, b, key, parts = FAULTS[name]
    r = compared(tmp_path, a, b)
    assert not r.ok
    assert [c.key for c in r.causes] == [key], [c.says for c in r.causes]
    assert r.unexplained == ()
    found = {n.split(".", 2)[2] if n.startswith("blk.") else n for n in r.causes[0].tensors}
    assert found == parts
    assert r.after is not None
    assert r.after.ok
    assert r.after.top1_agree == r.after.tokens


def test_two_faults_are_both_named(tmp_path: Path) -> None:
    r = compared(tmp_path, llama(), llama(change=exchanged("gate", "up"), theta=1e6))
    assert {c.key for c in r.causes} == {"gate_up", "rope_base"}
    assert r.after is not None
    assert r.after.ok


@pytest.mark.parametrize(
    ("b", "names", "keys"),
    [
        (
            llama(models.half_paired(LLAMA), each("attn_q", np.transpose)),
            ("attn_q.weight",),
            {"rope_pairing", "transpose"},
        ),
        (
            llama(change=lambda t: each("ffn_", np.transpose)(exchanged("gate", "up")(t))),
            ("ffn_gate.weight", "ffn_up.weight"),
            {"gate_up", "transpose"},
        ),
    ],
    ids=["paired otherwise and transposed", "exchanged and transposed"],
)
def test_two_faults_of_one_tensor_are_both_named(tmp_path: Path, b: bytes, names: tuple, keys: set) -> None:
    r = compared(tmp_path, llama(), b)
    assert r.unexplained == ()
    for name in names:
        assert {c.key for c in r.causes if f"blk.0.{name}" in c.tensors} == keys
    assert r.after is not None
    assert r.after.ok


def test_a_difference_without_a_cause_is_said_to_have_none(tmp_path: Path) -> None:
    r = compared(tmp_path, llama(), llama(change=each("blk.1.ffn_down", lambda w: w + np.float32(0.1))))
    assert not r.ok
    assert r.causes == ()
    assert r.unexplained == ("blk.1.ffn_down.weight",)


def test_one_changed_bit_differs(tmp_path: Path) -> None:
    b = bytearray(llama())
    b[-5] ^= 1
    r = compared(tmp_path, llama(), bytes(b), options=Options(logits=False))
    assert [t.name for t in r.tensors if not t.ok] == ["output.weight"]


def test_other_models_are_called_so_and_not_run(tmp_path: Path) -> None:
    r = compared(tmp_path, llama(), gpt2())
    assert not r.ok
    assert r.causes == ()
    assert r.logits is None
    assert {"arch", "n_embd"} <= {d.what for d in r.structure.differences}


def test_not_a_number_is_a_difference(tmp_path: Path) -> None:
    r = compared(
        tmp_path, llama(), llama(change=each("blk.0.attn_v", lambda w: np.where(w == w.max(), np.nan, w).astype("f4")))
    )
    assert not r.ok
    assert r.logits is not None
    assert not r.logits.ok


def test_missing_prediction_heads_are_missing(tmp_path: Path) -> None:
    m = make.NANOEULER
    first = Model(m.dims, m.p | {"wcls": m.p["wcls"][: m.dims["vocab"]]})
    r = compared(tmp_path, nanoeuler.nanoeuler(m), llama(first), ".bin")
    assert "mtp.1.weight" in {d.what for d in r.structure.differences}
    assert [c.key for c in r.causes] == ["mtp"]


def test_tokenizers_are_compared_by_tokens_ids_and_cuts(tmp_path: Path) -> None:
    def put(keys: list[gguf.Key]) -> bytes:
        return gguf.gguf(gguf.gpt2_keys(GPT2) + keys, gguf.gpt2_tensors(GPT2))

    tokens, merges, eot = make.vocab.BPE_STRINGS, make.vocab.BPE_MERGE_STRINGS, make.vocab.BPE_EOT
    good = put(gguf.bpe_keys(tokens, merges, eot=eot))
    assert compared(tmp_path, good, good).ok
    swapped = [*tokens[:-3], tokens[-2], tokens[-3], tokens[-1]]
    for keys, what in (
        (gguf.bpe_keys(swapped, merges, eot=eot), "tokenizer: 2 tokens"),
        (gguf.bpe_keys(tokens, merges[:-1], eot=eot), "tokenizer: ids of"),
        (gguf.bpe_keys(tokens, merges, eot=eot - 1), "tokenizer eos"),
    ):
        r = compared(tmp_path, good, put(keys), options=Options(logits=False))
        assert any(d.what.startswith(what) for d in r.structure.differences), (what, r.structure.differences)


# ------------------------------------------------------------------ command line


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["verify", *map(str, args)])


def test_command_says_ok_with_0_and_differ_with_1(fixtures_dir: Path, tmp_path: Path) -> None:
    good = run(fixtures_dir / "llmc/gpt2_v3.bin", fixtures_dir / "gguf/gpt2.gguf")
    assert good.exit_code == 0, good.output
    assert "36 of 36 bit for bit" in good.output
    assert "top-1 agrees 16/16" in good.output
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(gpt2(each("attn_output.weight", np.transpose)))
    out = run(fixtures_dir / "llmc/gpt2_v3.bin", bad)
    assert out.exit_code == 1
    assert "not transposed" in out.output


def test_process_exits_with_1_and_never_loads_the_runtime_without_logits(fixtures_dir: Path) -> None:
    code = (
        "import sys, ckptkit.cli as c\ntry:\n c.main()\nfinally:\n"
        " print(sorted(m for m in sys.modules if m.startswith(('numba', 'ckptkit.runtime'))))"
    )
    paths = [str(fixtures_dir / f"gguf/{n}.gguf") for n in ("llama", "gpt2")]
    for pair, status in ((paths, 1), (paths[:1] * 2, 0)):
        out = subprocess.run(
            [sys.executable, "-c", code, "verify", *pair, "--no-logits"], capture_output=True, text=True, check=False
        )
        assert out.returncode == status, out.stderr
        assert out.stdout.splitlines()[-1] == "[]"


def test_json_keys(fixtures_dir: Path) -> None:
    out = run(fixtures_dir / "llama2c/v1.bin", fixtures_dir / "gguf/llama.gguf", "--json", "--ids", "5,7,11")
    body = json.loads(out.output)
    assert list(body) == [
        "ok", "a", "b", "structure", "tensors", "logits", "logits_note", "causes", "unexplained", "logits_repaired",
    ]  # fmt: skip
    assert body["logits"]["tokens"] == 3
    assert {"name", "sha256_a", "sha256_b", "exact", "max_error", "rms_error", "limit"} <= set(
        body["tensors"]["compared"][0]
    )


def test_options_given_for_a_do_not_hide_a_fault_of_b(tmp_path: Path, fixtures_dir: Path) -> None:
    nx = fixtures_dir / "nx/nx.gguf"
    told = ("--rope-base", "1000000", "--norm-eps", "1e-6", "--context", "64")
    assert run(nx, nx, *told).exit_code == 0
    keys = [("qwen2.rope.freq_base", gguf.F32, 500000.0), ("qwen2.context_length", gguf.U32, 64)]
    keys += [("qwen2.attention.layer_norm_rms_epsilon", gguf.F32, 1e-6)]
    other = tmp_path / "other.gguf"
    raw = gguf.nx(make.NX)
    with formats.open(nx, options=ReadOptions(context_length=64)) as ck:
        tensors = {n: (t.read().view("<f4").reshape(t.shape), "f32") for n, t in ck.tensors.items()}
    assert raw == nx.read_bytes()
    d = make.NX.dims
    sizes = {"embedding_length": d["dim"], "block_count": d["n_layer"], "attention.head_count": 1}
    sizes |= {"attention.head_count_kv": 1, "feed_forward_length": d["hidden"]}
    keys += [(f"qwen2.{k}", gguf.U32, v) for k, v in sizes.items()]
    other.write_bytes(gguf.gguf([("general.architecture", gguf.STRING, "qwen2"), *keys], tensors))
    out = run(nx, other, *told)
    assert out.exit_code == 1
    assert "rope base: B has 500,000, A has 1,000,000" in out.output


def test_no_logits_does_not_run_them(fixtures_dir: Path) -> None:
    path = fixtures_dir / "gguf/llama.gguf"
    assert json.loads(run(path, path, "--no-logits", "--json").output)["logits"] is None


def test_bad_input_is_one_error(fixtures_dir: Path, tmp_path: Path) -> None:
    path, cut = fixtures_dir / "gguf/llama.gguf", tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:5000])
    assert isinstance(run(path, cut).exception, CkptError)
    assert isinstance(run(path, path, "--ids", "1,99999").exception, CkptError)
    assert isinstance(run(path, path, "--ids", ",".join(["1"] * 17)).exception, CkptError)
    assert run(path).exit_code == 2
    assert run(path, path, "--state", path).exit_code == 2


def test_foreign_arch_compares_tensors_and_runs_nothing(tmp_path: Path) -> None:
    w = {"some.weight": (LLAMA.p["wcls"], "f32")}
    keys = [("general.architecture", gguf.STRING, "unheard-of")]
    r = compared(tmp_path, gguf.gguf(keys, w), gguf.gguf(keys, w))
    assert r.ok
    assert r.logits is None
    assert "cannot be run" in r.logits_note
    other = {"some.weight": (LLAMA.p["wcls"] + 1, "f32")}
    assert not compared(tmp_path, gguf.gguf(keys, w), gguf.gguf(keys, other)).ok


def test_safetensors_shards_equal_the_rounded_model(fixtures_dir: Path, tmp_path: Path) -> None:
    m = models.rounded(make.LLAMA)
    b = tmp_path / "b.gguf"
    b.write_bytes(gguf.gguf(gguf.llama_keys(m) + make.BPE, gguf.llama_tensors(m)))
    with formats.open(fixtures_dir / "hf_llama_sharded") as x, formats.open(b) as y:
        r = verify(x, y)
    assert r.tensors_ok
    assert all(t.equal for t in r.tensors)
    assert not any(t.exact for t in r.tensors if len(t.shape) == 2)
    assert safetensors.llama_arrays(m)  # the writer that made A shares nothing with the one that made B

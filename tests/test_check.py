"""Every refusal that check predicts is one that llama.cpp really makes, and what check finds clean is really loaded."""

from __future__ import annotations

import importlib.metadata
import json
import struct
from collections.abc import Callable
from pathlib import Path

import llamacpp
import numpy as np
import pytest
from click.testing import CliRunner

from ckptkit.check import JUDGED_BY, Report, check
from ckptkit.check.template import check as template_findings
from ckptkit.cli.check import check as command
from fixtures.make import BPE, GPT2, LLAMA2C, SPM
from fixtures.writers import gguf

Keys = list[gguf.Key]
Tensors = dict[str, tuple[np.ndarray, str]]
Edit = Callable[[Keys, Tensors], bytes]


def build(edit: Callable[[Keys, Tensors], tuple[Keys, Tensors]], arch: str = "gpt2") -> bytes:
    keys = gguf.gpt2_keys(GPT2) + BPE if arch == "gpt2" else gguf.llama_keys(LLAMA2C) + SPM
    stored = gguf.gpt2_tensors(GPT2) if arch == "gpt2" else gguf.llama_tensors(LLAMA2C)
    return gguf.gguf(*edit(keys, stored))


def without(*names: str) -> Callable[[Keys, Tensors], tuple[Keys, Tensors]]:
    return lambda k, t: ([x for x in k if x[0] not in names], {n: v for n, v in t.items() if n not in names})


def put(name: str, kind: int, value: object) -> Callable[[Keys, Tensors], tuple[Keys, Tensors]]:
    def edit(keys: Keys, stored: Tensors) -> tuple[Keys, Tensors]:
        return [*(k for k in keys if k[0] != name), (name, kind, value)], stored

    return edit


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray] | None, kind: str = "f32"):  # type: ignore[no-untyped-def]
    def edit(keys: Keys, stored: Tensors) -> tuple[Keys, Tensors]:
        values = change(stored[name][0]) if change else np.zeros((4, 32), np.float32)
        return keys, stored | {name: (values, kind)}

    return edit


def tokens(change: Callable[[list[str]], list[str]]):  # type: ignore[no-untyped-def]
    def edit(keys: Keys, stored: Tensors) -> tuple[Keys, Tensors]:
        name = "tokenizer.ggml.tokens"
        old = next(list(k[2][1]) for k in keys if k[0] == name)
        return put(name, gguf.ARRAY, (gguf.STRING, change(old)))(keys, stored)

    return edit


T = "tokenizer.ggml."
EPS = "attention.layer_norm_epsilon"
D = GPT2.dims
# rule, what is done to a file; llama.cpp refuses each
REFUSED = {
    "no-eps": ("key-missing", build(without(f"gpt2.{EPS}"))),
    "no-context": ("key-missing", build(without("gpt2.context_length"))),
    "no-ff": ("key-missing", build(without("gpt2.feed_forward_length"))),
    "no-arch": ("arch-missing", build(without("general.architecture"))),
    "arch-microgpt": ("arch-unknown", build(put("general.architecture", gguf.STRING, "microgpt"))),
    "u64": ("key-type", build(put("gpt2.context_length", gguf.U64, D["max_t"]))),
    "f64": ("key-type", build(put(f"gpt2.{EPS}", gguf.F64, 1e-5))),
    "bos-i32": ("key-type", build(put(f"{T}bos_token_id", gguf.I32, 0))),
    "add-bos-u32": ("key-type", build(put(f"{T}add_bos_token", gguf.U32, 0))),
    "extra": ("tensor-extra", build(tensor("mtp.1.weight", None))),
    "missing": ("tensor-missing", build(without("blk.0.attn_qkv.bias"))),
    "shape": ("tensor-shape", build(tensor("blk.0.ffn_up.weight", lambda a: a[:-1]))),
    "rows": ("vocabulary-rows", build(tensor("token_embd.weight", lambda a: np.vstack([a, a[:3]])))),
    "positions": ("position-rows", build(put("gpt2.context_length", gguf.U32, D["max_t"] + 1))),
    "pre": ("pre-unknown", build(put(f"{T}pre", gguf.STRING, "nanoeuler"))),
    "merges": ("merges-missing", build(without(f"{T}merges"))),
    "equal": ("vocabulary-equal", build(tokens(lambda t: [*t[:-1], t[-2]]))),
    "model": ("tokenizer-unknown", build(put(f"{T}model", gguf.STRING, "chars"))),
    "no-model": ("tokenizer-missing", build(without(f"{T}model"))),
    "no-tokens": ("tokens-missing", build(without(f"{T}tokens"))),
    "cut": ("unreadable", build(lambda k, t: (k, t))[:-5000]),
    "f16-norm": ("vector-type", build(tensor("blk.0.attn_norm.weight", lambda a: a, "f16"))),
    "types-short": ("array-length", build(put(f"{T}token_type", gguf.ARRAY, (gguf.I32, [1, 1])))),
    "no-vocab": ("no-vocabulary", build(put(f"{T}model", gguf.STRING, "no_vocab"))),
    "alignment": ("unreadable", build(put("general.alignment", gguf.U32, 3))),
    "llama-missing": ("tensor-missing", build(without("blk.0.ffn_gate.weight"), "llama")),
}


def gapped() -> bytes:
    """32 bytes that belong to no tensor behind the first; all others lie where their offsets say."""
    data, names = bytearray(build(lambda k, t: (k, t))), gguf.gpt2_tensors(GPT2)
    (_, (values, _)), *others = names.items()
    for name, (a, _) in others:
        at = data.index(gguf.string(name)) + 8 + len(name) + 4 + 8 * a.ndim + 4
        struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] + 32)
    size = sum(-(-a.size * 4 // 32) * 32 for a, _ in names.values())
    at = len(data) - size + -(-values.size * 4 // 32) * 32
    return bytes(data[:at] + bytes(32) + data[at:])


REFUSED["gap"] = ("offsets", gapped())


def rules(report: Report, severity: str = "") -> set[str]:
    return {f.rule for f in report.findings if severity in ("", f.severity)}


@pytest.mark.parametrize("name", REFUSED)
def test_predicted_refusals_are_refused(name: str, tmp_path: Path) -> None:
    rule, data = REFUSED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert rule in rules(check(path), "error")
    assert llamacpp.run(path, [1], 1) is None


CLEAN = ["gpt2", "gpt2_v2", "llama", "llama31", "llama_f16", "llama_q8_0", "llama_v2", "qwen2_bf16"]


@pytest.mark.parametrize("name", CLEAN)
def test_clean_files_are_accepted(name: str, fixtures_dir: Path) -> None:
    path = fixtures_dir / "gguf" / f"{name}.gguf"
    report = check(path, deep=True)
    assert not rules(report, "error")
    assert not rules(report, "warning")
    assert llamacpp.run(path, [1], 1) is not None


LOADED = {
    "no-pre": ("pre-missing", build(without(f"{T}pre"))),
    "no-bos": ("bos-default", build(without(f"{T}bos_token_id"))),
    "no-base": ("rope-base", build(without("llama.rope.freq_base"), "llama")),
    "no-scores": ("scores-missing", build(without(f"{T}scores"), "llama")),
    "bad-merge": ("vocabulary-merge", build(put(f"{T}merges", gguf.ARRAY, (gguf.STRING, ["abc"])))),
    "eos-range": ("id-range", build(put(f"{T}eos_token_id", gguf.U32, 99999))),
    "trailing": ("trailing", build(lambda k, t: (k, t)) + bytes(100)),
    "padding": ("padding-rows", build(tokens(lambda t: [*t[:-1], "[PAD7]"]))),
    "zeros": ("zero-rows", build(tensor("token_embd.weight", lambda a: np.vstack([a[:-2], np.zeros_like(a[-2:])])))),
}


@pytest.mark.parametrize("name", LOADED)
def test_silent_faults_load_and_are_warned_of(name: str, tmp_path: Path) -> None:
    rule, data = LOADED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    report = check(path)
    assert rule in rules(report, "warning")
    assert not report.refused
    assert llamacpp.run(path, [1], 1) is not None


FIXED = ["u64", "gap", "f16-norm", "f64", "bos-i32", "no-context", "no-ff", "positions", "merges"]


@pytest.mark.parametrize("name", FIXED)
def test_mended_files_are_accepted(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "mended.gguf"
    path.write_bytes(REFUSED[name][1])
    check(path, fix=out)
    assert not rules(check(out), "error")
    assert llamacpp.run(out, [1], 1) is not None


def test_nonfinite_values_are_found_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def poison(a: np.ndarray) -> np.ndarray:
        a = a.copy()
        a[1, 2] = np.nan
        return a

    path.write_bytes(build(tensor("blk.0.ffn_up.weight", poison)))
    assert not rules(check(path), "error")
    found = [f for f in check(path, deep=True).findings if f.rule == "nonfinite"]
    assert [f.at for f in found] == ["tensor blk.0.ffn_up.weight, row 1"]


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages['__cl' ~ 'ass__'] }}",
    "{{ messages | attr('x') }}",
    "{{ lipsum.x }}",
    "{% include '/etc/passwd' %}",
]
HARMLESS = [
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content | trim }}{% endfor %}",
    "{% generation %}{{ bos_token + '__class__' }}{% endgeneration %}",
    "{% set ns = namespace(x=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_templates_that_run_code(text: str) -> None:
    assert [f.rule for f in template_findings(text)] == ["template-code"]


@pytest.mark.parametrize("text", HARMLESS)
def test_templates_that_only_write(text: str) -> None:
    assert list(template_findings(text)) == []


def test_template_that_does_not_parse() -> None:
    assert [f.rule for f in template_findings("{% if %}")] == ["template-syntax"]


def test_judge_is_the_installed_one() -> None:
    assert f"xllamacpp {importlib.metadata.version('xllamacpp')}" == JUDGED_BY


def test_exit_codes_and_json(fixtures_dir: Path, tmp_path: Path) -> None:
    good, bad = fixtures_dir / "gguf" / "llama.gguf", tmp_path / "bad.gguf"
    bad.write_bytes(REFUSED["pre"][1])
    assert CliRunner().invoke(command, [str(good)]).exit_code == 0
    result = CliRunner().invoke(command, [str(bad), "--json"])
    assert result.exit_code == 1
    body = json.loads(result.stdout)
    assert body["counts"]["error"] == 1
    assert body["judged_by"] == JUDGED_BY
    assert CliRunner().invoke(command, [str(bad)]).exit_code == 1


def test_nothing_written_where_nothing_can_be_mended(tmp_path: Path) -> None:
    from ckptkit.errors import UnsupportedError

    path, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    path.write_bytes(REFUSED["pre"][1])
    with pytest.raises(UnsupportedError):
        check(path, fix=out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize("cut", range(0, 3000, 61))
def test_damaged_headers_are_findings(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(build(lambda k, t: (k, t)))
    data[4 + cut] ^= 0xFF
    path.write_bytes(data)
    check(path)
    path.write_bytes(data[: 4 + cut])
    assert rules(check(path), "error") == {"unreadable"}

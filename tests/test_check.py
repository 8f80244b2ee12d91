"""Every refusal that check predicts is one that llama.cpp really makes, and what check finds clean is really loaded."""

from __future__ import annotations

import importlib.metadata
import json
import random
from pathlib import Path

import llamacpp
import numpy as np
import pytest
from cases import CASES
from check_files import REFUSED, SOURCES, Keys, T, Tensors, array, build, put, tensor, without
from click.testing import CliRunner

import ckptkit
from ckptkit.check import JUDGED_BY, RULES, Report, check
from ckptkit.check.archs import LLAMA_CPP
from ckptkit.check.keys import wanted
from ckptkit.check.template import check as template_findings
from ckptkit.cli import cli
from ckptkit.formats.gguf_io import Kind
from ckptkit.formats.options import ReadOptions
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.tokenizer.pre import ELSEWHERE, PRES
from fixtures.make import BPE, LLAMA
from fixtures.writers import gguf

pytest.importorskip("xllamacpp", reason="needs xllamacpp, llama.cpp in process")


def rules(report: Report, severity: str = "") -> set[str]:
    return {f.rule for f in report.findings if severity in ("", f.severity)}


def saved(files: dict[str, bytes], folder: Path) -> dict[str, Path]:
    paths = {name: folder / f"{k}.gguf" for k, name in enumerate(files)}
    for name, path in paths.items():
        path.write_bytes(files[name])
    return paths


ELSEWHERE_CONFIRMED = {  # below: of several files, and what llama.cpp dies of at the first text and not before
    "shard-first", "shard-count", "bos-absent", "eos-absent",
}  # fmt: skip
OTHER_ENGINES = {"tokens-beyond-rows"}  # of Hugging Face directories: tests/peers


def test_every_rule_of_severity_error_has_a_file_that_llama_cpp_refuses() -> None:
    errors = {rule for rule, severity in RULES.items() if severity == "error"}
    assert {rule for rule, _, _ in REFUSED.values()} == errors - ELSEWHERE_CONFIRMED - OTHER_ENGINES


def test_predicted_refusals_are_refused(tmp_path: Path) -> None:
    paths = saved({name: data for name, (_, data, _) in REFUSED.items()}, tmp_path)
    verdicts = dict(zip(paths, llamacpp.judged(list(paths.values())), strict=True))
    for name, (rule, _, said) in REFUSED.items():
        loaded, words = verdicts[name]
        assert rule in rules(check(paths[name]), "error"), name
        assert not loaded, name
        for _ in range(3):  # its log loses lines when it stops at once
            if said in words:
                break
            words = llamacpp.judged([paths[name]])[0][1]
        assert said in words, (name, words)


def test_errors_stand_alone_where_only_one_thing_is_wrong(tmp_path: Path) -> None:
    paths = saved({name: data for name, (_, data, _) in REFUSED.items()}, tmp_path)
    several = {  # one wrong number can contradict several things
        "no-blocks", "values", "qwen2-heads", "microgpt",
    }  # fmt: skip
    for name in set(REFUSED) - several:
        found = {f.rule for f in check(paths[name]).findings if f.severity == "error"}
        assert found == {REFUSED[name][0]}, name


def fused(keys: Keys, stored: Tensors) -> tuple[Keys, Tensors]:
    """q, k and v as one matrix, as some exporters write them."""
    for i in range(2):
        parts = [stored.pop(f"blk.{i}.attn_{p}.weight")[0] for p in "qkv"]
        stored[f"blk.{i}.attn_qkv.weight"] = (np.concatenate(parts), "f32")
    return keys, stored


CLEAN = ["gpt2", "gpt2_v2", "llama", "llama31", "llama_f16", "llama_q8_0", "llama_v2", "qwen2_bf16"]
ODD = {  # what looks wrong and is not
    "bool-2": build().replace(b"add_bos_token\7\0\0\0\0", b"add_bos_token\7\0\0\0\2"),
    "long-key": build(put("k" * 70000, gguf.U32, 1)),
    "alignment-2^17": build(put("general.alignment", gguf.U32, 1 << 17), align=1 << 17),
    "last-not-padded": gguf.gguf(*SOURCES["gpt2"], pad_end=False),
    "norm-2d": build(tensor("blk.0.attn_norm.bias", lambda a: a[None])),
    "embedding-3d": build(tensor("token_embd.weight", lambda a: a[None])),
    "positions-f16": build(tensor("position_embd.weight", kind="f16")),
    "heads-array": build(array("gpt2.attention.head_count", gguf.I32, [3, 3])),
    "eps-of-the-other-norm": build(put("llama.attention.layer_norm_epsilon", gguf.F64, 1e-5), arch="llama"),
    "version-u64": build(put("general.quantization_version", gguf.U64, 2)),
    "scores-i32": build(array(f"{T}scores", gguf.I32, [0] * 270), arch="llama"),
    "merges-not-read": build(array(f"{T}merges", gguf.I32, [1]), arch="llama"),
    "pre-not-read": build(put(f"{T}pre", gguf.STRING, "zzz"), arch="llama"),
    "kimi-without-merges": build(put(f"{T}pre", gguf.STRING, "kimi-k2"), without(f"{T}merges")),
    "two-heads": build(put("gpt2.attention.head_count", gguf.U32, 2)),
    "attention-bias": build(tensor("blk.0.attn_output.bias", lambda _: np.ones(12, np.float32)), arch="llama"),
    "longrope": build(
        put("llama.rope.scaling.type", gguf.STRING, "longrope"),
        *(tensor(f"rope_factors_{n}.weight", lambda _: np.ones(2, np.float32)) for n in ("long", "short")),
        arch="llama",
    ),
    "scale": build(tensor("blk.0.attn_q.scale", lambda _: np.ones(1, np.float32)), arch="llama"),
    "qwen2-output-bias": build(tensor("output.bias", lambda _: np.ones(29, np.float32)), arch="qwen2"),
    "qwen2-without-biases": build(without(*(f"blk.{i}.attn_{p}.bias" for i in range(3) for p in "qkv")), arch="qwen2"),
    "fused": build(fused, arch="llama"),
}  # fmt: skip


def test_clean_files_are_accepted(fixtures_dir: Path, tmp_path: Path) -> None:
    paths = saved(ODD, tmp_path) | {name: fixtures_dir / "gguf" / f"{name}.gguf" for name in CLEAN}
    for (name, path), (loaded, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        report = check(path, deep=True)
        assert not rules(report, "error"), name
        assert not (name in CLEAN and rules(report, "warning")), name
        assert loaded, (name, words)


WRONG: dict[Kind, tuple[int, object]] = {  # a value that says the same in another type
    Kind.U32: (gguf.U64, 2),
    Kind.U16: (gguf.U32, 1),
    Kind.F32: (gguf.F64, 1.0),
    Kind.BOOL: (gguf.U32, 0),
    Kind.STRING: (gguf.U32, 2),
}


@pytest.mark.parametrize("arch", SOURCES)
def test_every_key_whose_type_is_demanded_is_refused_in_another(arch: str, tmp_path: Path) -> None:
    keys = {k: v for k, v in wanted(arch).items() if k not in ("general.architecture", "general.alignment")}
    paths = saved({key: build(put(key, *WRONG[kind]), arch=arch) for key, kind in keys.items()}, tmp_path)
    for (key, path), (loaded, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        assert [f.at for f in check(path).findings if f.rule == "key-type"] == [f"key {key}"]
        assert not loaded, key
        assert f"key {key} has wrong type" in words


def test_names_of_architectures_are_those_that_llama_cpp_knows(tmp_path: Path) -> None:
    names = [*sorted(LLAMA_CPP), "gpt3"]
    files = {name: gguf.gguf([("general.architecture", gguf.STRING, name)], {}) for name in names}
    *known, unknown = llamacpp.judged(list(saved(files, tmp_path).values()))
    for name, (_, words) in zip(names, known, strict=False):
        assert "unknown model architecture" not in words, name
    assert "unknown model architecture: 'gpt3'" in unknown[1]


def test_names_of_splitters_are_those_that_llama_cpp_knows(tmp_path: Path) -> None:
    files = {pre: build(put(f"{T}pre", gguf.STRING, pre), lambda k, _: (k, {})) for pre in sorted({*PRES, *ELSEWHERE})}
    paths = saved(files, tmp_path)
    for (pre, path), (_, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        assert rules(check(path), "error") == {"no-tensors"}, pre
        assert "'token_embd.weight' not found" in words, pre  # the vocabulary was read by then


WITHOUT_JUDGE = ("Q8_1",)  # ggml's block of today is 36 bytes long, the gguf package's 40


def test_types_of_matrices_are_those_that_llama_cpp_multiplies(tmp_path: Path) -> None:
    from fixtures.make import SPM
    from fixtures.models import llama

    m = llama(10, dim=256, hidden=256, vocab=270, n_head=4, n_kv_head=4, n_layer=1)
    data = gguf.gguf(gguf.llama_keys(m) + SPM, gguf.llama_tensors(m))
    old = b"blk.0.ffn_down.weight\2\0\0\0" + 2 * (256).to_bytes(8, "little")
    kinds = [k for k in QType if k.name not in WITHOUT_JUDGE]
    size = 256 * 256 * 4
    at = len(data) - 256 * 4 - size - 270 * 256 * 4  # ffn_down, output_norm, output

    def stored(kind: QType) -> bytes:
        """ffn_down as zeros of this type, and the offsets behind it moved."""
        nbytes = 256 * 256 // BLOCKS[kind].elements * BLOCKS[kind].nbytes
        head = bytearray(data.replace(old + b"\0\0\0\0", old + int(kind).to_bytes(4, "little")))
        for name, axes in ((b"output_norm.weight", 1), (b"output.weight", 2)):
            place = head.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4 + 8 * axes + 4
            offset = int.from_bytes(head[place : place + 8], "little") - size + nbytes
            head[place : place + 8] = offset.to_bytes(8, "little")
        return bytes(head[:at]) + bytes(nbytes) + bytes(head[at + size :])

    paths = saved({kind.name: stored(kind) for kind in kinds}, tmp_path)
    for (name, path), (loaded, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        assert rules(check(path, deep=True), "error") == (set() if loaded else {"matrix-type"}), (name, words)


SPLIT = gguf.split(gguf.llama_keys(LLAMA) + BPE, gguf.llama_tensors(LLAMA), 3, "tiny")
FIRST, SECOND, THIRD = SPLIT
COUNT = b"split.tensors.count" + (gguf.I32).to_bytes(4, "little")
SHARDS = {  # shards changed, the one that is given, the rule, what llama.cpp says
    "whole": ({}, FIRST, "", ""),
    "second": ({}, SECOND, "shard-first", "must be loaded with the first split"),
    "counted": (
        {n: d.replace(COUNT + bytes([len(gguf.llama_tensors(LLAMA))]), COUNT + b"\7") for n, d in SPLIT.items()},
        FIRST, "shard-count", "7 tensors expected",
    ),
    "missing": ({THIRD: b""}, FIRST, "unreadable", "failed to load"),
    "twice": (
        {THIRD: SPLIT[SECOND].replace(b"split.no\2\0\0\0\1", b"split.no\2\0\0\0\2")},
        FIRST, "unreadable", "is duplicated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARDS)
def test_shards_are_refused_as_predicted(what: str, tmp_path: Path) -> None:
    changed, given, rule, said = SHARDS[what]
    for name, data in (SPLIT | changed).items():
        if data:
            (tmp_path / name).write_bytes(data)
    assert rules(check(tmp_path / given), "error") >= ({rule} if rule else set())
    ((loaded, words),) = llamacpp.judged([tmp_path / given])
    assert loaded == (not rule)
    assert said in words


def test_a_token_to_add_that_there_is_not_kills_llama_cpp_at_the_first_text(tmp_path: Path) -> None:
    for role in ("bos", "eos"):
        path = tmp_path / f"{role}.gguf"
        short = [array(f"{T}tokens", gguf.STRING, [*"abcdefg"]), without(f"{T}token_type", f"{T}{role}_token_id")]
        rows = tensor("token_embd.weight", lambda a: a[:7])
        path.write_bytes(build(*short, rows, put(f"{T}add_{role}_token", gguf.BOOL, True)))
        assert rules(check(path), "error") == {f"{role}-absent"}
        assert llamacpp.judged([path])[0][0], "ids alone it takes"
        with pytest.raises(llamacpp.Died, match=f"token_{role}"):
            llamacpp.tokenized(path, ["abc"])


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
    assert [(f.rule, f.severity) for f in template_findings(text)] == [("template-code", "warning")]


@pytest.mark.parametrize("text", HARMLESS)
def test_templates_that_only_write(text: str) -> None:
    assert list(template_findings(text)) == []


def test_llama_cpp_starts_with_templates_that_only_write(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    paths = saved({text: build(put(key, gguf.STRING, text)) for text in HARMLESS}, tmp_path)
    assert [loaded for loaded, _ in llamacpp.judged(list(paths.values()))] == [True] * len(HARMLESS)


def test_judge_is_the_installed_one() -> None:
    assert f"xllamacpp {importlib.metadata.version('xllamacpp')}" == JUDGED_BY


def run(*args: object):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(cli, [*map(str, args)])


def test_exit_codes_and_json(fixtures_dir: Path, tmp_path: Path) -> None:
    good, bad = fixtures_dir / "gguf" / "llama.gguf", tmp_path / "bad.gguf"
    bad.write_bytes(REFUSED["pre"][1])
    assert run("check", good).exit_code == 0
    result = run("check", bad, "--json")
    assert result.exit_code == 1
    body = json.loads(result.stdout)
    assert body["counts"]["error"] == 1
    assert body["judged_by"] == JUDGED_BY
    assert {f["severity"] == RULES[f["rule"]] for f in body["findings"]} == {True}
    shown = run("check", bad)
    assert shown.exit_code == 1
    assert f"judged by {JUDGED_BY}" in shown.stdout


def test_many_findings_of_one_rule_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(REFUSED["layers-270"][1])
    shown = run("check", path).stdout
    listed = json.loads(run("check", path, "--json").stdout)["findings"]
    missing = sum(f["rule"] == "tensor-missing" for f in listed)
    assert shown.count("[tensor-missing;") == 6
    assert f"and {missing - 6:,} more of [tensor-missing]; --json lists all" in shown


@pytest.mark.parametrize("cut", range(0, 3000, 61))
def test_damaged_headers_are_findings(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(build())
    data[4 + cut] ^= 0xFF
    path.write_bytes(data)
    check(path)
    path.write_bytes(data[: 4 + cut])
    assert rules(check(path), "error") == {"unreadable"}


@pytest.mark.parametrize("type", ["", "f16"])
def test_the_verdict_on_every_conversion_is_llama_cpps(type: str, fixtures_dir: Path, tmp_path: Path) -> None:
    paths: dict[str, Path] = {}
    for k, case in enumerate(CASES):
        paths[case.name] = tmp_path / f"{k}.gguf"
        told, drop = ReadOptions(**case.told), ("token_embd.padding",)
        if case.name != "gguf/llama_big_endian.gguf":
            ckptkit.convert(case.path(fixtures_dir), paths[case.name], type=type, read=told, mtp="drop", drop=drop)
    paths["gguf/llama_big_endian.gguf"] = fixtures_dir / "gguf" / "llama_big_endian.gguf"
    for (name, path), (loaded, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        report = check(path, deep=True)
        assert report.refused != loaded, (name, report.findings, words)
        if not loaded:  # of ours only what no other engine knows, and what has no tokenizer
            why = {"no-vocabulary", "arch-unknown", *(["unreadable"] if "big_endian" in name else [])}
            assert rules(report, "error") <= why, name


VALUES = {
    gguf.U8: [0, 1], gguf.U16: [0, 3], gguf.U32: [0, 2, 3, 4, 12, 16, 18, 29, 270, 600], gguf.I32: [-1, 0, 3],
    gguf.F32: [0.0, 1.0, -1.0], gguf.F64: [1.0], gguf.BOOL: [True, False], gguf.STRING: ["", "x", "linear"],
    gguf.U64: [1, 3],
}  # fmt: skip
CHANGES = [lambda a: a[:-1], lambda a: np.concatenate([a, a[:1]]), lambda a: a.T.copy(), lambda a: a[None]]


def edited(seed: int) -> tuple[str, bytes]:
    """One random edit of a good file."""
    rng = random.Random(seed)
    arch = rng.choice(list(SOURCES))
    key, name = rng.choice(SOURCES[arch][0])[0], rng.choice(list(SOURCES[arch][1]))
    kind = rng.choice(list(VALUES))
    value, stored, k = rng.choice(VALUES[kind]), rng.choice(["f16", "bf16", "f64", "i32"]), rng.randrange(len(CHANGES))
    edits = {
        f"{key} = {value!r} of type {kind}": put(key, kind, value),
        f"without {key}": without(key),
        f"without {name}": without(name),
        f"{name} as {stored}": tensor(name, kind=stored),
        f"{name} changed {k}": tensor(name, CHANGES[k]),
    }
    what = rng.choices(list(edits), [9, 3, 3, 3, 2])[0]
    return f"{arch}: {what}", build(edits[what], arch=arch)


def test_the_verdict_on_random_edits_is_llama_cpps(tmp_path: Path) -> None:
    paths = saved(dict(edited(seed) for seed in range(300)), tmp_path)
    for (what, path), (loaded, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        report = check(path, deep=True)
        assert report.refused != loaded, (what, report.findings, words)


def test_the_verdict_on_random_bytes_of_the_header_is_llama_cpps(tmp_path: Path) -> None:
    rng, files = random.Random(1), {}
    for _ in range(300):
        arch = rng.choice(list(SOURCES))
        data = bytearray(build(arch=arch))
        at = rng.randrange(4, 9000 if arch == "llama" else 3200)
        data[at] = rng.choice([data[at] ^ 1, data[at] ^ 0x80, 0, 255, rng.randrange(256)])
        files[f"{arch}: byte {at} = {data[at]}"] = bytes(data)
    paths = saved(files, tmp_path)
    for (what, path), (loaded, words) in zip(paths.items(), llamacpp.judged(list(paths.values())), strict=True):
        report = check(path, deep=True)
        assert report.refused != loaded, (what, report.findings, words)

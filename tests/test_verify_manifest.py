"""The manifest of a conversion, checked with and without the source; what was tampered with is found."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case
from click.testing import CliRunner

from ckptkit.cli import cli
from ckptkit.conversion import Options, convert
from ckptkit.errors import CkptError
from ckptkit.formats.options import ReadOptions
from ckptkit.verify import ManifestReport, verify_manifest
from fixtures import make, models

READABLE = [c for c in CASES if "big_endian" not in c.name and "pad_rows" not in c.name]


def made(source: Path, folder: Path, suffix: str = ".gguf", type: str = "", **told: Any) -> tuple[Path, Path]:
    """Convert with a manifest."""
    out, manifest = folder / f"out{suffix}", folder / "manifest.json"
    convert(source, out, Options(type=type, manifest=manifest, read=ReadOptions(**told)))
    return out, manifest


def verdicts(r: ManifestReport) -> dict[str, bool]:
    return {c.what: c.ok for c in r.checks}


@pytest.mark.parametrize("case", READABLE, ids=str)
def test_every_format_follows_from_its_source(case: Case, fixtures_dir: Path, tmp_path: Path) -> None:
    source = case.path(fixtures_dir)
    f64 = case.format == "microgpt"
    out, manifest = made(source, tmp_path, type="f32" if f64 else "", **case.told)
    r = verify_manifest(out, manifest, [source])
    assert r.ok, [c.details for c in r.checks]
    assert verdicts(r) == dict.fromkeys(("output", "tensors", "source", "recipes"), True)


@pytest.mark.parametrize(
    ("source", "suffix", "type"),
    [
        ("gguf/llama_q8_0.gguf", "", "f32"),
        ("gguf/qwen2_bf16.gguf", "", ""),
        ("gguf/gpt2.gguf", ".bin", ""),
        ("llmc/gpt2_v3.bin", "", ""),
        ("nanoeuler/nanoeuler.bin", ".bin", ""),
        ("hf_llama_sharded", ".gguf", "f32"),
        ("gguf/llama_q8_0.gguf", ".gguf", "q4_0"),
    ],
)
def test_other_targets_and_types(fixtures_dir: Path, tmp_path: Path, source: str, suffix: str, type: str) -> None:
    out, manifest = made(fixtures_dir / source, tmp_path, suffix, type)
    r = verify_manifest(out, manifest, [fixtures_dir / source])
    assert r.ok, [c.details for c in r.checks]
    assert "recipes" in verdicts(r)


def test_hashes_in_the_manifest_are_those_of_the_writers_arrays(fixtures_dir: Path, tmp_path: Path) -> None:
    out, manifest = made(fixtures_dir / "hf_llama", tmp_path)
    body = json.loads(manifest.read_text())
    w = make.LLAMA.p["wq"][1]  # the source holds it in halves, the output in adjacent pairs
    assert body["tensors"]["blk.1.attn_q.weight"]["sha256"] == hashlib.sha256(w.tobytes()).hexdigest()
    half = models.to_half(make.LLAMA.p["wq"], 3)[1]
    assert not np.array_equal(half, w)
    assert body["outputs"][0]["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()


def test_same_conversion_same_manifest(fixtures_dir: Path, tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        made(fixtures_dir / "llmc/gpt2_v5.bin", tmp_path / name)
    assert (tmp_path / "x/manifest.json").read_bytes() == (tmp_path / "y/manifest.json").read_bytes()
    assert (tmp_path / "x/out.gguf").read_bytes() == (tmp_path / "y/out.gguf").read_bytes()


@pytest.fixture
def triple(fixtures_dir: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Source, output and manifest in a folder of their own."""
    source = tmp_path / "gpt2_v3.bin"
    shutil.copy(fixtures_dir / "llmc/gpt2_v3.bin", source)
    return (source, *made(source, tmp_path))


def test_without_the_source_hashes_are_checked_and_that_is_said(triple: tuple[Path, Path, Path]) -> None:
    source, out, manifest = triple
    source.unlink()
    r = verify_manifest(out, manifest)
    assert r.ok
    assert verdicts(r) == {"output": True, "tensors": True}
    assert any("source not found" in note for note in r.notes)


def test_a_renamed_output_is_known_by_its_hash(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    assert verify_manifest(out.rename(out.with_name("other.gguf")), manifest).ok


def test_a_changed_value_is_found_and_named(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    raw = bytearray(out.read_bytes())
    at = raw.find(make.GPT2.p["fcw"][1].tobytes())
    assert at > 0
    raw[at + 9] ^= 1
    out.write_bytes(raw)
    r = verify_manifest(out, manifest)
    assert verdicts(r) == {"output": False, "tensors": False, "source": True, "recipes": True}
    assert any("blk.1.ffn_up.weight has other bytes" in d for c in r.checks for d in c.details)


def test_another_source_is_found(triple: tuple[Path, Path, Path]) -> None:
    source, out, manifest = triple
    raw = bytearray(source.read_bytes())
    raw[-1] ^= 1
    source.write_bytes(raw)
    assert verdicts(verify_manifest(out, manifest))["source"] is False


def changed(manifest: Path, change: Any) -> None:
    body = json.loads(manifest.read_text())
    change(body)
    manifest.write_text(json.dumps(body))


def test_a_recipe_that_makes_other_bytes_is_found(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple

    def exchange(body: Any) -> None:
        t = body["tensors"]
        q, k = t["blk.0.attn_norm.weight"], t["blk.0.ffn_norm.weight"]
        q["origin"], k["origin"] = k["origin"], q["origin"]

    changed(manifest, exchange)
    r = verify_manifest(out, manifest)
    assert verdicts(r) == {"output": True, "tensors": True, "source": True, "recipes": False}
    assert [d.split(":")[0] for d in r.checks[-1].details] == ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"]


RECIPES: list[Any] = [
    {"op": "constant", "value": 0, "shape": [2**40], "type": "F32"},
    {"op": "constant", "value": 0, "shape": [1, 2**39], "type": "F32"},
    {"op": "constant", "value": 1e300, "shape": [18], "type": "F16"},
    {"op": "constant", "value": 0, "shape": [18], "type": "Q8_0"},
    {"op": "unheard-of"},
    {"op": "bytes", "file": "gpt2_v3.bin", "offset": 10**15, "shape": [18], "type": "F32"},
    {"op": "bytes", "file": "gpt2_v3.bin", "offset": -4, "shape": [18], "type": "F32"},
    {"op": "bytes", "file": "/etc/passwd", "offset": 0, "shape": [18], "type": "F32"},
    {"op": "bytes", "file": "gpt2_v3.bin", "offset": 0, "shape": [10**18, 10**18], "type": "F32"},
    {"op": "bytes", "file": "gpt2_v3.bin", "offset": 0, "shape": [18], "type": "Q8_0"},
    {"op": "cut", "rows": [0, 10**9], "of": {"op": "constant", "value": 0, "shape": [18], "type": "F32"}},
    {"op": "constant", "value": 0, "shape": [10**12, 10**12], "type": "F32"},
    {"op": "constant", "value": "x", "shape": [18], "type": "F32"},
    {"op": "permute", "head_dim": 0, "to": "half", "of": {"op": "constant", "value": 0, "shape": [18], "type": "F32"}},
    {"op": "cat", "of": []},
    {"op": "transpose", "of": {"op": "constant", "value": 0, "shape": [18], "type": "F32"}},
    {"op": "encode", "type": "IQ1_S", "of": {"op": "constant", "value": 0, "shape": [18], "type": "F32"}},
    {"op": ["bytes"]},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.filterwarnings("error")
def test_hostile_recipes_fail_without_a_traceback(triple: tuple[Path, Path, Path], recipe: Any) -> None:
    _, out, manifest = triple
    changed(manifest, lambda body: body["tensors"]["output_norm.bias"].update(origin=recipe))
    r = verify_manifest(out, manifest)
    assert not r.ok
    assert [d.split(":")[0] for d in r.checks[-1].details] == ["output_norm.bias"]


def test_a_recipe_that_was_removed_is_not_counted_as_followed(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    changed(manifest, lambda body: body["tensors"]["output_norm.bias"].update(origin={}))
    r = verify_manifest(out, manifest)
    assert "27 of 27" in r.checks[-1].says
    assert any("output_norm.bias" in note for note in r.notes)


def test_a_constant_that_no_memory_holds_is_not_made(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    recipe = {"op": "constant", "value": 0, "shape": [2**39], "type": "F32"}
    changed(manifest, lambda body: body["tensors"]["output_norm.bias"].update(origin=recipe, shape=[2**39]))
    assert not verify_manifest(out, manifest).ok


def test_names_that_no_file_can_have_are_not_there(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    changed(
        manifest, lambda body: body.update({k: [{"name": "a" * 999, "sha256": ""}] for k in ("sources", "outputs")})
    )
    assert not verify_manifest(out, manifest).ok


def test_a_deep_recipe_is_refused(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    recipe: Any = {"op": "constant", "value": 0, "shape": [18], "type": "F32"}
    for _ in range(200):
        recipe = {"op": "cut", "rows": [0, 18], "of": recipe}
    changed(manifest, lambda body: body["tensors"]["output_norm.bias"].update(origin=recipe))
    assert not verify_manifest(out, manifest).ok


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"manifest": 2}', '{"manifest": 1, "sources": [], "outputs": 5}', "[" * 10**5]
)
def test_files_that_are_no_manifest_are_refused(triple: tuple[Path, Path, Path], text: str) -> None:
    _, out, manifest = triple
    manifest.write_text(text)
    with pytest.raises(CkptError, match="manifest"):
        verify_manifest(out, manifest)


def test_command(triple: tuple[Path, Path, Path]) -> None:
    _, out, manifest = triple
    good = CliRunner().invoke(cli, ["verify", str(out), "--manifest", str(manifest)])
    assert good.exit_code == 0, good.output
    assert "follow from the source's bytes" in good.output
    raw = bytearray(out.read_bytes())
    raw[-20] ^= 1
    out.write_bytes(raw)
    bad = CliRunner().invoke(cli, ["verify", str(out), "--manifest", str(manifest), "--json"])
    assert bad.exit_code == 1
    assert json.loads(bad.output)["ok"] is False

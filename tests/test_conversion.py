"""What a conversion refuses, fills, drops and keeps; and what its report and manifest say."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.errors import FormatError, LossyError, OutputError, UnsupportedError
from ckptkit.formats.options import FLAGS, ReadOptions, WriteOptions


@pytest.fixture
def nanoeuler(fixtures_dir: Path) -> Path:
    return fixtures_dir / "trained" / "nanoeuler_main.bin"


def f32(path: Path, name: str) -> np.ndarray:
    with ckptkit.open(path) as ck:
        t = ck.tensors[name]
        return t.read().view("<f4").reshape(t.shape)


def test_padding_that_is_not_zero_is_never_dropped_in_silence(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "llmc" / "gpt2_v3_pad_rows.bin"
    with pytest.raises(LossyError) as e:
        ckptkit.convert(source, tmp_path / "out.gguf")
    assert "token_embd.padding" in str(e.value)
    assert not (tmp_path / "out.gguf").exists()
    report = ckptkit.convert(source, tmp_path / "out.gguf", drop=("token_embd.padding",))
    assert any("token_embd.padding" in line for line in report.done)
    ckptkit.convert(source, tmp_path / "same.bin")
    assert (tmp_path / "same.bin").read_bytes() == source.read_bytes()


def test_padding_rows_never_reach_logits(fixtures_dir: Path) -> None:
    """The padding rows are large enough to win every argmax if they leaked."""
    with (
        ckptkit.load(fixtures_dir / "llmc" / "gpt2_v3_pad_rows.bin") as a,
        ckptkit.load(fixtures_dir / "llmc" / "gpt2_v3.bin") as b,
    ):
        ids = [1, 2, 3, 4]
        assert a.forward(ids).shape == (4, 29)
        np.testing.assert_array_equal(a.forward(ids), b.forward(ids))


def test_mtp_heads_go_beside_and_come_back(nanoeuler: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out.gguf", tmp_path / "back.bin"
    report = ckptkit.convert(nanoeuler, out)
    assert [p.name for p in report.paths] == ["out.gguf", "out.mtp.safetensors"]
    ckptkit.convert(out, back)
    assert back.read_bytes() == nanoeuler.read_bytes()


def test_a_lost_sidecar_is_an_error_and_a_foreign_one_too(nanoeuler: Path, fixtures_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    ckptkit.convert(nanoeuler, out)
    side = tmp_path / "out.mtp.safetensors"
    kept = side.read_bytes()
    side.unlink()
    with pytest.raises(LossyError, match="prediction heads"):
        ckptkit.convert(out, tmp_path / "back.bin")
    ckptkit.convert(out, tmp_path / "small.bin", mtp="drop")
    with ckptkit.open(tmp_path / "small.bin") as ck:
        assert ck.config.n_mtp_head == 1
    ckptkit.convert(fixtures_dir / "nanoeuler" / "nanoeuler.bin", tmp_path / "other.gguf")
    (tmp_path / "other.mtp.safetensors").rename(side)
    with pytest.raises(FormatError, match="another model"):
        ckptkit.open(out)
    side.write_bytes(kept)
    ckptkit.open(out).close()


def test_mtp_drop_leaves_them_out_and_says_so(nanoeuler: Path, tmp_path: Path) -> None:
    report = ckptkit.convert(nanoeuler, tmp_path / "out.gguf", mtp="drop")
    assert [p.name for p in report.paths] == ["out.gguf"]
    assert any("2 extra prediction heads" in line for line in report.done)
    with pytest.raises(LossyError, match="no place") as e:
        ckptkit.convert(nanoeuler, tmp_path / "out")  # a directory has no place for them, nor anything beside it
    assert "--mtp drop" in str(e.value.hint)


def test_nanoeuler_as_qwen2_is_permuted_and_gives_the_same_logits(nanoeuler: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.gguf"
    report = ckptkit.convert(nanoeuler, out, arch="qwen2")
    assert any("half" in line for line in report.done)
    assert any("filled" in line for line in report.done)
    assert not f32(out, "blk.0.attn_q.bias").any()
    q, before = f32(out, "blk.1.attn_q.weight"), f32(nanoeuler, "blk.1.attn_q.weight")
    head = np.arange(16)
    np.testing.assert_array_equal(q[:16], before[np.concatenate([head[::2], head[1::2]])])
    ids = [82, 620, 69, 352, 315, 400]
    with ckptkit.load(nanoeuler) as a, ckptkit.load(out) as b:
        assert np.abs(a.forward(ids) - b.forward(ids)).max() < 1e-4
    ckptkit.convert(out, tmp_path / "back.bin", arch="llama")
    assert (tmp_path / "back.bin").read_bytes() == nanoeuler.read_bytes()


def test_other_widths_do_not_fit_llmc(nanoeuler: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no place for arch llama"):
        ckptkit.convert(nanoeuler, tmp_path / "x.bin", format="llmc")


def test_narrower_types_need_to_be_asked_for(fixtures_dir: Path, tmp_path: Path) -> None:
    """float32 values that bfloat16 rounds stay float32 by themselves; --type accepts the rounding and reports it."""
    source = fixtures_dir / "trained" / "gpt2_tiny.bin"
    ckptkit.convert(source, tmp_path / "a.gguf")
    assert ckptkit.convert(tmp_path / "a.gguf", tmp_path / "a.bin").version == "3"
    report = ckptkit.convert(source, tmp_path / "b.bin", type="bf16")
    assert report.version == "5"
    line = next(t for t in report.tensors if t.name == "token_embd.weight")
    exact = f32(source, "token_embd.weight")
    rounded = (exact.view(np.uint32) + 0x7FFF + ((exact.view(np.uint32) >> 16) & 1)) & 0xFFFF0000
    assert line.max_error == pytest.approx(np.abs(rounded.view(np.float32) - exact).max())


def test_a_type_the_format_lacks_is_refused_with_those_it_has(fixtures_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as e:
        ckptkit.convert(fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / "x.bin", type="q8_0")
    assert "f32, bf16" in str(e.value)


def test_half_overflow_is_refused_with_its_place(fixtures_dir: Path, tmp_path: Path) -> None:
    data = bytearray((fixtures_dir / "llmc" / "gpt2_v3.bin").read_bytes())
    data[1024 + 4 * 20 : 1024 + 4 * 21] = np.array(70000, "<f4").tobytes()
    source = tmp_path / "m.bin"
    source.write_bytes(data)
    with pytest.raises(LossyError) as e:
        ckptkit.convert(source, tmp_path / "x.gguf", type="f16")
    assert "token_embd.weight" in str(e.value)
    assert "m.bin" in str(e.value)
    assert "[1, 2]" in str(e.value)
    assert "70000" in str(e.value)
    assert list(tmp_path.glob("*.gguf*")) == []


def test_a_tokenizer_of_another_size_is_refused_with_both_numbers(fixtures_dir: Path, tmp_path: Path) -> None:
    other = fixtures_dir / "trained" / "gpt2_tiny_tokenizer.bin"
    with pytest.raises((UnsupportedError, FormatError)) as e:
        ckptkit.convert(fixtures_dir / "llmc" / "gpt2_v3.bin", tmp_path / "x.gguf", read=ReadOptions(tokenizer=other))
    assert "509" in str(e.value)
    assert "29" in str(e.value)


def test_metadata_is_complete(fixtures_dir: Path, nanoeuler: Path, tmp_path: Path) -> None:
    import gguf

    wanted = {
        "gpt2": ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
                 "attention.layer_norm_epsilon"),
        "llama": ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
                  "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base",
                  "rope.dimension_count"),
    }  # fmt: skip
    for source, arch in ((fixtures_dir / "trained" / "gpt2_tiny.bin", "gpt2"), (nanoeuler, "llama")):
        out = tmp_path / f"{arch}.gguf"
        ckptkit.convert(source, out, type="q8_0")
        fields = gguf.GGUFReader(out).fields
        for name in wanted[arch]:
            assert f"{arch}.{name}" in fields
        for name in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
            assert f"tokenizer.ggml.{name}" in fields
        assert fields["general.file_type"].contents() == 7
        assert fields["general.quantization_version"].contents() == 2


def test_a_manifest_lets_others_check_every_byte(fixtures_dir: Path, tmp_path: Path) -> None:
    source, out, manifest = fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / "o.gguf", tmp_path / "m.json"
    ckptkit.convert(source, out, manifest=manifest)
    body = json.loads(manifest.read_text())
    assert body["sources"][0]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert body["outputs"][0]["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    entry = body["tensors"]["position_embd.weight"]
    origin = entry["origin"]
    assert origin["op"] == "bytes"
    data = source.read_bytes()[origin["offset"] : origin["offset"] + 64 * 64 * 4]
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]


def test_memory_stays_bounded_whatever_the_size(tmp_path: Path) -> None:
    """A sparse file of more than 1 GiB converts in less than 400 MB of resident memory."""
    header = np.zeros(256, "<i4")
    n_embd, vocab, context, n_layer = 1024, 1000, 512, 22
    header[:8] = 20240326, 3, context, vocab, n_layer, 16, n_embd, 1024
    size = 1024 + 4 * (1024 * n_embd + context * n_embd + n_layer * (12 * n_embd**2 + 13 * n_embd) + 2 * n_embd)
    source = tmp_path / "big.bin"
    with source.open("wb") as f:
        f.write(header.tobytes())
        f.truncate(size)
    import subprocess
    import sys

    code = (
        "import re, sys, ckptkit; ckptkit.convert(sys.argv[1], sys.argv[2], force=True); "
        # ru_maxrss would begin with what the parent had when it forked
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "o.gguf")],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert size > 2**30
    assert int(done.stdout) < 400_000
    (tmp_path / "o.gguf").unlink()


def test_version_and_split_options_that_make_no_sense(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "trained" / "gpt2_tiny.bin"
    with pytest.raises(UnsupportedError, match="version"):
        ckptkit.convert(source, tmp_path / "x.bin", write=WriteOptions(version="9"))
    with pytest.raises(UnsupportedError, match="format"):
        ckptkit.convert(source, tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["x.bin", "folder"])
@pytest.mark.parametrize("given", [{"metadata": {"a": "b"}}, {"remove": ("a",)}, {"name": "a"}, {"write_output": True}])
def test_options_that_a_format_does_not_heed(given: dict, target: str, fixtures_dir: Path, tmp_path: Path) -> None:
    flag = FLAGS[next(iter(given))]
    with pytest.raises(UnsupportedError, match=flag) as refused:
        ckptkit.convert(fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / target, write=WriteOptions(**given))
    assert (refused.value.at, refused.value.expected) == (flag, "gguf")
    assert list(tmp_path.iterdir()) == []


def test_shards_and_heads_replace_nothing_unless_forced(fixtures_dir: Path, tmp_path: Path) -> None:
    trained = fixtures_dir / "trained"
    heads, shard = tmp_path / "m.mtp.safetensors", tmp_path / "g-00003-of-00006.gguf"
    split = WriteOptions(split_max_size=200_000)
    for source, out, there, write in (
        (trained / "nanoeuler_chat.bin", tmp_path / "m.gguf", heads, WriteOptions()),
        (trained / "gpt2_tiny.bin", tmp_path / "g.gguf", shard, split),
    ):
        there.write_bytes(b"precious")
        with pytest.raises(OutputError, match="exists already"):
            ckptkit.convert(source, out, write=write)
        assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"precious"]
        ckptkit.convert(source, out, write=write, force=True)
        assert there.read_bytes() != b"precious"
        for path in tmp_path.iterdir():
            path.unlink()


def test_shards_that_cannot_all_be_written_leave_none(fixtures_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "g-00003-of-00006.gguf").mkdir()  # an empty directory, which no file can replace
    split = WriteOptions(split_max_size=200_000)
    with pytest.raises(OutputError, match="00003"):
        ckptkit.convert(fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / "g.gguf", write=split)
    assert [p.name for p in tmp_path.iterdir()] == ["g-00003-of-00006.gguf"]


def test_files_are_named_by_text_or_path_from_python(fixtures_dir: Path, tmp_path: Path) -> None:
    trained = fixtures_dir / "trained"
    with ckptkit.open(str(trained / "nx_ours_qwen.gguf"), tokenizer=str(trained / "nx_ours_qwen_vocab.bin")) as ck:
        assert ck.tokenizer is not None
        assert ck.tokenizer.vocab_size == 28
    ckptkit.convert(str(trained / "gpt2_tiny.bin"), str(tmp_path / "m.gguf"), manifest=str(tmp_path / "m.json"))
    assert json.loads((tmp_path / "m.json").read_text())["outputs"]
    with pytest.raises(UnsupportedError, match="extra heads"):
        ckptkit.convert(trained / "nanoeuler_chat.bin", tmp_path / "n.gguf", mtp="beside")

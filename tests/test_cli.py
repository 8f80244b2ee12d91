"""The command line: help with an example, results on stdout, errors with their codes, nothing half-written."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from ckptkit.cli import cli
from ckptkit.runtime import DEVICES, PRECISIONS
from ckptkit.runtime.kv_cache import KV_TYPES
from ckptkit.runtime.perplexity_windows import MODES

ROOT = Path(__file__).resolve().parent.parent


def ckptkit(
    *args: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """The program as a user starts it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command = [sys.executable, "-m", "ckptkit", *map(os.fsencode, map(str, args))]
    return subprocess.run(command, capture_output=True, env=environment, cwd=cwd, check=False)


@pytest.fixture
def model(fixtures_dir: Path) -> Path:
    return fixtures_dir / "trained" / "gpt2_tiny.bin"


@pytest.mark.parametrize("name", [None, *cli.commands])
def test_help_has_an_example(name: str | None) -> None:
    result = CliRunner().invoke(cli, [*([name] if name else []), "-h"])
    assert result.exit_code == 0
    assert "Example:" in result.output
    assert f"ckptkit {name or ''}" in result.output


@pytest.mark.parametrize(
    "args", [["inspect"], ["convert", "a"], ["generate"], ["nothing"], ["inspect", "--bogus", "x"]]
)
def test_wrong_usage_is_exit_2(args: list[str]) -> None:
    done = ckptkit(*args)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_inspect_leaves_numba_alone_and_says_what_is_there(model: Path) -> None:
    code = (
        "import sys; from ckptkit.cli import cli; "
        "cli(['inspect', sys.argv[1], '--stats'], standalone_mode=False); print('numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.rstrip().endswith("False")
    assert "gpt2_tiny.bin  llmc version 3  arch gpt2" in done.stdout
    assert "509 (padded to 512)" in done.stdout


def test_inspect_json_has_the_figures(model: Path) -> None:
    body = json.loads(ckptkit("inspect", model, "--json", "--tensors", "--stats").stdout)
    assert body["format"] == "llmc"
    assert body["arch"] == "gpt2"
    assert body["config"]["n_layer"] == 4
    assert body["padded_vocab_size"] == 512
    rows = {row["name"]: row for row in body["tensors"]}
    data = np.fromfile(model, "<f4", 509 * 64, offset=1024)
    row = rows["token_embd.weight"]
    assert (row["shape"], row["offset"], row["bytes"], row["nan"]) == ([509, 64], 1024, 509 * 64 * 4, 0)
    assert row["min"] == pytest.approx(float(data.min()))
    assert row["max"] == pytest.approx(float(data.max()))
    assert row["mean"] == pytest.approx(float(data.mean(dtype=np.float64)))
    assert row["std"] == pytest.approx(float(data.std(dtype=np.float64)))
    # the second layer's first norm lies behind embeddings, positions and one layer's gains
    assert rows["blk.1.attn_norm.weight"]["offset"] == 1024 + 4 * (512 * 64 + 64 * 64 + 64)


def test_inspect_counts_what_is_not_a_number(fixtures_dir: Path, tmp_path: Path) -> None:
    data = bytearray((fixtures_dir / "llmc" / "gpt2_v3.bin").read_bytes())
    data[1024:1032] = np.array([np.nan, np.inf], "<f4").tobytes()
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    rows = json.loads(ckptkit("inspect", path, "--json", "--stats").stdout)["tensors"]
    assert (rows[0]["nan"], rows[0]["inf"]) == (1, 1)
    done = ckptkit("convert", path, tmp_path / "out.gguf")
    assert done.returncode == 5
    assert b"token_embd.weight" in done.stderr
    assert b"[0, 0]" in done.stderr
    assert not (tmp_path / "out.gguf").exists()
    assert ckptkit("convert", path, tmp_path / "out.gguf", "--allow-nonfinite").returncode == 0


def test_diffable_is_the_same_for_a_copy_elsewhere(model: Path, tmp_path: Path) -> None:
    for name in (model.name, "gpt2_tiny_tokenizer.bin"):
        (tmp_path / name).write_bytes((model.parent / name).read_bytes())
    args = ("--diffable", "--tensors")
    assert ckptkit("inspect", model, *args).stdout == ckptkit("inspect", tmp_path / model.name, *args).stdout


def test_inspect_key_prints_the_raw_value(fixtures_dir: Path) -> None:
    path = fixtures_dir / "gguf" / "gpt2.gguf"
    assert ckptkit("inspect", path, "--key", "general.architecture").stdout == b"gpt2\n"
    assert ckptkit("inspect", path, "--key", "gpt2.block_count").stdout == b"2\n"
    missing = ckptkit("inspect", path, "--key", "no.such")
    assert missing.returncode == 4
    assert b"no.such" in missing.stderr


def test_convert_there_and_back_by_the_program(model: Path, tmp_path: Path) -> None:
    done = ckptkit("convert", model, tmp_path / "a.gguf", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["source_format"], report["format"], report["arch"]) == ("llmc", "gguf", "gpt2")
    assert ckptkit("convert", tmp_path / "a.gguf", tmp_path / "b.bin").returncode == 0
    assert (tmp_path / "b.bin").read_bytes() == model.read_bytes()
    tokenizer = model.parent / "gpt2_tiny_tokenizer.bin"
    assert (tmp_path / "b_tokenizer.bin").read_bytes() == tokenizer.read_bytes()


def test_same_input_same_bytes(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert ckptkit("convert", model, tmp_path / name / "out.gguf", "--type", "q8_0").returncode == 0
    assert (tmp_path / "a" / "out.gguf").read_bytes() == (tmp_path / "b" / "out.gguf").read_bytes()


def test_outputs_are_never_replaced_without_force(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    done = ckptkit("convert", model, out)
    assert done.returncode == 6
    assert b"--force" in done.stderr
    assert out.read_bytes() == b"precious"
    assert ckptkit("convert", model, out, "--force").returncode == 0
    assert out.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("how", ["same", "symlink", "hardlink"])
def test_output_that_is_the_input_is_refused(how: str, model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "m.bin", tmp_path / "other.bin"
    source.write_bytes(model.read_bytes())
    if how == "same":
        out = tmp_path / "." / "m.bin"
    elif how == "symlink":
        out.symlink_to(source)
    else:
        out.hardlink_to(source)
    done = ckptkit("convert", source, out, "--force")
    assert done.returncode == 6
    assert b"same file" in done.stderr
    assert source.read_bytes() == model.read_bytes()


def test_missing_directory_is_said_before_anything_is_read(model: Path, tmp_path: Path) -> None:
    done = ckptkit("convert", model, tmp_path / "none" / "x.gguf")
    assert done.returncode == 6
    assert b"directory does not exist" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_an_error_with_its_number(model: Path) -> None:
    done = ckptkit("convert", model, "/dev/full", "--to", "gguf")
    assert done.returncode == 6
    assert b"No space left on device" in done.stderr
    assert b"errno 28" in done.stderr


def test_a_full_disk_leaves_nothing(model: Path, tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from ckptkit.cli import main; "
        "sys.argv = ['ckptkit', 'convert', *sys.argv[1:]]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(tmp_path / "x.gguf")],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 6
    assert b"x.gguf" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["модель 模型 🙂.bin", "a\nb.bin", os.fsdecode(b"\xff\xfe.bin")])
def test_any_file_name_works_even_in_the_c_locale(name: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(model.read_bytes())
    done = ckptkit("inspect", path, env={"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    path.write_bytes(model.read_bytes()[:5000])
    done = ckptkit("inspect", path, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr


def test_errors_have_file_offset_expected_got_and_hint(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.bin"
    path.write_bytes(model.read_bytes()[: 1024 + (948736 - 1024) // 2])
    done = ckptkit("inspect", path)
    assert done.returncode == 3
    text = done.stderr.decode()
    assert "half.bin" in text
    assert "at byte 1,024" in text
    assert "expected 948,736 bytes in all, got 474,880" in text
    assert "the size fits version 5, but the header says version 3" in text


def test_nothing_that_is_no_checkpoint_is_taken_for_one(tmp_path: Path) -> None:
    for name, data in {
        "empty": b"",
        "text.bin": b"hello world, this is text " * 99,
        "zip.bin": b"PK\3\4" + bytes(500),
    }.items():
        (tmp_path / name).write_bytes(data)
        done = ckptkit("inspect", tmp_path / name)
        assert done.returncode == 3, name
        assert b"Traceback" not in done.stderr
    assert ckptkit("inspect", tmp_path / "none").returncode == 3
    assert ckptkit("inspect", tmp_path).returncode in (3, 4)


def test_generate_json_has_stable_keys(model: Path) -> None:
    done = ckptkit("generate", model, "-p", "ROMEO:\nI will", "-n", "5", "--temp", "0", "--json")
    body = json.loads(done.stdout)
    assert body["prompt_ids"] == [49, 46, 44, 36, 46, 25, 198, 40, 384]
    assert body["ids"] == [304, 258, 261, 269, 83]
    assert body["text"] == " be a mist"
    assert body["stop_reason"] == "length"
    assert set(body["timings"]) >= {"prompt_tokens", "prompt_rate", "decode_tokens", "decode_rate"}


def test_special_text_in_a_prompt_is_ordinary_unless_asked(model: Path) -> None:
    plain = json.loads(ckptkit("tokenize", model, "a<|endoftext|>b", "--json").stdout)["ids"]
    special = json.loads(ckptkit("tokenize", model, "a<|endoftext|>b", "--special", "--json").stdout)["ids"]
    assert 508 not in plain
    assert len(plain) > 3
    assert special[1] == 508
    assert len(special) == 3


def test_tokenize_decodes(model: Path) -> None:
    assert ckptkit("tokenize", model, "--decode", "49,46,44,36,46").stdout == b"ROMEO\n"


def test_logits_file_holds_ids_and_all_positions(model: Path, fixtures_dir: Path, tmp_path: Path) -> None:
    z = np.load(fixtures_dir / "trained" / "gpt2_tiny_fp32.ref.npz")
    out = tmp_path / "l.npz"
    done = ckptkit("logits", model, "--ids", ",".join(map(str, z["prompt"])), "--out", out)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    assert found["ids"].tolist() == z["prompt"].tolist()
    assert found["logits"].dtype == np.float32
    assert np.abs(found["logits"] - z["prompt_logits"]).max() <= 2e-4


def test_ppl_full_is_llmc_validation_loss(model: Path) -> None:
    args = ("--text", model.parent / "gpt2_tiny_val.bin", "--mode", "full", "-c", "64", "--chunks", "40", "--json")
    body = json.loads(ckptkit("ppl", model, *args).stdout)
    assert body["nll"] == pytest.approx(2.6939102900302068, abs=1e-5)
    assert body["tokens"] == 2560
    assert set(body) >= {"mode", "tokens", "nll", "ppl", "stderr", "bits_per_byte", "precision"}


@pytest.mark.parametrize("text", ["", "a", "short text"])
def test_a_text_too_short_says_how_long_it_must_be(text: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(text)
    done = ckptkit("ppl", model, "--text", path)
    assert done.returncode != 0
    assert b"128" in done.stderr  # two windows of 64
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("threads", ["0", "-3", "100000"])
def test_impossible_thread_counts_are_clear(threads: str, model: Path) -> None:
    done = ckptkit("generate", model, "-p", "a", "-n", "1", "-t", threads)
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 2, 4)
    assert done.returncode == 0 or b"thread" in done.stderr


def test_messages_and_readme_name_options_that_there_are() -> None:
    known = {o for c in cli.commands.values() for p in (*c.params, *cli.params) for o in (*p.opts, *p.secondary_opts)}
    known |= {*cli.context_settings["help_option_names"]}
    texts = [(ROOT / "README.md", (ROOT / "README.md").read_text())]
    for path in (ROOT / "ckptkit").rglob("*.py"):
        tree = ast.parse(path.read_text())
        told = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        prose = {ast.get_docstring(n, clean=False) for n in told}
        strings = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        texts += [(path, text) for text in strings if text not in prose]
    named = {(path.name, option) for path, text in texts for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert len(named) > 50
    assert {(name, option) for name, option in named if option not in known} == set()


def test_choices_are_those_of_the_runtime() -> None:
    """They are listed twice so that help need not wait for the runtime."""
    options = [p for c in cli.commands.values() for p in c.params if isinstance(p.type, click.Choice)]
    found = {(p.name, tuple(p.type.choices)) for p in options}
    expected = {"device": (*DEVICES, "auto"), "precision": PRECISIONS, "mode": MODES}
    expected |= dict.fromkeys(("cache_type_k", "cache_type_v"), tuple(KV_TYPES))
    assert {(name, choices) for name, choices in found if name in expected} == set(expected.items())


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in cli.commands:
        assert f"ckptkit {name}" in readme


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("generate", "MODEL", "-f", "/none"), 2),
        (("generate", "MODEL", "--prompts", "/none"), 2),
        (("tokenize", "MODEL", "-f", "/none"), 2),
        (("verify", "MODEL", "MODEL", "-f", "/none"), 2),
        (("convert", "MODEL", "OUT", "--chat-template", "/none"), 2),
        (("convert", "MODEL", "OUT", "--manifest", "/none/m.json"), 6),
        (("convert", "MODEL", "OUT", "--type", "q9"), 4),
        (("convert", "MODEL", "OUT", "--set", "general.alignment=64"), 4),
        (("convert", "MODEL", "OUT", "--set", "split.count=3"), 4),
        (("convert", "MODEL", "OUT", "--remove", "no.such"), 4),
        (("convert", "MODEL", "OUT", "--arch", "gpt5"), 4),
        (("convert", "MODEL", "OUT", "--version", "2"), 4),
        (("convert", "MODEL", "OUT.safetensors", "--split-max-size", "200K"), 4),
        (("convert", "MODEL", "OUT", "--chat-template", "MODEL"), 2),
        (("convert", "MODEL", "OUT", "--ollama", "MODEL"), 6),
        (("check", "/none"), 3),
        (("verify", "MODEL", "MODEL", "--ids", ""), 4),
        (("generate", "MODEL", "--prompts", "/dev/null"), 4),
        (("generate", "MODEL", "-p", "a", "-s", "-2"), 4),
        (("generate", "MODEL", "-p", "a", "--logit-bias", "509+1"), 4),
        (("generate", "MODEL", "-p", "a", "--logit-bias", "5+nan"), 4),
        (("generate", "MODEL", "-p", "a", "--logit-bias", "5+inf"), 4),
        (("generate", "MODEL", "-p", "a", "--logit-bias", " -1+1"), 2),
    ],
)
def test_options_that_cannot_be_leave_nothing(args: tuple[str, ...], code: int, model: Path, tmp_path: Path) -> None:
    names = {"MODEL": str(model), "OUT": str(tmp_path / "out.gguf"), "OUT.safetensors": str(tmp_path / "o.safetensors")}
    done = ckptkit(*(names.get(a, a) for a in args))
    assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        ("ppl", "MODEL", "--text", "TEXT", "--html", "MODEL"),
        ("ppl", "MODEL", "--text", "TEXT", "--per-token", "TOKENIZER"),
        ("ppl", "MODEL", "--text", "TEXT", "--save-all-logits", "TEXT"),
        ("ppl", "MODEL", "--text", "TEXT", "--html", "NEW", "--per-token", "NEW"),
        ("logits", "MODEL", "--ids", "1", "--out", "TOKENIZER"),
        ("convert", "MODEL", "NEW", "--to", "gguf", "--manifest", "NEW"),
        ("convert", "MODEL", "NEW", "--to", "gguf", "--manifest", "TOKENIZER"),
    ],
)
def test_no_output_is_an_input_or_another_output(args: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    data = {"m.bin": model, "m_tokenizer.bin": model.with_name("gpt2_tiny_tokenizer.bin"), "t.txt": Path(__file__)}
    for name, source in data.items():
        (tmp_path / name).write_bytes(source.read_bytes())
    names = {"MODEL": "m.bin", "TOKENIZER": "m_tokenizer.bin", "TEXT": "t.txt", "NEW": "new"}
    done = ckptkit(*(str(tmp_path / names[a]) if a in names else a for a in args), "--force")
    assert done.returncode == 6, done.stderr
    assert b"same file" in done.stderr
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {n: p.read_bytes() for n, p in data.items()}


def test_seeds_and_biases_are_written_as_for_llama_cpp(model: Path) -> None:
    args = ("generate", model, "-p", "ROMEO:", "-n", "2", "--json")
    assert len(json.loads(ckptkit(*args, "-s", "-1").stdout)["ids"]) == 2
    forced = ckptkit(*args, "--logit-bias", "7+1e+3", "--logit-bias", "8+2e-3", "--logit-bias", "9-inf")
    assert json.loads(forced.stdout)["ids"] == [7, 7]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("generate M --prompts T -p a", "--prompt would not be heeded beside --prompts"),
        ("generate M --prompts T --chat", "--chat would not be heeded beside --prompts"),
        ("generate M -p a --chat -f T", "--file would not be heeded beside --chat"),
        ("generate M -p a --left-pad -c 9", "--ctx-size would not be heeded beside --left-pad"),
        ("generate M -p a -b 2", "--batch means nothing without --prompts"),
        ("generate M -p a --chat-input b", "--chat-input means nothing without --chat"),
        ("ppl M --hellaswag T --text T", "--text would not be heeded beside --hellaswag"),
        ("ppl M --kl-divergence-base T --html x --chunks 2", "--chunks, --html would not be heeded beside --kl-div"),
        ("ppl M --text T --tasks 2", "--tasks means nothing without --hellaswag"),
        ("verify M --state T -p a --no-logits", "--prompt, --logits/--no-logits would not be heeded beside --state"),
        ("verify M --manifest T -t 2", "--threads would not be heeded beside --manifest"),
        ("verify M M --source T", "--source means nothing without --manifest"),
        ("tokenize M --decode 1 --special", "--special would not be heeded beside --decode"),
        ("inspect M --key a --json", "--json would not be heeded beside --key"),
        ("check M --force", "--force means nothing without --fix"),
        ("convert M x --pure", "--pure means nothing without --type"),
    ],
)
def test_no_option_is_ignored_beside_others(args: str, said: str, model: Path) -> None:
    names = {"M": str(model), "T": __file__}
    result = CliRunner().invoke(cli, [names.get(a, a) for a in args.split()])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("name", "fact", "own"),
    [
        ("gpt2_tiny.bin", ("--heads", "8"), "4"),
        ("gpt2_tiny.bin", ("--context", "32"), "64"),
        ("gpt2_tiny.bin", ("--rope-base", "5"), "10000.0"),  # has no rotary positions
        ("gpt2_tiny.bin", ("--layout", "norms-last"), "in-place"),  # only version 2 has two
        ("nx_ours_qwen.gguf", ("--heads", "2"), "1"),
        ("nx_ours_qwen.gguf", ("--layout", "in-place"), ""),
        ("nanoeuler_chat.bin", ("--norm-eps", "0.5"), "1e-05"),
        ("microgpt_names.json", ("--context", "8"), "16"),
    ],
)
def test_facts_that_a_file_settles_are_not_ignored(
    name: str, fact: tuple[str, str], own: str, fixtures_dir: Path
) -> None:
    done = ckptkit("inspect", fixtures_dir / "trained" / name, *fact)
    assert done.returncode == 4
    assert fact[1].encode() in done.stderr
    assert f"expected {own}".encode() in done.stderr or not own
    if fact[0] != "--layout":  # what the file says anyway may be said
        assert ckptkit("inspect", fixtures_dir / "trained" / name, fact[0], own).returncode == 0


def test_facts_for_a_may_be_of_no_use_to_b(fixtures_dir: Path) -> None:
    a, b = (fixtures_dir / "trained" / name for name in ("microgpt_names.json", "gpt2_tiny.bin"))
    done = ckptkit("verify", a, b, "--heads", "4", "--norm-eps", "1e-5", "--no-logits")
    assert done.returncode == 1, done.stderr


def test_bench_takes_lists_as_llama_bench_does(model: Path) -> None:
    done = ckptkit("bench", model, "-p", "8,0", "-p", "4", "-n", "0", "-d", "0,2", "-r", "1", "-o", "json")
    assert [r["test"] for r in json.loads(done.stdout)["results"]] == ["pp8", "pp4", "pp8 @ d2", "pp4 @ d2"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("-p", "8,-1"), 2, "512"),
        (("-n", "8;9"), 2, "512"),
        (("-p", "0", "-n", "0"), 2, "nothing to measure"),
        ((), 4, "at most 64, got 512"),
        (("-p", "60", "-n", "0", "-d", "5"), 4, "at most 64, got 65"),
    ],
)
def test_what_bench_cannot_measure(args: tuple[str, ...], code: int, said: str, model: Path) -> None:
    done = ckptkit("bench", model, *args)
    assert done.returncode == code
    assert said in done.stderr.decode()


def printed_to(where: str, *args: object) -> subprocess.CompletedProcess[bytes]:
    """The program with its standard output sent there by a shell; its exit code is the shell's."""
    command = shlex.join([sys.executable, "-m", "ckptkit", *map(str, args)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-o", "pipefail", "-c", command + where], env=environment, capture_output=True)


@pytest.mark.parametrize("args", [("--key", "tokenizer.ggml.tokens"), ("--tensors",), ("--json",)])
def test_output_that_nobody_can_take(args: tuple[str, ...], fixtures_dir: Path) -> None:
    path = fixtures_dir / "gguf" / "gpt2.gguf"
    full = printed_to(" > /dev/full", "inspect", path, *args)
    assert full.returncode == 6
    assert b"No space left on device (errno 28)" in full.stderr
    closed = printed_to(" >&-", "inspect", path, *args)
    assert (closed.returncode, closed.stderr) == (0, b"")
    cut = printed_to(" | true", "inspect", path, *args)
    assert (cut.returncode, cut.stderr) == (141, b"")

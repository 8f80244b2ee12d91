"""The Modelfile: what `ollama create` needs, for base and chat models."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptkit.cli import cli


def run(*args: object):
    return CliRunner().invoke(cli, [*map(str, args)], catch_exceptions=True)


def test_a_chat_model_gets_its_template_and_stop(fixtures_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ollama"
    folder.mkdir()
    out = folder / "chat.gguf"
    result = run("convert", fixtures_dir / "trained" / "nanoeuler_chat.bin", out, "--ollama", folder)
    assert result.exit_code == 0, result.output
    assert "llama.cpp cannot cut words as nanoeuler does" in result.stdout
    lines = (folder / "Modelfile").read_text()
    assert lines.startswith("FROM ./chat.gguf\n")
    assert "PARAMETER num_ctx 144\n" in lines
    assert '### Instruction:\n{{ .Prompt }}\n\n### Response:\n"""' in lines
    assert 'PARAMETER stop "</s>"' in lines


def test_a_base_model_takes_the_prompt_as_it_is(fixtures_dir: Path, tmp_path: Path) -> None:
    result = run(
        "convert", fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / "m.gguf", "--ollama", tmp_path / "new"
    )
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "new" / "Modelfile").read_text()
    assert lines.startswith("FROM ../m.gguf\n")
    assert 'TEMPLATE """{{ .Prompt }}"""' in lines
    assert 'PARAMETER stop "<|endoftext|>"' in lines


def test_an_old_modelfile_is_not_replaced(fixtures_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("mine")
    result = run("convert", fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / "m.gguf", "--ollama", tmp_path)
    assert result.exit_code != 0
    assert (tmp_path / "Modelfile").read_text() == "mine"


@pytest.mark.parametrize("target", ["m.bin", "folder"])
def test_only_a_gguf_goes_to_ollama(target: str, fixtures_dir: Path, tmp_path: Path) -> None:
    result = run("convert", fixtures_dir / "trained" / "gpt2_tiny.bin", tmp_path / target, "--ollama", tmp_path / "o")
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []

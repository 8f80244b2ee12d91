"""Hand-made hostile files: one error that names the file and the place, no traceback, nothing half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptkit.cli import cli
from ckptkit.errors import CkptError, FormatError
from ckptkit.formats.tokenizer_files import read_tokenizer
from fixtures.writers import gguf


def refused(*args: object) -> CkptError:
    """The error that a command ends with; any other end is a failure."""
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert isinstance(result.exception, CkptError), result.exception or result.output
    assert result.exception.path is not None
    assert len(str(result.exception)) < 8000
    return result.exception


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


# -- errors


def test_a_message_stays_short_and_printable_whatever_the_file_says(tmp_path: Path) -> None:
    name = "\x1b[31m" + "a" * 100_000
    (tmp_path / "m.gguf").write_bytes(gguf.gguf([(name, gguf.U32, 1), (name, gguf.U32, 1)], {}))
    assert "\x1b" not in str(refused("inspect", tmp_path / "m.gguf"))


def test_a_byte_map_that_cannot_be_is_named(fixtures_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.bin").write_bytes(b"a" * 28)
    with pytest.raises(FormatError, match="same character") as e:
        read_tokenizer(tmp_path / "vocab.bin", 28)
    assert e.value.path == tmp_path / "vocab.bin"
    model = fixtures_dir / "nx" / "weights.npz"
    assert refused("inspect", model, "--tokenizer", tmp_path / "vocab.bin").path == tmp_path / "vocab.bin"


def test_what_a_vocabulary_cannot_spell_names_the_file(fixtures_dir: Path) -> None:
    model = fixtures_dir / "gguf" / "gpt2.gguf"
    assert refused("tokenize", model, "Hello").path == model
    assert refused("ppl", model, "--text", fixtures_dir / "SHA256SUMS").path == model

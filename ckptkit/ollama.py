"""A Modelfile for `ollama create` beside a converted GGUF."""

from __future__ import annotations

import os
from pathlib import Path

from . import formats
from .conversion import Options, Report
from .errors import OutputError, UnsupportedError
from .files import check_output, replacing
from .runtime.chat import ALPACA, STOP

NAME = "Modelfile"
# the instruction where Ollama puts the user's message
ALPACA_TEMPLATE = ALPACA.replace("{instruction}", "{{ .Prompt }}")


def modelfile(gguf: Path, folder: Path) -> str:
    """FROM, template, stop and context of a GGUF; the path in it is relative to `folder` where that is possible."""
    with formats.open(gguf) as ck:
        tokenizer, context = ck.tokenizer, ck.config.context_length
    try:
        where = Path(os.path.relpath(gguf.resolve(), folder.resolve()))
        source = f"./{where}" if not str(where).startswith("..") else str(where)
    except ValueError:  # another drive
        source = str(gguf.resolve())
    if any(c in source for c in '\n\r"'):
        raise UnsupportedError(
            "a Modelfile cannot hold this file name", path=gguf, hint="give the output a plainer name"
        )
    lines = [f"FROM {source}", f"PARAMETER num_ctx {context}"]
    if tokenizer is not None and tokenizer.kind == "nanoeuler-bpe":
        lines += [f'TEMPLATE """{ALPACA_TEMPLATE}"""', f'PARAMETER stop "{STOP}"']
    elif tokenizer is None or not tokenizer.chat_template:
        lines.append('TEMPLATE """{{ .Prompt }}"""')  # a base model: the prompt as it is
    if tokenizer is not None:
        for i in sorted(tokenizer.end_ids):
            text = tokenizer.token_bytes(i).decode("utf-8", "replace")
            if text.isprintable() and '"' not in text:
                lines.append(f'PARAMETER stop "{text}"')
    return "\n".join(lines) + "\n"


def check_target(target: Path, options: Options) -> None:
    """Refuse outputs that Ollama does not take, before anything is converted."""
    if target.suffix != ".gguf" or options.format not in ("", "gguf") or options.write.split_max_size:
        what = "shards" if options.write.split_max_size else options.format or target.name
        raise UnsupportedError(
            "Ollama takes a single GGUF file", at="--ollama", expected="an output NAME.gguf", got=what
        )


def check_folder(folder: Path, source: Path, force: bool) -> None:
    """Refuse a directory for the Modelfile that cannot be made, or that holds one already."""
    nearest = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise OutputError(
            "no Modelfile can be written there", path=folder, at="--ollama",
            expected="a directory that can be written to", got=nearest,
        )  # fmt: skip
    if folder.is_dir():
        check_output(folder / NAME, (source,), force)


def write_modelfile(report: Report, folder: Path, force: bool) -> Path:
    """Write `folder`/Modelfile for a conversion's GGUF; a model with a Jinja template leaves the template to Ollama."""
    gguf = next(p for p in report.paths if p.suffix == ".gguf")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OutputError(f"cannot be made: {e.strerror}", path=folder, at="--ollama") from e
    path = folder / NAME
    check_output(path, (gguf,), force)
    text = modelfile(gguf, folder)
    with replacing(path) as out:
        out.write(text.encode())
    return path

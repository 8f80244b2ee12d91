"""ckptkit tokenize."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .common import CONTEXT, PATH, TEXT_FILE, check_together, json_option, opened, reading, show, show_json
from .run import parse_ids


@click.command(context_settings=CONTEXT)
@click.argument("model", type=PATH)
@click.argument("text", required=False)
@click.option("-f", "--file", type=TEXT_FILE, help="Take the text from a file, as bytes.")
@click.option("--decode", callback=parse_ids, metavar="1,2,3", help="Turn ids into text instead.")
@click.option("--special", is_flag=True, help="Recognise special tokens in the text.")
@click.option("--add-special", is_flag=True, help="Add BOS and EOS as the model wants them.")
@json_option
@reading
def tokenize(
    model: Path, text: str | None, file: Path | None, decode: list[int] | None, special: bool, add_special: bool,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Show how a model cuts a text into tokens, or what ids stand for.

    \b
    Example:
      ckptkit tokenize model.gguf "Hello world"
      ckptkit tokenize model.gguf --decode 15496,995
    """
    check_together({"decode": ("special", "add_special")}, {})
    from ..errors import UnsupportedError, printable
    from ..report import table

    if sum(x is not None for x in (text, file, decode)) != 1:
        raise click.UsageError("give one of TEXT, -f FILE, --decode 1,2,3")
    with opened(model, given) as ck:
        tokenizer = ck.tokenizer
        if tokenizer is None:
            raise UnsupportedError("no tokenizer is known for this model", path=model, hint="give one with --tokenizer")
        if decode is not None:
            data = tokenizer.decode_bytes(decode)
            if as_json:
                show_json({"ids": decode, "text": data.decode("utf-8", "replace"), "bytes": data.hex()})
            else:
                sys.stdout.buffer.write(data + b"\n")
            return
        given_text: str | bytes = file.read_bytes() if file is not None else text or ""
        ids: list[int] = (
            tokenizer.encode_prompt(given_text, special) if add_special else tokenizer.encode(given_text, special)
        )
        pieces = [tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]
        if as_json:
            show_json({"ids": ids, "pieces": pieces, "notes": list(tokenizer.notes)})
            return
        show(table(("id", "piece"), [[i, printable(p).replace(" ", "␣")] for i, p in zip(ids, pieces, strict=True)]))
        show([f"{len(ids):,} tokens: {','.join(map(str, ids))}"])

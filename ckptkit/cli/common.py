"""Options that several commands share, and what they print with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
TEXT_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)  # read here, not by a format that says more
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _stack(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with stable keys.")

reading = _stack(
    click.option(
        "--from", "source_format", default="", metavar="FORMAT", help="Read as this format, whatever it looks like."
    ),
    click.option("--tokenizer", type=PATH, help="Tokenizer file (llm.c, Hugging Face, llama2.c, GGUF, or a byte map)."),
    click.option("--layout", default="", help="Tensor order where the header does not settle it (llm.c version 2)."),
    click.option("--rope-base", type=float, help="Rotary base, for files that do not say."),
    click.option("--norm-eps", type=float, help="Norm epsilon, for files that do not say."),
    click.option(
        "--context", "context_length", type=click.IntRange(1), help="Trained context, for files that do not say."
    ),
    click.option("--heads", "n_head", type=click.IntRange(1), help="Attention heads, for files that do not say."),
)
READING = ("tokenizer", "layout", "rope_base", "norm_eps", "context_length", "n_head")

hardware = _stack(
    click.option(
        "--device", type=click.Choice(["cpu", "cuda", "auto"]), default="auto", show_default=True,
        help="auto: the GPU where there is one that can be used.",
    ),
    click.option("-t", "--threads", type=int, help="CPU threads.  [default: all cores]"),
)  # fmt: skip
running = _stack(
    hardware,
    click.option(
        "-ctk", "--cache-type-k", type=click.Choice(["f32", "f16"]), default="f32", show_default=True,
        help="Type of the keys in the cache.",
    ),
    click.option(
        "-ctv", "--cache-type-v", type=click.Choice(["f32", "f16"]), default="f32", show_default=True,
        help="Type of the values in the cache.",
    ),
)  # fmt: skip
RUNNING = ("device", "threads", "cache_type_k", "cache_type_v")


def precision(default: str) -> Callable[[Command], Command]:
    """exact keeps activations in float32; fast may round them."""
    return click.option(
        "--precision", type=click.Choice(["exact", "fast"]), default=default, show_default=True,
        help="exact: activations stay float32. fast: they may be rounded where that is faster.",
    )  # fmt: skip


def check_together(excludes: Mapping[str, Sequence[str]], needs: Mapping[str, Sequence[str]]) -> None:
    """Refuse options of the running command that would not be heeded.

    `excludes`: parameter -> those that mean nothing beside it. `needs`: parameter -> those without which it does.
    """
    ctx = click.get_current_context()
    flags = {p.name: "/".join([max(p.opts, key=len), *p.secondary_opts]) for p in ctx.command.params if p.name}
    given = [name for name in flags if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
    for name in given:
        if lost := [flags[other] for other in excludes.get(name, ()) if other in given]:
            raise click.UsageError(f"{', '.join(lost)} would not be heeded beside {flags[name]}")
        if (wanted := needs.get(name, ())) and not any(other in given for other in wanted):
            raise click.UsageError(f"{flags[name]} means nothing without {' or '.join(flags[w] for w in wanted)}")


def read_options(given: dict[str, Any]) -> Any:
    """ReadOptions from a command's keyword arguments, which are taken out of `given`."""
    from ..formats.options import ReadOptions

    values = {name: given.pop(name) for name in READING}
    values["rope_theta"] = values.pop("rope_base")
    return ReadOptions(**values)


@contextmanager
def opened(path: Path, given: dict[str, Any]) -> Iterator[Any]:
    """An open checkpoint; takes the reading options out of `given`."""
    from .. import formats
    from ..errors import blaming

    options = read_options(given)
    with formats.open(path, given.pop("source_format"), options) as ck, blaming(path):  # found late
        yield ck


@contextmanager
def loaded(
    path: Path, given: dict[str, Any], context: int | Callable[[Any], int | None] | None = None
) -> Iterator[Any]:
    """A model ready to run; takes reading and running options out of `given`. `context` may depend on the config."""
    from ..runtime import load

    with opened(path, given) as ck:
        run = {name: given.pop(name) for name in RUNNING}
        context = context(ck.config) if callable(context) else context
        kinds = {"type_k": run["cache_type_k"], "type_v": run["cache_type_v"]}
        model = load(ck, run["device"], given.pop("precision"), run["threads"], context, message=say, **kinds)
        with model:
            yield model


def show(lines: list[str]) -> None:
    """Print lines to stdout; characters that its encoding lacks are escaped."""
    write("\n".join(lines) + "\n")


def write(text: str) -> None:
    """Print text as it is."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False)


def show_json(body: Any) -> None:
    """Print JSON; NaN and infinities, which JSON lacks, become null."""
    click.echo(json.dumps(finite(body), indent=2, ensure_ascii=True))


def finite(value: Any) -> Any:
    """The same value with None for every float that is no number."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


def say(message: str) -> None:
    """A line for people, on stderr."""
    click.echo(message, err=True)


@contextmanager
def progress(what: str, unit: str = "bytes") -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A bar on stderr where that is a terminal: call with the total, then with each step done."""
    if not sys.stderr.isatty():
        yield lambda _total: lambda _step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task(what, total=total)
            return lambda step: bar.advance(task, step)

        yield begin

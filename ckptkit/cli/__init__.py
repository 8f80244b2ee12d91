"""The command line: parsing, printing, exit codes. Results go to stdout, progress and timings to stderr."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import CkptError, OutputError, printable
from .check import check
from .common import CONTEXT
from .convert import convert
from .inspect import inspect
from .run import bench, generate, logits
from .score import ppl
from .tokenize import tokenize
from .verify import verify


class Commands(click.Group):
    """The commands; who stops reading what they print ends them as the signal would, which click makes a 1 of."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _forget_output()
            raise click.exceptions.Exit(141) from None


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="ckptkit")
@click.option("--traceback", is_flag=True, expose_value=False, help="Show where in the code an error arose.")
def cli() -> None:
    """Open, convert, verify and run checkpoints of hand-written language model trainers.

    \b
    Example:
      ckptkit inspect model.bin
      ckptkit convert model.bin model.gguf
      ckptkit generate model.gguf -p "Once upon a time"
    """
    # before numpy and most of our own modules, which every command imports when it runs
    gc.set_threshold(50_000)  # what they make is there to stay, and would be looked through for garbage many times
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, which nothing here uses, spin at every start


for command in (inspect, convert, verify, check, tokenize, generate, ppl, logits, bench):
    cli.add_command(command)


def main() -> None:
    """Run, and turn errors into one message and an exit code: errors.py, 130 after Ctrl-C, 70 for our own mistakes."""
    if sys.stdout is None:  # closed by who started the program
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        code = cli(standalone_mode=False, prog_name="ckptkit")
        if isinstance(code, int):  # click returns what a command passed to Exit
            sys.exit(code)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        sys.exit(130)
    except CkptError as e:
        if "--traceback" in sys.argv:
            raise
        _say(f"error: {e}")
        sys.exit(e.exit_code)
    except OSError as e:
        if "--traceback" in sys.argv:
            raise
        _say(f"error: {printable(e.filename or 'reading or printing')}: {e.strerror} (errno {e.errno})")
        _forget_output()
        sys.exit(OutputError.exit_code)
    except Exception as e:
        if "--traceback" in sys.argv:
            raise
        what = f"{type(e).__name__}: {printable(e)}"
        _say(f"error: internal, please report it: {what}\n  hint: ckptkit --traceback ... shows where")
        sys.exit(70)
    finally:
        gc.freeze()  # the process ends here: nothing is looked through once more on the way out


def _forget_output() -> None:
    """What is still to be printed goes nowhere, instead of failing once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    data = (message + "\n").encode(sys.stderr.encoding or "utf-8", "backslashreplace")
    sys.stderr.flush()
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()

"""`nestdata`: prepare a corpus, look at a plan or a batch."""

import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from nestdata import NestDataError

from .plan import plan_command
from .prepare import prepare_command
from .sample_batch import sample_batch

# Typer ships Click under a name of its own and exports the subclass alone.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])

app = typer.Typer(
    help="From manifests to batches of clean and noisy speech.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("prepare")(prepare_command)
app.command("plan")(plan_command)
app.add_typer(sample_batch, name="sample-batch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 is success, 1 a problem that the message explains, 2 wrong usage."""
    try:
        result = app(args=None if argv is None else list(argv), standalone_mode=False)
    except NestDataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def _one_line(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "nestdata"
    message = " ".join(error.format_message().split()).removesuffix(".")
    return f"{message}. See `{command} --help`."

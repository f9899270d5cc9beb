"""`nestmodel`: train a NEST model, and bring models in and out."""

import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from nestdata import NestDataError, last_error_line
from nestguard import GuardError
from nestmodel import NestModelError

from . import fit
from .arguments import UsageError
from .export_model import export_command
from .features import features_command
from .import_model import import_command
from .probe import probe_command

# Typer ships Click under a name of its own and exports the subclass alone.
_TyperUsageError = cast(type[Exception], typer.BadParameter.__mro__[1])
_LIGHTNING_COMMANDS = ("fit", "validate", "preflight")

app = typer.Typer(
    help="Train NEST models, and use them.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("fit")
def _fit() -> None:
    """Train (Lightning's command line: YAML, overrides by field path, --print_config)."""


@app.command("validate")
def _validate() -> None:
    """Score a checkpoint on the validation corpus (Lightning's command line)."""


@app.command("preflight")
def _preflight() -> None:
    """Check ranks, disks, audio, memory and network before a run, with the flags of fit."""


app.command("features")(features_command)
app.command("probe")(probe_command)
app.command("import")(import_command)
app.command("export")(export_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 is success, 1 a problem that the message explains, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] and arguments[0] in _LIGHTNING_COMMANDS:
            return fit.run(arguments)
        result = app(args=arguments, standalone_mode=False)
    except (NestDataError, NestModelError, GuardError) as error:
        return _fail(last_error_line(error), 1)
    except UsageError as error:
        return _fail(error, 2)
    except _TyperUsageError as error:
        return _fail(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    return result if isinstance(result, int) else 0


def _fail(message: object, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "nestmodel"
    message = " ".join(error.format_message().split()).removesuffix(".")
    return f"{message}. See `{command} --help`."

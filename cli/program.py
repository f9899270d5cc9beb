"""Runs the commands of `nestdata` and `nestmodel`: loads a command when it is called, and maps errors to exit codes.

A command line imports only the module of the command that it names, so that `--help` and `--version` need neither
torch nor Lhotse. Errors that a user can fix are printed as one line on stderr; all others keep their traceback. URLs in
them are shown without their secrets.
"""

import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, cast

import typer

DISTRIBUTION = "nest-pretrain"

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Typer's class for all wrong usage is not exported; its subclass is.
_TyperUsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


class UsageError(Exception):
    """The command line or a configuration file is invalid."""


@dataclass(frozen=True)
class Command:
    """One command, as the program's help shows it and before its module is imported."""

    target: str
    """`module:name` within this package: a function for Typer, a `typer.Typer` with subcommands, or, if Lightning
    parses the arguments, a function that takes them and returns the exit code."""

    help: str
    """One line for the program's help."""

    examples: tuple[str, ...] = ()
    """Command lines, which the help of the command shows."""

    is_lightning: bool = False
    """Whether Lightning parses the arguments."""

    def load(self) -> Any:
        """Imports the target."""
        module, name = self.target.split(":")
        return getattr(importlib.import_module(f".{module}", __package__), name)


@dataclass(frozen=True)
class Program:
    """A command-line program of several commands."""

    name: str
    help: str
    commands: Mapping[str, Command]

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Runs one command line, `sys.argv` by default.

        Returns:
            The exit code: 0 for success, 1 for a problem that the printed line explains, 2 for wrong usage, 130 after
            Ctrl-C. A command may return others.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        called = self.commands.get(arguments[0]) if arguments else None
        try:
            if called is not None and called.is_lightning:
                return _run_lightning(called, arguments)
            result = self._app(called)(args=arguments, prog_name=self.name, standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", EXIT_INTERRUPTED)
        except UsageError as error:
            return _fail(error, EXIT_USAGE)
        except _TyperUsageError as error:
            return _fail(self._usage_line(error), EXIT_USAGE)
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None and not (called and called.is_lightning):
                return _fail(f"{error.filename}: {error.strerror}. Check the path and its permissions.", EXIT_ERROR)
            if not _is_explained(error):
                sys.excepthook = _print_traceback
                raise
            return _fail(_message(error), EXIT_ERROR)
        if result == EXIT_INTERRUPTED:  # Typer turns Ctrl-C into this result.
            return _fail("interrupted", EXIT_INTERRUPTED)
        return result if isinstance(result, int) else 0

    def _app(self, called: Command | None) -> typer.Typer:
        """Returns a Typer application in which only the called command is loaded; the others only show their help."""
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.callback(help=self.help)(self._options())
        for name, command in self.commands.items():
            target = command.load() if command is called else _no_command
            # A short help that is given is not cut off to 45 characters.
            if isinstance(target, typer.Typer):
                app.add_typer(target, name=name, help=command.help, short_help=command.help)
            else:
                app.command(name, help=command.help, short_help=command.help)(target)
        return app

    def _options(self) -> Callable[..., None]:
        def show_version(is_set: bool) -> None:
            if is_set:
                print(f"{self.name} {importlib.metadata.version(DISTRIBUTION)}")
                raise typer.Exit

        option = typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")

        def options(version: Annotated[bool, option] = False) -> None:
            del version  # its callback has run

        return options

    def _usage_line(self, error: Any) -> str:
        command = error.ctx.command_path if error.ctx else self.name
        message = _one_line(error.format_message())
        return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{command} --help`."


def _run_lightning(command: Command, arguments: list[str]) -> int:
    """Runs a command whose arguments Lightning parses. Signals are handled even while torch is being imported."""
    from .dialect import HELP, translate

    if not {*HELP}.isdisjoint(arguments):
        from .short_help import short_help

        print(short_help(arguments[0], command.help, command.examples, arguments[1:]))
        return 0
    translated = translate(arguments)

    from nestmodel.training.startup import watch_startup

    with watch_startup():
        return cast(int, command.load()(translated))


def _no_command() -> None:
    """Placeholder for a command that is not called."""


def _is_explained(error: Exception) -> bool:
    # Imported only after an error, which keeps `--help` and `--version` fast.
    from nestdata import NestDataError
    from nestguard import GuardError
    from nestmodel import NestModelError

    # Lightning takes seconds to import: only a process that has imported it can have raised its error.
    lightning = sys.modules.get("lightning_fabric.utilities.exceptions")
    explained = () if lightning is None else (lightning.MisconfigurationException,)
    return isinstance(error, (NestDataError, NestModelError, GuardError, *explained))


def _message(error: Exception) -> str:
    """Returns the whole message of an error in one line, without the traceback that a loader worker adds."""
    from nestdata import last_error_line

    text = str(error)
    return _one_line(last_error_line(error) if "Traceback" in text or not text else text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fail(message: object, code: int) -> int:
    from nestdata import redacted

    print(f"error: {redacted(str(message))}", file=sys.stderr)
    return code


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error that nobody expected, in place of the interpreter: errors of libraries may quote URLs."""
    from nestdata import redacted

    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))

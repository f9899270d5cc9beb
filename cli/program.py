"""Runs the commands of `nestdata` and `nestmodel`: loads a command when it is called, and maps errors to exit codes.

A command line imports only the module of the command that it names, so that `--help` and `--version` need neither
torch nor Lhotse. Errors that a user can fix are printed as one line on stderr; all others keep their traceback. URLs in
them are shown without their secrets.
"""

import contextlib
import difflib
import errno
import importlib
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, cast

import typer

from .arguments.completion import COMPLETION_OPTIONS, TYPER_TAKES_SHELL, LightningCommand, completed_command
from .arguments.errors import UsageError
from .arguments.settings import short_option

DISTRIBUTION = "nest-pretrain"

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_WAIT_FOR_RANK_0_S = 10.0
"""Seconds that the other ranks leave to rank 0 to print a mistake that they have found as well."""

# Typer's class for all wrong usage is not exported; its subclass is.
_TyperUsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


@dataclass(frozen=True)
class Command:
    """One command, as the program's help shows it and before its module is imported."""

    target: str
    """`module:name` in `nestcli.commands`: a function for Typer, a `typer.Typer` with subcommands, or, if Lightning
    parses the arguments, a function that takes them and returns the exit code."""

    help: str
    """One line for the program's help."""

    examples: tuple[str, ...] = ()
    """Command lines, which the help of the command shows."""

    is_lightning: bool = False
    """Whether Lightning parses the arguments."""

    @property
    def epilog(self) -> str | None:
        """The examples as Typer shows them, without breaking lines."""
        return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in self.examples) if self.examples else None

    def load(self) -> Any:
        """Imports the target."""
        module, name = self.target.split(":")
        return getattr(importlib.import_module(f"{__package__}.commands.{module}"), name)


@dataclass(frozen=True)
class Program:
    """A command-line program of several commands."""

    name: str
    help: str
    commands: Mapping[str, Command]

    other_names: Mapping[str, str] = field(default_factory=dict)
    """Commands by names that they have in other tools."""

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Runs one command line, `sys.argv` by default.

        An empty one prints the help on stderr, as wrong usage.

        Returns:
            The exit code: 0 for success, 1 for a problem that the printed line explains, 2 for wrong usage or
            configuration, 130 after Ctrl-C. A command may return others.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        completed = completed_command(self.name)
        called = self.commands.get(completed or (arguments[0] if arguments else ""))
        try:
            if completed is None:
                if not arguments:
                    with contextlib.redirect_stdout(sys.stderr):
                        self.run(["--help"])
                    return EXIT_USAGE
                if called is None and not arguments[0].startswith("-"):
                    raise UsageError(self._unknown_command(arguments[0]))
                if called is not None and called.is_lightning:
                    return _run_lightning(called, arguments)
                if arguments[0] in COMPLETION_OPTIONS and len(arguments) == 2:
                    os.environ[TYPER_TAKES_SHELL] = "1"
            result = self._app(called)(args=arguments, prog_name=self.name, standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", EXIT_INTERRUPTED)
        except _TyperUsageError as error:
            return _fail(self._usage_line(error), EXIT_USAGE)
        except Exception as error:
            if _is_left_to_rank_0(error):
                time.sleep(_WAIT_FOR_RANK_0_S)  # launchers end all ranks when one has failed
                return EXIT_USAGE
            if _is_usage(error):
                return _fail(_message(error), EXIT_USAGE)
            if isinstance(error, OSError) and _is_of_a_users_file(error):
                return _fail(_file_message(error), EXIT_ERROR)
            if not _is_explained(error):
                sys.excepthook = _print_traceback
                raise
            return _fail(_message(error), EXIT_ERROR)
        if result == EXIT_INTERRUPTED:  # Typer turns Ctrl-C into this result.
            return _fail("interrupted", EXIT_INTERRUPTED)
        return result if isinstance(result, int) else 0

    def _app(self, called: Command | None) -> typer.Typer:
        """Returns a Typer application in which only the called command is loaded; the others only show their help."""
        app = typer.Typer(
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": short_option},
        )
        app.callback(help=self.help)(self._options())
        for name, command in self.commands.items():
            target = command.load() if command is called and not command.is_lightning else _no_command
            # A short help that is given is not cut off to 45 characters.
            about: dict[str, Any] = {"name": name, "help": command.help, "short_help": command.help}
            about["epilog"] = command.epilog
            if isinstance(target, typer.Typer):
                for subcommand in target.registered_commands:
                    subcommand.epilog = command.epilog
                app.add_typer(target, **about)
            elif command.is_lightning:
                # Completion sees all words of the line as arguments.
                anything = {"ignore_unknown_options": True, "allow_extra_args": True}
                app.command(**about, cls=LightningCommand, context_settings=anything)(target)
            else:
                app.command(**about)(target)
        return app

    def _unknown_command(self, name: str) -> str:
        names = {**{command: command for command in self.commands}, **self.other_names}
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean '{names[near[0]]}'?" if near else ""
        return f"No such command '{name}'.{hint} See `{self.name} --help`."

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
        message = _one_line(error.format_message()).replace(": Value error, ", ": ")  # words of the library
        return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{command} --help`."


def _run_lightning(command: Command, arguments: list[str]) -> int:
    """Runs a command whose arguments Lightning parses. Signals are handled even while torch is being imported.

    Until the ranks connect to each other, every rank finds the same mistakes of usage and configuration: rank 0 alone
    prints them.
    """
    from .arguments.dialect import HELP, translate

    if not {*HELP}.isdisjoint(arguments):
        from .arguments.short_help import short_help

        print(short_help(arguments[0], command.help, command.examples, arguments[1:]))
        return 0

    from nestmodel.training.starting.origin import is_first_rank
    from nestmodel.training.starting.startup import watch_startup

    is_starting = True
    try:
        translated = translate(arguments)
        with watch_startup() as watch:
            try:
                return cast(int, command.load()(translated))
            finally:
                is_starting = watch.is_active
    except Exception as error:
        if not (_is_usage(error) and is_starting and not is_first_rank()) or _is_left_to_rank_0(error):
            raise
        message = _message(error)
    # Launchers end all ranks when one has failed: rank 0 may not have come to this error yet. Those that do not end
    # them need the line of a rank that alone has the mistake.
    time.sleep(_WAIT_FOR_RANK_0_S)
    print(f"another rank than the first: {message}", file=sys.stderr)
    return EXIT_USAGE


def _no_command() -> None:
    """Placeholder for a command that is not called."""


def _is_usage(error: Exception) -> bool:
    """Returns whether an error is a mistake of usage or configuration, which a second try would only repeat."""
    # Imported only after an error, which keeps `--help` and `--version` fast.
    from nestdata import ConfigError
    from nestguard import GuardError

    # Lightning takes seconds to import: only a process that has imported it can have raised its error.
    lightning = sys.modules.get("lightning_fabric.utilities.exceptions")
    refused = () if lightning is None else (lightning.MisconfigurationException,)
    return isinstance(error, (UsageError, ConfigError, GuardError, *refused))


def _is_left_to_rank_0(error: Exception) -> bool:
    """Returns whether an error is one that every rank finds, and this process is not the first rank."""
    from nestmodel.errors import LaunchError
    from nestmodel.training.starting.origin import is_first_rank

    return isinstance(error, LaunchError) and not is_first_rank()


def _is_explained(error: Exception) -> bool:
    from nestdata import NestError

    return isinstance(error, NestError)


def _is_of_a_users_file(error: OSError) -> bool:
    """Returns whether a system error names a file, and none of the system or the installation.

    A file that is missing there is a bug, or a broken installation: its traceback says more.
    """
    if not isinstance(error.filename, str | bytes):
        return False
    folders = ("/proc", "/sys", sys.prefix, sys.base_prefix, Path(__file__).parent)
    return not any(Path(os.fsdecode(error.filename)).is_relative_to(folder) for folder in folders)


def _file_message(error: OSError) -> str:
    from nestdata.output import is_full_disk

    is_full = is_full_disk(error) and error.errno != errno.EROFS
    advice = "Make space, or write to another disk." if is_full else "Check the path and its permissions."
    return f"{os.fsdecode(error.filename)}: {error.strerror}. {advice}"


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

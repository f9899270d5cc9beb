"""Runs the commands of `nestdata` and `nestmodel`: loads a command when it is called, and maps errors to exit codes.

A command line imports only the module of the command that it names, so that `--help` and `--version` need neither
torch nor Lhotse. Errors that a user can fix are printed as one line on stderr, below what tyro says about a command
line; all others keep their traceback. URLs in them are shown without their secrets.
"""

import difflib
import errno
import importlib
import importlib.metadata
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from nestmodel.training.ranks import EXIT_INTERRUPTED, is_first_rank, leave_on_signals

from .parsing import UsageError, parse, print_completion

DISTRIBUTION = "nest-pretrain"

EXIT_ERROR = 1
EXIT_USAGE = 2

_COMPLETION = "--print-completion"
_KILLED_WORKER = re.compile(r"DataLoader worker .* is killed by signal: Killed")
_WAIT_FOR_RANK_0_S = 10.0
"""Seconds that the other ranks wait, so that rank 0 can print a mistake that all ranks have found."""


@dataclass(frozen=True)
class Command:
    """One command, as the program's help shows it and before its module is imported."""

    target: str
    """`module:name` in `nestcli.commands`: a function whose parameters are the options."""

    help: str
    """One line for the program's help."""

    examples: tuple[str, ...] = ()
    """Command lines, which the help of the command shows."""

    reads: Literal["run", "data"] | None = None
    """Which settings of its configurations are defaults of its options: all settings of a run, or only its data."""

    starts_ranks: bool = False
    """Whether its process may be one of several ranks, and ends on signals with the exit codes of a run."""

    @property
    def about(self) -> str:
        """What the command does, with its examples."""
        return "\n".join([self.help, "", "Examples:", *(f"  {line}" for line in self.examples)])

    def load(self) -> Callable[..., Any]:
        """Imports and returns the target."""
        module, name = self.target.split(":")
        target: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.commands.{module}"), name)
        return target

    def defaults(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Returns the defaults of its parameters: from the configurations in a command line, or else as in its help."""
        if self.reads is None:
            return {}
        from nestmodel.run_config import RunConfig, read_data

        names = config_names(arguments)
        if self.reads == "run":
            return {"run": RunConfig.read(names or ["small"])}
        data, seed = read_data(names)
        return {"data": data, "corpora": data.corpora, "plan": data.plan, "seed": seed}


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
        if argv is None:
            _complete_standard_streams()
        words = list(sys.argv[1:] if argv is None else argv)
        return exit_code_of(lambda: self._run(words))

    def _run(self, words: list[str]) -> Any:
        if not words or words[0] in ("-h", "--help"):
            print(self._overview(), file=sys.stdout if words else sys.stderr)
            return 0 if words else EXIT_USAGE
        if words == ["--version"]:
            print(f"{self.name} {importlib.metadata.version(DISTRIBUTION)}")
            return 0
        if words[0] == _COMPLETION:
            commands = {name: (command.load(), command.defaults([])) for name, command in self.commands.items()}
            return print_completion(commands, self.name, language=words[1] if len(words) > 1 else "bash")
        name = next((name for name in self.commands if words[: name.count(" ") + 1] == name.split()), None)
        if name is None:
            raise UsageError(self._unknown_command(" ".join(words[:2])))
        command, arguments = self.commands[name], words[name.count(" ") + 1 :]
        if command.starts_ranks:
            leave_on_signals()
        defaults = command.defaults(arguments)
        return parse(command.load(), defaults, arguments, prog=f"{self.name} {name}", about=command.about)

    def _overview(self) -> str:
        width = max(map(len, self.commands)) + 2
        return "\n".join(
            [
                f"usage: {self.name} COMMAND [OPTIONS]",
                "",
                self.help,
                "",
                "commands:",
                *(f"  {name:{width}}{command.help}" for name, command in self.commands.items()),
                "",
                "options:",
                f"  {'-h, --help':{width}}Show this, or the options of a command.",
                f"  {'--version':{width}}Show the version.",
                f"  {_COMPLETION} SHELL: print a script for bash, zsh or tcsh that completes command lines.",
            ]
        )

    def _unknown_command(self, typed: str) -> str:
        name = typed.split()[0]
        names = {**{command: command for command in self.commands}, **self.other_names}
        near = difflib.get_close_matches(typed, names, n=1) or difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean '{names[near[0]]}'?" if near else ""
        return f"No such command '{name}'.{hint} See `{self.name} --help`."


def _complete_standard_streams() -> None:
    """Makes every text printable, and opens streams that are closed, as by `>&-`; what they are given is dropped.

    Otherwise, the first files that are opened would get their numbers, and be written to by what libraries print.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def config_names(arguments: Sequence[str]) -> list[str]:
    """Returns the values of `--config` in a command line, which decide the defaults of its other options."""
    names = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before in ("-c", "--config") and not word.startswith("-"):
            names.append(word)
        elif word.startswith("--config="):
            names.append(word.partition("=")[2])
        elif word.startswith("-c") and len(word) > 2:
            names.append(word[2:].removeprefix("="))
    return names


def exit_code_of(action: Callable[[], Any]) -> int:
    """Runs what a process was started for, prints an error that ends it, and returns the exit code."""
    try:
        result = action()
        sys.stdout.flush()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        return _fail(end.code, EXIT_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # of `| head`
        _drop_output()
        return EXIT_ERROR
    except Exception as error:
        if _is_usage(error):
            return _fail_as_rank(error)
        if isinstance(error, OSError) and _is_of_a_users_file(error):
            return _fail(_file_message(error), EXIT_ERROR)
        if (cause := _known_cause(error)) is not None:
            return _fail(cause, EXIT_ERROR)
        from nestdata import NestError

        if not isinstance(error, NestError):
            sys.excepthook = _print_traceback
            raise
        return _fail(_message(error), EXIT_ERROR)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Drops what is printed from now on, and what is still in the buffer of stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_usage(error: Exception) -> bool:
    """Returns whether an error is a mistake of usage or configuration, which a second try would only repeat."""
    # Imported only after an error, which keeps `--help` and `--version` fast.
    from nestdata import ConfigError
    from nestguard import GuardError

    # Lightning takes seconds to import: only a process that has imported it can have raised its error.
    lightning = sys.modules.get("lightning_fabric.utilities.exceptions")
    refused = () if lightning is None else (lightning.MisconfigurationException,)
    return isinstance(error, (UsageError, ConfigError, GuardError, *refused))


def _fail_as_rank(error: Exception) -> int:
    """Prints a mistake of usage, and returns the exit code.

    Usually, all ranks find the same mistake and rank 0 prints it: launchers end all ranks when one has failed. If
    another rank still runs after a while, rank 0 has not found the mistake, and that rank prints it.
    """
    message = _message(error)
    if not is_first_rank():
        time.sleep(_WAIT_FOR_RANK_0_S)
        message = f"another rank than the first: {message}"
    if isinstance(error, UsageError):
        sys.stderr.write(error.explanation)
    return _fail(message, EXIT_USAGE)


def _known_cause(error: Exception) -> str | None:
    """Returns what has happened and what to do for errors of libraries with a well-known cause; None for others."""
    text = _one_line(str(error))
    if "EADDRINUSE" in text:
        port = os.environ.get("MASTER_PORT", "of node 0")
        return (
            f"port {port} is in use, by another run or by one that has just ended. Set MASTER_PORT to another number."
        )
    if _KILLED_WORKER.search(text):
        return (
            f"{text} Something outside of the run has ended a loader worker, most often the system because memory ran "
            "out. Lower --num-workers, or run on a machine with more memory."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        _drop_output()
        return (
            f"{error.strerror}. Make space where the output goes, where it is printed to, and in the folder for "
            "temporary files (TMPDIR), and run the command again."
        )
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory was deleted. Change to one that exists."
    return None


def _is_of_a_users_file(error: OSError) -> bool:
    """Returns whether a system error names a file that belongs to neither the system nor the installation.

    An error of another file is a bug, or a broken installation: its traceback says more.
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
    """Prints an unexpected error as the interpreter would, but without secrets in URLs, which libraries may quote."""
    from nestdata import redacted

    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))

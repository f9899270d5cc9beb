"""What a shell may insert: options, keys and presets. File names are left to the shell.

Typer's scripts ask the program, which answers with names of its own only: nothing that was typed is sent back, so that
no file name reaches a shell from here.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from .keys import keys
from .settings import Setting, settings_of

COMPLETION_OPTIONS = ("--install-completion", "--show-completion")

TYPER_TAKES_SHELL = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""Variable with which Typer takes the name of a shell after these options. Otherwise it ignores a name that is given,
and looks for a shell among the parents of the process."""

_VALUES = {
    "accelerator": ("cpu", "gpu"),
    "log": ("csv", "mlflow", "tensorboard", "wandb"),
    "precision": ("16-mixed", "32-true", "bf16-mixed"),
}
_HELP = {"--help": "Show the options.", "--help-all": "Show all settings.", "--print-config": "Print all settings."}


@dataclass(frozen=True)
class Candidate:
    """One completion, with the attributes that Typer reads."""

    value: str
    help: str = ""
    type: str = "plain"


def complete_presets(incomplete: str) -> list[str]:
    """Returns the presets that begin with a text."""
    from nestmodel import preset_names
    from nestmodel.config import LIVE_PRESETS

    return [name for name in (*preset_names(), *LIVE_PRESETS) if name.startswith(incomplete)]


def completed_command(program: str) -> str | None:
    """Returns the command whose line a shell completes, "" if there is none yet; None if no shell asks for anything."""
    if not os.environ.get(f"_{program.upper()}_COMPLETE"):
        return None
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()
    return words[1] if len(words) > 1 else ""


class LightningCommand(TyperCommand):
    """Completes the options of a command that jsonargparse parses."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Returns the completions of a word; none lets the shell complete file names."""
        return complete(self.name or "", ctx.args, incomplete)


def complete(command: str, words: Sequence[str], incomplete: str) -> list[Candidate]:
    """Returns the completions of a word of `fit`, `validate` or `preflight`.

    Args:
        command: One of `fit`, `validate` and `preflight`.
        words: The words between the command and the one to complete.
        incomplete: What has been typed of the word.
    """
    settings = {setting.flag: setting for setting in settings_of(command)}
    flags = {**settings, **{f"-{setting.letter}": setting for setting in settings.values() if setting.letter}}
    # Bash makes a word of its own of the sign in --option=value.
    before = [word for word in words[-2:] if word != "="][-1:]
    setting = flags.get(before[0]) if before else None
    if setting is not None and setting.kind != "switch":
        return [Candidate(value) for value in _values(setting, incomplete)]
    if not incomplete.startswith("-"):
        return []
    options = {flag: setting.help for flag, setting in settings.items() if flag.startswith("--")} | _HELP
    if len(incomplete) > 2:  # All keys would be too many.
        options |= {_spelled(f"--{key}", incomplete): "" for key in keys() if "." in key}
    return [Candidate(option, text) for option, text in options.items() if option.startswith(incomplete)]


def _values(setting: Setting, incomplete: str) -> list[str]:
    if setting.key == "config":
        return complete_presets(incomplete)
    return [value for value in _VALUES.get(setting.option, ()) if value.startswith(incomplete)]


def _spelled(option: str, incomplete: str) -> str:
    """Returns a dotted option with dashes if the typed part has dashes."""
    return f"--{option[2:].replace('_', '-')}" if "-" in incomplete[2:] else option

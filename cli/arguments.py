"""Arguments of the commands that Lightning's command line parses: presets by name, and one-line usage errors."""

import re
from typing import Any, NoReturn

from pytorch_lightning.cli import LightningArgumentParser

from .program import UsageError
from .run_config import config_path, nearest_hint, read_config

SEEDS = ("data.plan.seed", "model.config.seed")
"""Settings that follow from `--seed_everything`."""

_SWITCHES = ("--json", "--find_budget", "--tune")
_HYPHENATED = {
    f"--{name.replace('_', '-')}": f"--{name}"
    for name in (
        "feeding_seconds",
        "find_budget",
        "memory_limit",
        "memory_margin",
        "price_per_1000_requests",
        "price_per_gb",
        "store_seconds",
    )
}
_CONFIG_FLAGS = ("--config", "-c")


class Parser(LightningArgumentParser):
    """Reports wrong usage as an exception with a one-line message."""

    command = ""
    """The command of `nestmodel` that is being parsed."""

    def error(self, message: str, *_: Any) -> NoReturn:
        """Raises the error of jsonargparse, with the nearest option for an unknown one.

        Raises:
            UsageError: Always.
        """
        line = " ".join(str(message).split())
        if line.startswith("the following arguments are required"):
            line = line.replace(f" {self.command}.", " ")
            raise UsageError(f"{line}. See `nestmodel {self.command} --help`.")
        options = {option.lstrip("-") for parser in self._all_parsers() for option in parser._option_string_actions}
        known = options.difference(SEEDS)
        for name in re.findall(r"[\w.]*\.\w+", line):
            if name not in known:
                line += nearest_hint(name, known)
        raise UsageError(f"{line.removesuffix('.')}. See `nestmodel {self.command} --help`.")

    def _all_parsers(self) -> list[Any]:
        choices = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        return [self, *(parser for choice in choices for parser in choice.values())]


def with_preset_paths(arguments: list[str]) -> list[str]:
    """Returns the arguments with preset names after `--config` replaced by paths.

    Raises:
        ConfigError: A name is neither a file nor a preset.
        UsageError: A file is not a YAML mapping.
    """
    resolved = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        if before in _CONFIG_FLAGS:
            resolved.append(_checked_path(argument))
        elif equals and flag in _CONFIG_FLAGS:
            resolved.append(f"{flag}={_checked_path(value)}")
        else:
            resolved.append(argument)
    return resolved


def with_explicit_booleans(arguments: list[str]) -> list[str]:
    """Returns the arguments with `--json` as `--json=true`: jsonargparse expects a value, other commands take none.

    The same holds for the other switches of preflight, whose flags may also be written with hyphens.
    """
    spelled = [_with_underscores(argument) for argument in arguments]
    followers = [*spelled[1:], ""]
    return [
        f"{argument}=true" if argument in _SWITCHES and follower.lower() not in ("true", "false") else argument
        for argument, follower in zip(spelled, followers, strict=True)
    ]


def _with_underscores(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return f"{_HYPHENATED[flag]}{equals}{value}" if flag in _HYPHENATED else argument


def _checked_path(name: str) -> str:
    path = config_path(name)
    read_config(path)
    return str(path)

"""What Lightning's command line reads: its arguments, presets by name, and one line where they are wrong."""

import difflib
import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pytorch_lightning.cli import LightningArgumentParser

from nestmodel import preset_path

# Both follow from --seed_everything.
SEEDS = ("data.plan.seed", "model.config.seed")
_CONFIG_FLAGS = ("--config", "-c")


class UsageError(Exception):
    """The command line or a configuration file asks for something that does not exist."""


class Parser(LightningArgumentParser):
    """Reports wrong usage in one line, and leaves the exit to the command."""

    command = ""
    """What of `nestmodel` is being parsed."""

    def error(self, message: str, *_: Any) -> NoReturn:
        """Raises what is wrong, with the nearest option where one is unknown.

        Raises:
            UsageError: Always.
        """
        line = " ".join(str(message).split())
        options = {option.lstrip("-") for parser in self._all_parsers() for option in parser._option_string_actions}
        known = options.difference(SEEDS)
        for name in re.findall(r"[\w.]*\.\w+", line):
            if name not in known and (near := difflib.get_close_matches(name, sorted(known), n=1)):
                line += f"; the nearest is '{near[0]}'"
        raise UsageError(f"{line.removesuffix('.')}. See `nestmodel {self.command} --help`.")

    def _all_parsers(self) -> list[Any]:
        choices = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        return [self, *(parser for choice in choices for parser in choice.values())]


def with_preset_paths(arguments: list[str]) -> list[str]:
    """Lets `--config demo` name a preset that ships with the package, and checks that each file is YAML."""
    resolved = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        if before in _CONFIG_FLAGS:
            resolved.append(_config_path(argument))
        elif equals and flag in _CONFIG_FLAGS:
            resolved.append(f"{flag}={_config_path(value)}")
        else:
            resolved.append(argument)
    return resolved


def _config_path(name: str) -> str:
    path = Path(name) if Path(name).is_file() else preset_path(name)
    try:
        yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())}). Fix the file.") from error
    return str(path)

"""The short help of `fit`, `validate` and `preflight`: one line for each setting that people set."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .dialect import config_names
from .run_config import config_path, read_merged
from .settings import GROUPS, Setting, settings_of

_COLUMN = 30
"""Where descriptions begin."""

_HELP = {
    "-h, --help": "Show this; with --config, its values in brackets.",
    "--help-all": "Show all settings: --section.key VALUE for each.",
    "--print-config": "Print all settings of the run as YAML, and exit.",
}


def short_help(command: str, about: str, examples: Sequence[str], arguments: Sequence[str]) -> str:
    """Returns the help of a command, with the values of the configuration files that the arguments name.

    Args:
        command: One of `fit`, `validate` and `preflight`.
        about: What the command does.
        examples: Command lines.
        arguments: The command line after the command.

    Raises:
        ConfigError: A name after `--config` is neither a file nor a preset.
        UsageError: A configuration file cannot be read.
    """
    settings = settings_of(command)
    names = config_names(arguments)
    content = read_merged(map(config_path, names))
    lines = [f"Usage: nestmodel {command} CORPUS... --config NAME [OPTIONS]", "", *_wrapped(about), ""]
    for group in GROUPS:
        shown = [setting for setting in settings if setting.group == group and not setting.is_rare]
        lines += [f"{group}:", *(_line(setting, content, has_config=bool(names)) for setting in shown)] if shown else []
    rare = ", ".join(setting.flag for setting in settings if setting.is_rare)
    lines += _wrapped(f"Also {rare}: see `nestdata plan --help`.")
    lines += ["Help:", *(f"  {option:{_COLUMN - 2}}{text}" for option, text in _HELP.items())]
    lines += ["", "Examples:", *(f"  {line}" for example in examples for line in example.splitlines())]
    lines += ["", "[config]: given by the configuration. `nestmodel presets` compares the presets."]
    return "\n".join(lines)


def _line(setting: Setting, content: Mapping[str, Any], *, has_config: bool) -> str:
    option = f"-{setting.letter}, {setting.flag}" if setting.letter else setting.flag
    if setting.flag.startswith("--"):
        option += "" if setting.kind == "switch" else f" {setting.metavar}"
    else:
        option += "..."
    value = _value(setting, content, has_config=has_config)
    return f"  {option:{_COLUMN - 2}}{setting.help.removesuffix('.')}{f' [{value}]' if value else ''}"


def _value(setting: Setting, content: Mapping[str, Any], *, has_config: bool) -> str:
    """Returns the value that a run would take, as text; empty if there is none to show."""
    if setting.kind == "switch":
        return ""
    found: Any = content
    for part in setting.key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is not None:
        return " ".join(str(found).split())
    return "config" if setting.in_presets and not has_config else setting.default_text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80, break_on_hyphens=False)

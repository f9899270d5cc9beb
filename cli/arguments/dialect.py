"""Translates the arguments of `fit`, `validate` and `preflight` to those of jsonargparse, without importing it.

Short options become dotted keys, positional arguments become `data.corpus`, and dashes equal underscores in every key.
Configuration files come first, so that options override them wherever they stand. Mistakes are found here, within a
fraction of a second, as far as this is possible without Lightning.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from nestmodel import preset_names, preset_path
from nestmodel.config import LIVE_PRESETS

from .errors import UsageError
from .keys import SEEDS, is_unknown, key_groups, keys
from .run_config import config_path, read_merged
from .settings import CHECKS, SETTINGS, Setting, accepted_by
from .suggestions import option_hint

HELP = ("-h", "--help")
HELP_ALL = "--help-all"

_PRINT = "print_config"
_NUMBER = re.compile(r"-\.?\d")


class Argument(NamedTuple):
    """One setting that the command line gives."""

    spelling: str
    """The option as help shows it."""

    key: str

    value: str | None
    """None for an option without a value."""

    setting: Setting | None
    """The row of the table, for a short option."""


def translate(arguments: Sequence[str]) -> list[str]:
    """Returns a command and its arguments as jsonargparse takes them.

    Raises:
        ConfigError: A name after `--config` is neither a file nor a preset.
        UsageError: An option is unknown, has no value, or contradicts another one; a configuration file cannot be
            read; or the corpus or the model is missing.
    """
    command, *tokens = arguments
    if HELP_ALL in tokens:
        return [command, "--help"]
    given = list(_Reader(command, tokens))
    _check_contradictions(given)
    configs = [argument for argument in given if argument.key == "config"]
    paths = [config_path(argument.value or "") for argument in configs]
    _check_complete(command, given, paths)
    others = [argument for argument in given if argument.key != "config"]
    return [command, *(f"--config={path}" for path in paths), *_dotted(others)]


def config_names(arguments: Sequence[str]) -> list[str]:
    """Returns the values of `--config` among arguments that may be wrong in other ways."""
    names = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, _, value = argument.partition("=")
        if before in ("-c", "--config") and not _is_option(argument):
            names.append(argument)
        elif value and flag in ("-c", "--config"):
            names.append(value)
    return names


@dataclass
class _Reader:
    """Reads the settings that tokens of a command line give."""

    command: str
    tokens: Sequence[str]

    def __post_init__(self) -> None:
        self._settings = {setting.option: setting for setting in accepted_by(self.command)}
        self._letters = {setting.letter: setting for setting in self._settings.values() if setting.letter}

    def __iter__(self) -> Iterator[Argument]:
        waiting = list(self.tokens)
        while waiting:
            token = waiting.pop(0)
            if token == "--":
                yield from map(self._corpus, waiting)
                return
            if not _is_option(token):
                yield self._corpus(token)
                continue
            name, equals, value = self._split(token)
            spelling, key, setting = self._resolve(name)
            found = value if equals else self._next_value(name, key, setting, waiting)
            if setting is not None and setting.kind == "switch" and str(found).lower() not in ("true", "false"):
                raise UsageError(f"{spelling} is {found!r}: it takes no value. See `nestmodel {self.command} --help`.")
            yield Argument(spelling, key, found, setting)

    def _corpus(self, value: str) -> Argument:
        return Argument("CORPUS", "data.corpus", value, self._settings["CORPUS"])

    def _split(self, token: str) -> tuple[str, str, str]:
        """Returns the long option of a token, `=` if it has a value, and that value."""
        if token.startswith("--"):
            return token.partition("=")
        if token[1] not in self._letters:
            raise self._unknown(token[:2])
        value = token[2:]
        return self._letters[token[1]].flag, "=" if value else "", value.removeprefix("=")

    def _resolve(self, name: str) -> tuple[str, str, Setting | None]:
        """Returns an option in its one spelling, its key, and the row of the table if it is a short option."""
        setting = self._settings.get(name[2:].replace("_", "-"))
        if setting is not None and setting.flag.startswith("--"):
            return setting.flag, setting.key, setting
        key = name[2:].replace("-", "_")
        if key in SEEDS:
            raise UsageError(f"--{key} follows from --seed: give that one. See `nestmodel {self.command} --help`.")
        # An option of preflight would have been found above.
        others = {setting.key for setting in SETTINGS if setting.group == CHECKS}
        if is_unknown(key) if "." in key else key not in {*keys(), *key_groups(), _PRINT} - others:
            raise self._unknown(name)
        return f"--{key}", key, None

    def _next_value(self, name: str, key: str, setting: Setting | None, waiting: list[str]) -> str | None:
        follower = waiting[0] if waiting and not _is_option(waiting[0]) else None
        if setting is not None and setting.kind == "switch":
            return waiting.pop(0) if follower is not None and follower.lower() in ("true", "false") else "true"
        if key == _PRINT or (follower is None and key.endswith(".help")):
            return None
        if follower is None:
            raise UsageError(f"{name} needs a value. See `nestmodel {self.command} --help`.")
        value = waiting.pop(0)
        if key in key_groups() and not value.startswith("{") and not Path(value).is_file():
            advice = f": give corpora without an option, such as `nestmodel {self.command} {value} --config small`"
            raise UsageError(
                f"{name} {value}: expected a YAML file with settings of the section{advice if key == 'data' else ''}."
            )
        return value

    def _unknown(self, name: str) -> UsageError:
        hint = option_hint(name, self.command)
        return UsageError(f"unknown option {name}{hint}. See `nestmodel {self.command} --help`.")


def _is_option(token: str) -> bool:
    return token.startswith("-") and token != "-" and not _NUMBER.match(token)


def _check_contradictions(given: Sequence[Argument]) -> None:
    """Raises a usage error if two spellings of an option have different values; of equal ones, the last counts."""
    spellings: dict[str, dict[str, str | None]] = {}
    for argument in given:
        (translated,) = _dotted([argument]) or [""]
        spellings.setdefault(argument.key, {})[argument.spelling] = translated
    for key, values in spellings.items():
        if key != "config" and len(set(values.values())) > 1:
            raise UsageError(f"{' and '.join(values)} both set {key}, to different values: give one of them.")


def _check_complete(command: str, given: Sequence[Argument], paths: Sequence[Path]) -> None:
    """Reads the configuration files, and raises a usage error if there is no model or no corpus."""
    content = read_merged(paths)
    names = [argument.key for argument in given]
    if any(name == _PRINT or name.endswith(".help") for name in names):
        return
    data, model = content.get("data"), content.get("model")
    has_corpus = (isinstance(data, dict) and "corpus" in data) or any(
        name == "data" or name.startswith("data.corpus") for name in names
    )
    has_model = model is not None or any(name.startswith("model") for name in names)
    example = f"`nestmodel {command} speech.corpus --config small`"
    if not has_corpus and not has_model:
        raise UsageError(
            f"give a corpus and a configuration, such as {example}. `nestdata prepare` makes corpora, and "
            "`nestmodel presets` lists configurations."
        )
    if not has_model:
        raise UsageError(
            f"no configuration: give --config with a preset ({', '.join(preset_names())}) or a YAML file, such as "
            f"{example}. `nestmodel presets` compares the presets."
        )
    has_size = any(name.startswith("model.config.encoder.") for name in names)
    if paths and paths[0] in map(preset_path, LIVE_PRESETS) and not has_size:
        raise UsageError(
            f"{paths[0].stem} is not a whole model: give it after a size, such as `--config small --config "
            f"{paths[0].stem}`."
        )
    if not has_corpus:
        raise UsageError(
            f"no corpus: give one (data.corpus), such as {example}. `nestdata prepare` makes corpora from audio."
        )


def _dotted(given: Sequence[Argument]) -> list[str]:
    """Returns the arguments with their keys; values of a list are gathered where its first one stands."""
    lists: dict[str, list[str]] = {}
    translated: dict[object, str] = {}
    for number, (_, key, value, setting) in enumerate(given):
        if value is None:
            translated[number] = f"--{key}"
        elif setting is None or setting.kind == "value":
            translated[number] = f"--{key}={value}"
        elif setting.kind == "numbers":
            translated[number] = f"--{key}={value if value.startswith('[') else f'[{value}]'}"
        elif setting.kind == "list":
            lists.setdefault(key, []).append(value)
            translated[key] = f"--{key}={_as_yaml(lists[key])}"
        elif not setting.value:
            translated[number] = f"--{key}={value}"
        elif value.lower() == "true":
            translated[key] = f"--{key}={setting.value}"
        else:
            translated.pop(key, None)
    return list(translated.values())


def _as_yaml(values: Sequence[str]) -> str:
    """Returns one value as it is, unless YAML would read something else, and several as a list."""
    if len(values) == 1:
        try:
            if yaml.safe_load(values[0]) == values[0]:
                return values[0]
        except yaml.YAMLError:  # jsonargparse then takes the text as it is
            return values[0]
    text: str = yaml.safe_dump(list(values), default_flow_style=True, default_style='"', width=float("inf"))
    return text.strip()

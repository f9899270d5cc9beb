"""The `data` section of a run's configuration, read from the YAML files that `nestmodel fit` takes.

`nestdata` commands use it to show what a run trains on. Values are converted by jsonargparse, as `fit` does it, one key
at a time: a command imports only the types of the keys that it needs.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from nestdata.config_checks import nearest_name_hint
from nestmodel import preset_path

from .errors import UsageError
from .keys import section_keys

if TYPE_CHECKING:
    from nestdata import AudioNoiseDataset, PlanConfig

_SECTIONS = ("data", "seed_everything")


class RunData:
    """The `data` section and the seed of a run.

    Args:
        section: Plain values by key.
        seed: Value of `seed_everything`.
    """

    def __init__(self, section: Mapping[str, Any], seed: int = 0) -> None:
        self.seed = seed
        self._section = section

    @classmethod
    def read(cls, names: Sequence[str] | None) -> "RunData":
        """Reads configuration files or presets; values of later ones replace those of earlier ones.

        Raises:
            ConfigError: A name is neither a file nor a preset.
            UsageError: A file is not a YAML mapping, or a key of `data` is unknown.
        """
        contents = [_read_sections(config_path(name)) for name in names or ()]
        content: dict[str, Any] = functools.reduce(_merged, contents, {})
        section = content.get("data", {})
        _check_keys(section, section_keys("data"), "data")
        seed = content.get("seed_everything", 0)
        if not isinstance(seed, int):
            raise UsageError(f"seed_everything is {seed!r}: give a whole number.")
        return cls(section, int(seed))

    def corpus_paths(self, given: Sequence[Path] | None) -> list[Path]:
        """Returns the given paths, or those of `data.corpus` if there are none.

        Raises:
            UsageError: There is neither.
        """
        paths = list(given or ()) or self.get("corpus", list[Path] | Path)
        if not paths:
            raise UsageError("no corpus: give CORPUS, or a configuration with data.corpus.")
        return paths if isinstance(paths, list) else [paths]

    def plan_config(self, *, seed: int | None = None, **overrides: Any) -> "PlanConfig":
        """Returns the settings of the plan; overrides are fields of `PlanConfig`; None keeps the value of the files.

        Raises:
            ConfigError: A value is out of range.
            UsageError: A field is unknown, or a value has the wrong type.
        """
        from nestdata import PlanConfig

        # A run derives the plan's seed from seed_everything, whatever its file says.
        plan: PlanConfig = self.get("plan", PlanConfig, seed=self.seed if seed is None else seed, **overrides)
        return plan

    def training_dataset(self, **given: Any) -> "AudioNoiseDataset":
        """Opens the data set that the run trains on.

        Args:
            **given: Fields of `DataConfig` that replace those of the files; None keeps the value of the files.

        Raises:
            NestError: A corpus cannot be opened, or a setting is out of range.
            UsageError: A field is unknown, or a value has the wrong type.
        """
        from nestmodel.training.open_data import DataConfig, open_training_data

        values = {name: value for name, value in given.items() if value is not None}
        for name, hint in get_type_hints(DataConfig).items():
            if name in self._section and name not in values:
                values[name] = self.get(name, hint)
        return open_training_data(DataConfig(**values))

    def get(self, key: str, hint: Any, **overrides: Any) -> Any:
        """Returns the value of a key, converted to a type.

        Args:
            key: A key of the section.
            hint: The type; a dataclass takes its defaults for missing fields.
            **overrides: Fields that replace those of a dataclass; None keeps the value of the files.

        Raises:
            ConfigError: A value is out of range.
            UsageError: A field is unknown, or a value has the wrong type.
        """
        from jsonargparse import ArgumentError, ArgumentParser

        if is_dataclass(hint) and isinstance(hint, type):
            value = self._section.get(key, {})
            _check_keys(value, [field.name for field in fields(hint)], f"data.{key}")
            value = {**value, **{name: given for name, given in overrides.items() if given is not None}}
        elif key not in self._section:
            return None
        else:
            value = self._section[key]
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument(f"--data.{key}", type=hint)
        try:
            return parser.instantiate_classes(parser.parse_object({"data": {key: value}})).data[key]
        except ArgumentError as error:
            raise UsageError(_type_message(str(error), f"data.{key}", hint, value)) from error


def config_path(name: str) -> Path:
    """Returns the file of a configuration, given its path or the name of a preset.

    Raises:
        ConfigError: The name is neither a file nor a preset.
    """
    return Path(name) if Path(name).is_file() else preset_path(name)


def read_merged(paths: Iterable[Path]) -> dict[str, Any]:
    """Returns the plain values of configuration files; values of later ones replace those of earlier ones.

    Raises:
        UsageError: A file cannot be read, or is not a YAML mapping.
    """
    return functools.reduce(_merged, map(read_config, paths), {})


def read_config(path: Path) -> dict[str, Any]:
    """Returns the plain values of a configuration file.

    Raises:
        UsageError: The file cannot be read, or is not a YAML mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())}). Fix the file.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected sections such as `data:` at the top level. Fix the file.")
    return content


def _read_sections(path: Path) -> dict[str, Any]:
    content = read_config(path)
    for key in content:
        # Other sections belong to other parts of a run, but a misspelt one of ours would silently be ignored.
        if key not in _SECTIONS and (hint := nearest_name_hint(str(key), _SECTIONS, min_similarity=0.6)):
            raise UsageError(f"{path}: the section '{key}' is unknown{hint}.")
    return content


def _check_keys(section: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(section, Mapping):
        raise UsageError(f"{where} is {section!r}: expected a mapping with the keys {', '.join(known)}.")
    for key in section:
        if key not in known:
            hint = nearest_name_hint(str(key), known, min_similarity=0.6)
            raise UsageError(f"the key '{where}.{key}' is unknown{hint}. Known keys are {', '.join(known)}.")


def _merged(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merged(before, value)
        else:
            merged[key] = value
    return merged


def _type_message(error: str, key: str, hint: Any, value: Any) -> str:
    """Returns a message for a value of the wrong type; that of jsonargparse lists every type that it tried."""
    found = re.search(rf'"{re.escape(key)}\.(\w+)"', error)
    if found and is_dataclass(hint):
        field = found.group(1)
        key, hint, value = f"{key}.{field}", get_type_hints(hint)[field], value[field]
    expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("pathlib.", "").replace("typing.", "")
    if (items := get_args(hint)) and is_dataclass(items[0]):
        expected = f"a list of mappings with the keys {', '.join(field.name for field in fields(items[0]))}"
    return f"{key} is {value!r}: expected {expected}."

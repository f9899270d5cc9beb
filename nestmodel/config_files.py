"""Configurations from presets and YAML files: found, merged, and built with every key and type checked.

The values are not trusted. YAML is read without aliases, and a value has a bounded number of parts, so that a
small file cannot describe a large value by naming its parts again and again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from nestdata.config_checks import nearest_name_hint, shown
from nestdata.wrong_path import kind_of, wrong_path
from nestmodel.class_config import ClassConfig
from nestmodel.errors import ConfigError

ConfigT = TypeVar("ConfigT")


_MAX_PARTS = 100_000
"""Largest number of parts of a value. A configuration has a few hundred."""


class _StrictLoader(yaml.SafeLoader):
    """Without aliases, which may stand for any amount of memory, and without keys of which the last one would count."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = cast(Any, self).peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"the alias *{event.anchor}: write out what it stands for", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = set[tuple[str, str]]()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            keys.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes) -> Any:
    """Returns the plain value that YAML without aliases describes.

    Raises:
        YAMLError: The text is not YAML, has an alias or a key twice, or is nested too deeply.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    except ValueError as error:  # such as a date that does not exist
        raise yaml.YAMLError(str(error)) from error


_PRESETS = Path(__file__).parent / "presets"

LIVE_PRESETS = ("streaming", "unified")
"""Presets for live speech, given after the preset of a size."""

PARTIAL_PRESETS = (*LIVE_PRESETS, "v2")
"""Presets that are not a whole model; given after the preset of a size."""


def preset_names() -> list[str]:
    """Returns the names of the presets of the package that are whole models, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml") if path.stem not in PARTIAL_PRESETS)


def preset_path(name: str) -> Path:
    """Returns the path of the YAML file of a preset of the package, `PARTIAL_PRESETS` included.

    Raises:
        ConfigError: No preset has that name.
    """
    known = preset_names()
    if name not in (*known, *PARTIAL_PRESETS):
        hint = nearest_name_hint(name, (*known, *PARTIAL_PRESETS), min_similarity=0.6)
        raise ConfigError(
            f"{name!r} is neither a file nor a preset{hint}. The presets are {', '.join(known)}. After one of them, "
            f"{', '.join(PARTIAL_PRESETS)} may be given."
        )
    return _PRESETS / f"{name}.yaml"


def config_path(name: str | Path) -> Path:
    """Returns the file of a configuration, given its path or the name of a preset.

    Raises:
        ConfigError: The name is neither a file nor a preset.
    """
    path = Path(name)
    if path.is_file() and kind_of(path) != "a model file":
        return path
    try:
        return preset_path(str(name))  # also if a folder has that name, such as the folder of `make demo`
    except ConfigError as error:
        if path.exists() or len(path.parts) > 1 or path.suffix in (".yaml", ".yml"):
            raise ConfigError(f"{name}: {wrong_path(name, 'a configuration')}") from error
        raise


def read_files(paths: Iterable[Path]) -> dict[str, Any]:
    """Returns the plain values of configuration files; later ones replace values of earlier ones.

    Raises:
        ConfigError: A file cannot be read, or is not a YAML mapping.
    """
    return reduce(_merged, map(_read_file, paths), {})


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())}). Fix the file.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections such as `data:` at the top level. Fix the file.")
    return content


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = old.get(key)
        # A class has no arguments in common with another class, or with the sizes of FastConformer.
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not _is_other_class(before, value):
            value = _merged(before, value)
        merged[key] = value
    return merged


def _is_other_class(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return "class_path" in after and after["class_path"] != before.get("class_path")


def check_size(value: object, where: str) -> None:
    """Checks the number of parts of a value that is not trusted; each counts as often as it occurs.

    Raises:
        ConfigError: There are too many.
    """
    left, parts = _MAX_PARTS, [value]
    while parts:
        part = parts.pop()
        if not isinstance(part, (Mapping, list, tuple, set, frozenset)):
            continue
        left -= 1 + len(part)
        if left < 0:
            raise ConfigError(f"{where} has more than {_MAX_PARTS:,} values: expected a few hundred.")
        parts.extend(part.values() if isinstance(part, Mapping) else part)


def build(cls: type[ConfigT], mapping: object, where: str, root: type | None = None) -> ConfigT:
    """Builds a dataclass from a mapping; rejects unknown keys, missing keys and values of the wrong type.

    Args:
        cls: The dataclass.
        mapping: Its values, by field.
        where: Path of the mapping in all settings, for messages.
        root: Class of all settings, in which an unknown key is searched for; `cls` by default.

    Raises:
        ConfigError: It cannot be built.
    """
    root = root or cls
    hints = get_type_hints(cls)
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is {shown(mapping)}: expected a mapping with {', '.join(hints)}.")
    check_keys(mapping, hints, where, root)
    values = {key: convert(value, hints[key], _below(where, key), root) for key, value in mapping.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where or cls.__name__} is incomplete: {error}.") from error


def check_keys(mapping: Mapping[Any, Any], known: Iterable[str], where: str, root: type) -> None:
    """Raises ConfigError for an unknown key; the message suggests a similar name here, or the path in all settings."""
    for key in mapping:
        if key not in known:
            name, fields_of_it = _below(where, key), f" The fields are {', '.join(known)}."
            if here := " or ".join(name_here(name, list(places(root)))):
                # Arguments of Lightning's Trainer keep their names. The parts of a dotted key are nested keys.
                here += f": {{{key}: ...}}" if here == "trainer.lightning" else ", as keys below keys" * (here == name)
                hint, fields_of_it = f"; here it is {here}", ""
            else:
                hint = nearest_name_hint(str(key), known, min_similarity=0.6)
            raise ConfigError(f"{name} is unknown{hint}.{fields_of_it}")


def to_plain(value: object) -> Any:
    """Returns a dataclass as nested mappings, lists, texts and numbers, which YAML can hold and `build` reads."""
    if is_dataclass(value) and not callable(value):  # neither a class nor an object that YAML cannot hold
        return {part.name: to_plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def convert(value: object, hint: Any, where: str, root: type | None = None) -> Any:
    """Checks a plain YAML value against an annotation; converts integers to floats and lists to tuples if needed."""
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where, root)
    if hint in (str, Path) and isinstance(value, str | Path):
        return hint(value)
    if get_origin(hint) is dict and isinstance(value, Mapping):
        return dict(value)
    if get_origin(hint) is list and isinstance(value, Sequence) and not isinstance(value, str):
        return [convert(item, get_args(hint)[0], where, root) for item in value]
    if hint is float and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]  # the line above leaves int or float
    if hint in (int, bool) and type(value) is hint:
        return value
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if hint is NoneType and value is None:
        return None
    if get_origin(hint) in (Union, UnionType):
        classes = [part for part in get_args(hint) if is_dataclass(part) and isinstance(part, type)]
        if isinstance(value, Mapping) and classes:
            # Sizes of FastConformer are the alternative; a mapping with `class_path` is a class.
            others = [part for part in classes if part is not ClassConfig]
            return build(ClassConfig if "class_path" in value or not others else others[0], value, where, root)
        for part in get_args(hint):
            with suppress(ConfigError):
                return convert(value, part, where, root)
    if get_origin(hint) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(parts) == len(value):
            return tuple(convert(part, part_hint, where, root) for part, part_hint in zip(value, parts, strict=True))
    # YAML 1.1 reads 1e-5 as a string, although it looks like a number.
    is_number = isinstance(value, str) and hint is float
    advice = " Write numbers with a point, such as 1.0e-5." if is_number else ""
    if str in (hint, *get_args(hint)) and isinstance(value, int | float):
        advice = " Put text in quotes."
    raise ConfigError(f"{where} is {shown(value)}: expected {_described(hint)}.{advice}")


def places(cls: type, where: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields of a dataclass, and of the dataclasses in it."""
    for part, hint in get_type_hints(cls).items():
        yield _below(where, part)
        for section in (hint, *get_args(hint)):
            if is_dataclass(section) and isinstance(section, type) and section is not ClassConfig:
                yield from places(section, _below(where, part))


def _below(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _described(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_described, get_args(hint)))
    if hint is NoneType:
        return "null"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def name_here(name: str, places: Collection[str]) -> list[str]:
    """Returns the settings here that stand for a setting of another tool.

    Args:
        name: Dotted name, as it was given in a file or as an option.
        places: Dotted names of the settings that exist.

    Returns:
        One dotted name, or up to three that share the name; empty if the name is not known.
    """
    name = name.strip("+~-").replace("-", "_").lower()
    ours = [own for own, others in names_elsewhere() if any(f".{name}".endswith(f".{other}") for other in others)]
    for wanted in (name, *ours, name.rpartition(".")[2]):
        found = [place for place in places if f".{place}".endswith(f".{wanted}")]
        if found:
            return [wanted] if wanted in found else found[:3]
    return []


@cache
def names_elsewhere() -> list[tuple[str, list[str]]]:
    """Returns each name here with its names in other tools; one of these may stand for several names here."""
    lines = Path(__file__).with_name("other_names.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(": ") for line in lines if not line.startswith("#"))
    return [(own, others.split()) for own, others in pairs]

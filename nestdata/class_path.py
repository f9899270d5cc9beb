"""Objects that settings name by `class_path` and `init_args`, as users of Lightning write them in YAML."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nestdata.config_checks import require, shown
from nestdata.errors import ConfigError


def class_at(class_path: str, where: str, base: type = object) -> Any:
    """Returns a class by its name.

    Args:
        class_path: `module.Class`.
        where: Path of the setting, for messages.
        base: What the class has to derive from.

    Raises:
        ConfigError: It cannot be imported, or it is not such a class.
    """
    module, _, name = str(class_path).rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # a module may do anything
        raise ConfigError(
            f"{where}: class_path {class_path}: {type(error).__name__}: {' '.join(str(error).split())}. Give "
            "module.Class, installed or in a folder of PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        expected = "a class" if base is object else f"a subclass of {base.__module__.partition('.')[0]}.{base.__name__}"
        what = "another class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"{where}: class_path {class_path} is {what}: expected {expected}.")
    return found


def build_object(settings: Mapping[str, Any], where: str, base: type = object) -> Any:
    """Returns an object of a class that a mapping names.

    Args:
        settings: `class_path`, as `module.Class`, and perhaps `init_args`, the arguments by name.
        where: Path of the setting, for messages.
        base: What the class has to derive from; no other class is called.

    Raises:
        ConfigError: The class cannot be imported, it does not derive from `base`, or it does not take the arguments.
    """
    path, arguments = settings["class_path"], settings.get("init_args") or {}
    is_whole = settings.keys() <= {"class_path", "init_args"} and isinstance(arguments, Mapping)
    require(is_whole, where, dict(settings), "class_path, and the arguments by name in init_args")
    found = class_at(path, where, base)
    try:
        return found(**arguments)
    except (Exception, SystemExit) as error:  # a class may do anything
        raise ConfigError(
            f"{where}: class_path {path} with {shown(arguments)}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}. Check its __init__ and its init_args."
        ) from error

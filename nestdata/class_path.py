"""Objects that settings name by `class_path` and `init_args`, as users of Lightning write them in YAML."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nestdata.config_checks import require, shown
from nestdata.errors import ConfigError


def build_object(settings: Mapping[str, Any], where: str) -> Any:
    """Returns an object of a class that a mapping names.

    Args:
        settings: `class_path`, as `module.Class`, and perhaps `init_args`, the arguments by name.
        where: Path of the setting, for messages.

    Raises:
        ConfigError: The class cannot be imported, it is none, or it does not take the arguments.
    """
    path, arguments = settings["class_path"], settings.get("init_args") or {}
    is_whole = settings.keys() <= {"class_path", "init_args"} and isinstance(arguments, Mapping)
    require(is_whole, where, dict(settings), "class_path, and the arguments by name in init_args")
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(import_module(module), name)
        if not isinstance(found, type):
            raise TypeError(f"it is a {type(found).__name__} and no class")
        return found(**arguments)
    except Exception as error:  # a module and a class may do anything
        raise ConfigError(
            f"{where}: class_path {path} with {shown(arguments)}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}. Give module.Class, installed or in a folder of PYTHONPATH, and arguments "
            "that it takes."
        ) from error

"""Objects of classes that settings name by `class_path` and `init_args`, as Lightning's users write them in YAML."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from nestdata.config_checks import require
from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class ClassConfig:
    """An object of any class."""

    class_path: str
    """`module.Class`."""

    init_args: dict[str, Any] | None = field(default_factory=dict)
    """Its arguments; null for an object that was given in Python, whose arguments are unknown."""

    @classmethod
    def of(cls, given: object) -> "ClassConfig":
        """Returns what settings say of an object that was given in Python."""
        return cls(class_path=f"{type(given).__module__}.{type(given).__qualname__}", init_args=None)


def class_of(class_path: str) -> Any:
    """Returns the class that `module.Class` names, or whatever else has that name.

    Raises:
        ConfigError: There is none.
    """
    module, dot, name = class_path.rpartition(".")
    require(bool(dot), "class_path", class_path, "module.Class, such as pytorch_lightning.callbacks.Timer")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"class_path {class_path}: {error}. Install its package, or set PYTHONPATH to the folder of its module."
        ) from error

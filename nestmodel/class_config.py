"""The setting of an object: its class and its arguments."""

import json
from dataclasses import dataclass, field
from typing import Any

from nestdata.config_checks import shown
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
        """Returns the setting for an object that was given in Python."""
        return cls(class_path=f"{type(given).__module__}.{type(given).__qualname__}", init_args=None)

    def plain(self, where: str) -> "ClassConfig":
        """Returns a copy whose arguments are plain JSON values: a model file has to describe the object.

        Raises:
            ConfigError: An argument is not a number, a text, a list or a mapping.
        """
        try:
            return ClassConfig(class_path=self.class_path, init_args=json.loads(json.dumps(self.init_args)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}.init_args is {shown(self.init_args)}: {error}. Give numbers, texts, lists and mappings: "
                "a path is a text."
            ) from error

"""The setting of an object: its class and its arguments. `nestdata.class_path` builds it."""

from dataclasses import dataclass, field
from typing import Any

from nestdata.field_docs import with_field_docs


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

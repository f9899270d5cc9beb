"""Short representations: configurations without defaults, tensors by their shapes, networks by their sizes."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any


def changed_fields(config: Any) -> str:
    """Returns a configuration as the expression that builds it, without the fields that have their defaults."""
    shown = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is MISSING or value != field.default:
            shown.append(f"{field.name}={value!r}")
    return f"{type(config).__name__}({', '.join(shown)})"


def shapes(value: Any) -> str:
    """Returns a dataclass or named tuple with the shapes and types of its tensors instead of their elements."""
    names = [field.name for field in fields(value)] if is_dataclass(value) else value._fields
    return f"{type(value).__name__}({', '.join(f'{name}: {_shape(getattr(value, name))}' for name in names)})"


def _shape(value: Any) -> str:
    if not hasattr(value, "shape"):
        return repr(value)
    if not value.ndim:
        return f"{value.item():g}"
    kind = str(value.dtype).removeprefix("torch.")
    return f"{' x '.join(map(str, value.shape))} {kind}"

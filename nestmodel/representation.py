"""Short representations: configurations without defaults, tensors by their shapes, networks by their sizes."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from html import escape
from typing import Any

from nestdata import redacted


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


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Returns a table of two columns as HTML; all text is escaped, and URLs are shown without their secrets."""
    cells = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(redacted(value))}</td></tr>'
        for name, value in rows.items()
    )
    return (
        f"<table><thead><tr><th colspan='2' style='text-align: left'>{escape(title)}</th></tr></thead>{cells}</table>"
    )


def _shape(value: Any) -> str:
    if not hasattr(value, "shape"):
        return repr(value)
    if not value.ndim:
        return f"{value.item():g}"
    kind = str(value.dtype).removeprefix("torch.")
    return f"{' x '.join(map(str, value.shape))} {kind}"

"""Descriptions of the fields of configurations in their docstrings, for `help()`.

A field is described by the string below it, which Python does not keep. It is read from the source when somebody asks
for the docstring of the class, so that importing the class takes no time.
"""

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import TypeVar, cast

Class = TypeVar("Class", bound=type)


class _Docstring:
    """Descriptor: the docstring of a class, and its fields."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> str:
        return "\n\n".join(filter(None, [self._text, _fields_of(owner)]))


def with_field_docs(cls: Class) -> Class:
    """Appends the fields of a dataclass with their types, defaults and descriptions to its docstring."""
    cls.__doc__ = cast(str, _Docstring(inspect.cleandoc(cls.__doc__ or "")))
    return cls


@cache
def _fields_of(cls: type) -> str:
    """Returns the fields as text; nothing without sources."""
    try:
        node = _classes_in(cls.__module__)[cls.__qualname__]
    except (OSError, TypeError, KeyError):
        return ""
    lines = ["Fields:"]
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        lines.append(f"    {ast.unparse(statement)}")
        match following:
            case ast.Expr(value=ast.Constant(value=str(description))):
                paragraph = " ".join(description.split())
                lines += textwrap.wrap(paragraph, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


@cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

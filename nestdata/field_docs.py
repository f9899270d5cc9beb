"""Descriptions of the fields of configurations in their docstrings, for `help()`, and for options of commands.

A field is described by the string below it, which Python discards. It is read from the source when the docstring of the
class is used, so that importing the class takes no time.
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


def field_summaries(cls: type) -> dict[str, str]:
    """Returns the first paragraph of the description of each field, by name; empty texts if the source is missing.

    Commands show it as the help of the field's option.
    """
    found = {name: " ".join(text.partition("\n\n")[0].split()) for name, (_, text) in _described(cls).items()}
    return {name: found.get(name, "") for name in cls.__annotations__}


@cache
def _fields_of(cls: type) -> str:
    """Returns the fields as text; an empty text if the source is missing."""
    described = _described(cls)
    lines = ["Fields:"] if described else []
    for declaration, text in described.values():
        lines.append(f"    {declaration}")
        paragraph = " ".join(text.split())
        lines += textwrap.wrap(paragraph, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


@cache
def _described(cls: type) -> dict[str, tuple[str, str]]:
    """Returns declaration and description of each field, by name; empty if the source is missing."""
    try:
        node = _classes_in(cls.__module__)[cls.__qualname__]
    except (OSError, TypeError, KeyError):
        return {}
    found = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            match following:
                case ast.Expr(value=ast.Constant(value=str(description))):
                    text = inspect.cleandoc(description)
                case _:
                    text = ""
            found[ast.unparse(statement.target)] = (ast.unparse(statement), text)
    return found


@cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

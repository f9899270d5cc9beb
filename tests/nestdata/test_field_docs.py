import inspect
import pydoc
from dataclasses import dataclass

from nestdata.field_docs import with_field_docs


@with_field_docs
@dataclass
class Example:
    """A configuration."""

    size: int
    names: tuple[str, ...] = ("a", "b")
    """Names, in an order
    that matters."""


def test_help_shows_the_fields_with_types_defaults_and_descriptions() -> None:
    expected = """A configuration.

Fields:
    size: int
    names: tuple[str, ...] = ('a', 'b')
        Names, in an order that matters."""
    assert inspect.getdoc(Example) == inspect.getdoc(Example(1)) == expected
    assert " |      names: tuple[str, ...] = ('a', 'b')\n" in pydoc.plain(pydoc.render_doc(Example))

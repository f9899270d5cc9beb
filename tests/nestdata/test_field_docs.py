import inspect
import pydoc
from dataclasses import dataclass, fields

import nestdata
import nestmodel
from nestdata.field_docs import with_field_docs


def configurations() -> list[type]:
    """Returns every public configuration of both packages."""
    public = [getattr(package, name) for package in (nestdata, nestmodel) for name in package.__all__]
    return [value for value in public if inspect.isclass(value) and value.__name__.endswith("Config")]


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


def test_every_field_of_a_public_configuration_is_in_its_docstring() -> None:
    for config in configurations():
        lines = [line for line in str(config.__doc__).splitlines() if line.startswith("    ") and line[4] != " "]
        assert [line.split(":")[0].strip() for line in lines] == [field.name for field in fields(config)], config

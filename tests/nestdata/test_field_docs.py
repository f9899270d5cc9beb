import ast
import inspect
import pydoc
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import nestdata
import nestmodel
from nestdata.field_docs import with_field_docs

REPOSITORY = Path(__file__).parents[2]


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


@pytest.mark.parametrize("config", configurations(), ids=lambda config: config.__name__)
def test_every_field_of_a_public_configuration_is_in_its_docstring(config: type) -> None:
    shown = str(config.__doc__)
    assert not shown.startswith("Fields:")
    listed = [line.split(":")[0].strip() for line in shown.splitlines() if line.startswith("    ") and line[4] != " "]
    assert listed == [field.name for field in fields(config)]


def test_every_configuration_in_the_sources_shows_its_fields() -> None:
    missing = []
    for folder in ("nestdata", "nestmodel"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                    missing += [] if "with_field_docs" in decorators else [f"{path.name}: {node.name}"]
    assert missing == []


def test_a_class_without_sources_keeps_its_docstring() -> None:
    namespace = {"__name__": "no_such_file", "with_field_docs": with_field_docs, "dataclass": dataclass}
    exec('@with_field_docs\n@dataclass\nclass Typed:\n    """As typed."""\n    size: int = 1', namespace)
    typed = namespace["Typed"]
    assert typed.__doc__ == "As typed."  # type: ignore[attr-defined]

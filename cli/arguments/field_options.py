"""Options that the fields of a configuration declare: each has the name, type, default and description of its field.

The help of an option is the first paragraph of the field's docstring.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from nestdata.field_docs import field_summaries

Result = TypeVar("Result")


def with_field_options(kind: type[Any], **given: Any) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Returns a decorator of commands that have a parameter `config`, which options of its fields replace.

    Args:
        kind: The dataclass of the parameter.
        **given: By field, a `typer.Option` with what the field does not say, such as the metavar. Its `show_default` is
            what help shows in place of None. A field with None has no option.
    """
    unknown = given.keys() - {field.name for field in fields(kind)}
    assert not unknown, f"{kind.__name__} has no fields {', '.join(sorted(unknown))}"
    hints, summaries = get_type_hints(kind), field_summaries(kind)
    parameters = []
    for field in fields(kind):
        option = given.get(field.name, typer.Option())
        if option is not None:
            option.help = option.help or summaries[field.name]
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(option_parameter(field.name, hints[field.name], option, default))
    return replacing("config", parameters, lambda values: kind(**values))


def option_parameter(name: str, hint: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """Returns the parameter that gives a command an option.

    Args:
        name: Name of the parameter, and of the option if it has no other. A switch has no form for off.
        hint: Type of the value. A tuple is an option that may be repeated.
        option: A `typer.Option`, which is changed. If it has a parser, the type may be any.
        default: Value without the option.
    """
    if option.default is ...:  # Typer keeps the first name here
        option.default = f"--{name.replace('_', '-')}"
    if isinstance(option.show_default, str):
        option.help, option.show_default = f"{option.help} [default: {option.show_default}]", True
    if option.parser:
        hint = Any  # Typer accepts no unions
    elif get_origin(hint) is tuple:
        hint, default = list[get_args(hint)[0]] | None, default or None  # type: ignore[misc]  # a type built here
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])


def replacing(
    name: str, parameters: Iterable[inspect.Parameter], build: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Returns a decorator that gives a command options in the place of one parameter.

    Args:
        name: The parameter to replace.
        parameters: Parameters of the options.
        build: Returns the value of the replaced parameter from those options that are not None.
    """
    options = list(parameters)

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(command)
        def run(**values: Any) -> Result:
            chosen = {option.name: values.pop(option.name) for option in options}
            given = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items() if v is not None}
            return command(**values, **{name: build(given)})

        own = inspect.signature(command, eval_str=True)
        shown: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            is_replaced = parameter.name == name
            shown += options if is_replaced else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        run.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]  # what inspect reads
        return run

    return decorate

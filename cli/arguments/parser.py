"""The parser of the commands that Lightning's command line runs: usage errors are one line with the nearest key."""

import re
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from pytorch_lightning.cli import LightningArgumentParser

from .errors import UsageError
from .keys import SEEDS
from .suggestions import nearest_key

_WRONG_TYPE = re.compile(r"""^Parser key "([\w.]+)": Expected an? <class '(\w+)'>\. Got value: (.*?)\.?$""")
_KINDS = {"bool": "true or false", "float": "a number", "int": "a whole number", "str": "text"}


class Parser(LightningArgumentParser):
    """Reports wrong usage as an exception with a one-line message."""

    command = ""
    """The command of `nestmodel` that is being parsed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, *_: Any) -> NoReturn:
        """Raises the error of jsonargparse, with the nearest key for an unknown one.

        Raises:
            UsageError: Always.
        """
        line = " ".join(str(message).split())
        if line.startswith("the following arguments are required"):
            line = line.replace(f" {self.command}.", " ")
            raise UsageError(f"{line}. See `nestmodel {self.command} --help`.")
        line = _WRONG_TYPE.sub(_in_our_words, line)
        options = {option.lstrip("-") for parser in self._all_parsers() for option in parser._option_string_actions}
        known = options.difference(SEEDS)
        for name in re.findall(r"[\w.]*\.\w+", line):
            if name not in known and (near := nearest_key(name, known)):
                line += f"; the nearest is '{near}'"
        raise UsageError(f"{line.removesuffix('.')}. See `nestmodel {self.command} --help`.")

    def _all_parsers(self) -> list[Any]:
        choices = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        return [self, *(parser for choice in choices for parser in choice.values())]


def _in_our_words(found: re.Match[str]) -> str:
    """Returns the message of jsonargparse for a value of the wrong type in the words of the other messages."""
    key, kind, value = found.groups()
    return f"{key} is {value!r}: expected {_KINDS.get(kind, kind)}"


def read_field_docstrings() -> None:
    """Lets the help of parsers that are built from now on describe the fields of dataclasses, which takes seconds."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)

"""The parsers that `fit`, `validate` and `preflight` build. Prints the content of `cli/keys.txt` when run."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from nestcli.arguments.keys import SEEDS
from nestcli.arguments.settings import LIGHTNING_COMMANDS
from nestcli.commands import fit


class _Built(Exception):
    pass


def lightning_parsers(arguments: Sequence[str] = ("fit",)) -> dict[str, Any]:
    """Returns the real parsers by command, as a command line builds them."""
    built: dict[str, Any] = {}

    def parse(cli: Any, *_: Any) -> None:
        built.update({name: cli._subcommand_parsers[name] for name in LIGHTNING_COMMANDS})
        raise _Built

    with patch.object(fit._Cli, "parse_arguments", parse):
        try:
            fit.run(list(arguments))
        except _Built:
            pass
    return built


def key_lines() -> list[str]:
    """Returns what `cli/keys.txt` should hold: groups end with a dot; links, appending and help are left out."""
    lines = set()
    for parser in lightning_parsers().values():
        for option, action in parser._option_string_actions.items():
            key = option.removeprefix("--")
            if key.startswith("-") or key in ("help", "print_config", *SEEDS) or key.endswith(("+", ".help")):
                continue
            lines.add(f"{key}." if type(action).__name__ == "_ActionConfigLoad" else key)
    return sorted(lines)


if __name__ == "__main__":
    print("\n".join(key_lines()))  # noqa: T201

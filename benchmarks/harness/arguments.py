"""The arguments that benchmarks have in common."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def benchmark_parser(
    description: str | None, *, rounds: int | None = None, quick: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with `--results`, and with `--rounds` and `--quick` where a benchmark has them.

    Args:
        description: Docstring of the benchmark.
        rounds: Default of `--rounds`; None if there are no rounds.
        quick: Values that `--quick` sets, to try the script; None if there is no such option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each contestant [%(default)s]")
    if quick is not None:
        sets = ", ".join(f"{name} {value}" for name, value in quick.items()) or "on a part of the data"
        parser.set_defaults(quick=False)
        parser.add_argument("--quick", nargs=0, action=_Quick, const=quick, help=f"to try the script: {sets}")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file that gets the Markdown as well")
    return parser


class _Quick(argparse.Action):
    """Sets several values."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, *_: Any) -> None:
        """Sets the values of `const`; options after `--quick` override them."""
        for name, value in {"quick": True, **self.const}.items():
            setattr(namespace, name, value)

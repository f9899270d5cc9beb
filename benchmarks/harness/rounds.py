"""Rounds, in which every contestant is measured once, so that the load of the machine affects all of them."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Measured = TypeVar("Measured")


def run_rounds(
    contestants: Mapping[Name, Callable[[], Measured]], num_rounds: int, *, warm_up: int = 1
) -> list[dict[Name, Measured]]:
    """Measures all contestants in each round, by name, and shows each round on standard error.

    Args:
        contestants: Functions that measure.
        num_rounds: Rounds that count.
        warm_up: Rounds before them, which fill caches and do not count.
    """
    rounds = []
    for number in range(-warm_up, num_rounds):
        rounds.append({name: measure() for name, measure in contestants.items()})
        print(f"round {number}: {rounds[-1]}", file=sys.stderr, flush=True)
    return rounds[warm_up:]


def ratios(rounds: Sequence[Mapping[Name, float]], name: Name, other: Name) -> list[float]:
    """Returns the ratio of a contestant's figure to another's, within each round."""
    return [measured[name] / measured[other] for measured in rounds]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median of values, with the least and the most in brackets."""
    median, least, most = spread_cells(values, f".{digits}f")
    return f"{median} ({least} to {most})"


def spread_cells(values: Sequence[float], form: str = ".2f") -> list[str]:
    """Returns the median, the least and the most of values."""
    return [format(figure(values), form) for figure in (statistics.median, min, max)]

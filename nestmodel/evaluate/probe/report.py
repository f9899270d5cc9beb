"""What the reports of all tasks share: data as plain values, Markdown tables, curves over layers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from nestmodel.evaluate.probe_config import Contestant
from nestmodel.figures import BLUE, GREY, ORANGE

COLOURS: dict[Contestant, str] = {"trained": BLUE, "untrained": ORANGE, "log_mel": GREY}


def plain(value: Any) -> Any:
    """Returns a report with its dataclasses and named tuples as dictionaries."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    is_named = isinstance(value, tuple) and type(value) is not tuple
    if is_named:
        return plain(value._asdict())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def table(columns: str, rows: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a Markdown table and an empty line. Cells are separated by " | "."""
    yield f"| {columns} |"
    yield "|" + "---|" * len(columns.split(" | "))
    for row in rows:
        yield f"| {row} |"
    yield ""


def unusable_lines(left_out: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yields the number of unusable utterances by reason, a line for each side."""
    for side, reasons in left_out.items():
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        yield f"Unusable utterances, {side}: {counts or 'none'}."


def draw_layers(axis: Any, name: Contestant, scores: Sequence[tuple[float, ...]], scale: float = 1.0) -> None:
    """Draws scores of the layers of an encoder, and labels the axis of the layers.

    Args:
        axis: Axes of matplotlib.
        name: The encoder.
        scores: The score of each layer, or the score and the bounds of its interval.
        scale: Factor of all values.
    """
    from matplotlib.ticker import MaxNLocator

    layers, style = np.arange(len(scores)), "-" if name == "trained" else "--"
    values, *bounds = scale * np.array(scores).T
    axis.plot(layers, values, style, color=COLOURS[name], marker="o", markersize=3, label=name)
    if bounds:
        axis.fill_between(layers, *bounds, color=COLOURS[name], alpha=0.15, linewidth=0)
    axis.set_xlabel("layer (0 is the input of the first block)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))

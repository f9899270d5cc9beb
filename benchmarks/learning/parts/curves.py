"""Curves of a loss over time: when they reach a level, and how fast the runs were; for time_to_loss.py."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from nestmodel.training.callbacks.curves import BLUE, ORANGE, finish_axes, new_figure

Curve = Mapping[str, Any]
"""A run: when its process started (`started`), its saved weights (`points`), and the digest of its `quantizer`."""

SINCE = {"start": "start of the process", "step": "first step"}
SCORED = "our noise"
"""The held-out set of times and curves."""


def seconds_to(curve: Curve, level: float, since: str) -> tuple[float, float] | None:
    """Returns the seconds and steps until the loss is first `level` below the entropy, or None.

    Values between two saved weights are interpolated. The time that saving weights took is excluded.

    Args:
        curve: A run.
        level: Nats below the entropy of the held-out tokens.
        since: "start" counts from the start of the process, "step" from the end of the first step.
    """
    before = None
    for point in curve["points"]:
        above = point["losses"][SCORED] - (point["token_entropy"] - level)
        now = (_seconds(curve, point, since), point["step"], above)
        if above <= 0:
            if before is None:
                return now[0], now[1]
            share = before[2] / (before[2] - above)
            return before[0] + share * (now[0] - before[0]), before[1] + share * (now[1] - before[1])
        before = now
    return None


def _seconds(curve: Curve, point: Mapping[str, Any], since: str) -> float:
    started = curve["started"] if since == "start" else curve["points"][0]["time"]
    seconds: float = point["time"] - point["saving_s"] - started
    return seconds


def below_at(curve: Curve, step: float, scored: str) -> float:
    """Returns by how many nats the loss after a number of steps is below the entropy, interpolated."""
    points = curve["points"]
    before, after = next(pair for pair in pairwise(points) if pair[1]["step"] >= step)
    share = (step - before["step"]) / (after["step"] - before["step"])
    below = [point["token_entropy"] - point["losses"][scored] for point in (before, after)]
    interpolated: float = below[0] + share * (below[1] - below[0])
    return interpolated


def time_cells(ours: Curve, nemo: Curve, seed: int, level: float, since: str) -> list[str]:
    """Returns the cells of one level: times, their ratio, and steps."""
    a, b = seconds_to(ours, level, since), seconds_to(nemo, level, since)
    ratio = "-"
    if a and b:
        ratio = f"{b[0] / a[0]:.2f}"
    elif a:
        ratio = f"> {(_seconds(nemo, nemo['points'][-1], since)) / a[0]:.2f}"
    times = [f"{found[0]:.0f}" if found else "not reached" for found in (a, b)]
    steps = [f"{found[1]:.0f}" if found else "-" for found in (a, b)]
    return [str(seed), f"{level:g}", SINCE[since], *times, ratio, *steps]


def encoded_seconds(curve: Curve, num_ranks: int) -> float:
    """Returns the seconds of audio that all ranks encode in a step, padding not included."""
    first, last = curve["points"][0], curve["points"][-1]
    seconds: float = num_ranks * (last["encoded_s"] - first["encoded_s"]) / (last["step"] - first["step"])
    return seconds


def speed_row(side: str, seed: int, curve: Curve, num_ranks: int) -> list[str]:
    """Returns speed and best loss of a run."""
    first, last = curve["points"][0], curve["points"][-1]
    took = _seconds(curve, last, "step")
    audio = num_ranks * (last["audio_s"] - first["audio_s"])
    below = max(point["token_entropy"] - point["losses"][SCORED] for point in curve["points"])
    return [f"{side}, {seed}", f"{(last['step'] - first['step']) / took:.2f}", f"{audio / took:.1f}", f"{below:.3f}"]


def draw(curves: Mapping[tuple[str, int], Curve], levels: list[float], path: Path) -> None:
    """Draws loss minus entropy over the minutes since the start of the process."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for (side, seed), curve in curves.items():
        minutes = [_seconds(curve, point, "start") / 60 for point in curve["points"]]
        above = [point["losses"][SCORED] - point["token_entropy"] for point in curve["points"]]
        colour = BLUE if side == "ours" else ORANGE
        axes.plot(minutes, above, color=colour, marker=".", label=side if seed == 0 else None)
    for level in levels:
        axes.axhline(-level, color="grey", linewidth=0.6, linestyle="--")
    axes.set_ylim(top=0.5)
    axes.set_xlabel("minutes since the start of the process")
    finish_axes(axes, "held-out loss minus entropy of the tokens, nats", has_legend=True)
    figure.savefig(path, dpi=80)

"""The report of time_to_loss.py: times, losses after equally many steps, and the curves."""

import argparse
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.repository import commit_line
from benchmarks.learning.parts.manifests import HELD_OUT
from nestmodel.training.callbacks.curves import BLUE, ORANGE, finish_axes, new_figure

Curve = Mapping[str, Any]
"""A run: when its process started (`started`), its saved weights (`points`), and the digest of its `quantizer`."""

LIMITS = (1.0, 16.0)
"""Shortest and longest utterance in seconds. NEST's YAML files of NeMo leave out those below 1 s."""

STEP_SECONDS = 64.0
"""Audio of an optimizer step over all ranks, padding included."""

SAMPLING_RATE = 16_000
LR, WARMUP_STEPS = 0.3, 300
CHANGED = {
    "NeMo, lengths kept": "KeptLengths",
    "NeMo, mixed as ours": "MixedAsOurs",
}
"""NeMo with parts of its augmentation changed: the class of `peers/nemo_mixing.py` that replaces it."""

SIDES = ("ours", "NeMo", *CHANGED)


def sides_of(seed: int, changed_seeds: int | None) -> tuple[str, ...]:
    """Returns the sides that are trained with a seed; changed ones only with the first `changed_seeds` seeds."""
    return SIDES if changed_seeds is None or seed < changed_seeds else SIDES[:2]


SETS = ("our noise", "NeMo's noise", "clean")
"""How the held-out speech is made noisy for scoring."""

CALIBRATION_SECONDS = 30.0
SINCE = {"start": "start of the process", "step": "first step"}


def seconds_to(curve: Curve, level: float, since: str, scored: str = SETS[0]) -> tuple[float, float] | None:
    """Returns the seconds and steps until the loss is first `level` below the entropy, or None.

    Values between two saved weights are interpolated. The time that saving weights took is excluded.

    Args:
        curve: A run.
        level: Nats below the entropy of the held-out tokens.
        since: "start" counts from the start of the process, "step" from the end of the first step.
        scored: The held-out set.
    """
    before = None
    for point in curve["points"]:
        above = point["losses"][scored] - (point["token_entropy"] - level)
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


def report(
    arguments: argparse.Namespace,
    prepared: Mapping[str, Any],
    interferences: Mapping[str, Mapping[str, float]],
    speeds: Mapping[str, float],
    best: str,
    nemo_ranks: int,
    curves: Mapping[tuple[str, int], Curve],
) -> str:
    """Returns the result as Markdown."""
    seeds = range(arguments.seeds)
    for seed in seeds:
        sides = sides_of(seed, arguments.changed_seeds)
        assert len({curves[side, seed]["quantizer"] for side in sides}) == 1, "the targets differ"
    entropy = curves["ours", 0]["points"][-1]["token_entropy"]
    step = min(curve["points"][-1]["step"] for curve in curves.values())
    equal = []
    for side in SIDES:
        of_side = [curves[side, seed] for seed in seeds if (side, seed) in curves]
        losses = [" / ".join(f"{below_at(curve, step, name):.3f}" for curve in of_side) for name in SETS]
        equal.append([side, f"{mean(encoded_seconds(side, curve, nemo_ranks) for curve in of_side):.1f}", *losses])
    mixing = (
        [
            name,
            *(f"{100 * found[share]:.0f} %" for share in ("mixed", "throughout")),
            f"{found['snr_db']:.1f} dB",
            f"{100 * found.get('shortened', 0):.0f} %",
        ]
        for name, found in interferences.items()
    )
    times = (
        time_cells(curves["ours", seed], curves["NeMo", seed], seed, level, since)
        for seed in seeds
        for level in arguments.levels
        for since in SINCE
    )
    speed_cells = (summary(side, seed, curves[side, seed], nemo_ranks) for seed in seeds for side in SIDES[:2])
    measured = commit_line()
    mixing_columns = ["utterances with interference", "over more than 90 %", "level of speech over it, median"]
    times_columns = ["ours, s", "NeMo, s", "NeMo / ours", "steps, ours", "steps, NeMo"]
    speed_columns = ["steps per second", "seconds of audio per second", "best, nats below the entropy"]
    return f"""# Time to a loss, compared with NeMo 3.0.0

Made by `benchmarks/learning/time_to_loss.py` on {machine("CPU cores")}, \
{versions("torch", "lhotse", "pytorch-lightning")}, NeMo 3.0.0.
{measured}

Both sides train the demo preset (lr {LR}, warm-up {WARMUP_STEPS} steps) on the same utterances of {LIMITS[0]:g} to
{LIMITS[1]:g} s, {STEP_SECONDS:g} s per step, from the same weights, without validation. Ours ran for
{arguments.minutes_ours:g} minutes as two ranks of one thread, and NeMo for {arguments.minutes_nemo:g}. One evaluator
scores the weights of both on all utterances of the held-out speakers ({", ".join(HELD_OUT)}), with the same masks. Both
have torch's fused AdamW. Noise of which NeMo would read crops again, up to 100 times, is left out for both.

**The two sides do not train on the same noise**, although the numbers in their settings are equal: a half of the
utterances gets interference over a half of its length, with noise at -5 to 20 dB or other speech at -5 to 5 dB. In
NeMo, the other half keeps a crop of noise, unscaled, over its full length, and is cut to the length of this crop if
that is shorter. In the selected half, the level of the interference is computed over the whole utterance, its silent
half included, so that it is 3 dB louder. The held-out utterances, mixed by either side; the level is that of utterances
in which the interference covers about a half:

{table_text(["mixed by", *mixing_columns, "shortened"], mixing)}

## After equally many steps

Nats below the entropy of the held-out tokens ({entropy:.3f} with seed 0) after {step} steps, for the seeds
{" / ".join(map(str, seeds))}; negative values are above it. "Lengths kept" is NeMo whose noisy audio is never cut to
the length of a crop; "mixed as ours" also leaves utterances clean that are not selected, and computes the level over
the mixed part.

{table_text(["side", "encoded seconds of a step", *SETS], equal)}

## Over time

Scored with our noise. The levels were chosen before the run. The times exclude the saving of weights on both sides.
Ours excludes `nestdata prepare`, which ran once and took {prepared["seconds"]:.0f} s.

{table_text(["seed", "nats below the entropy", "time since", *times_columns], times)}

{table_text(["side and seed", *speed_columns], speed_cells)}

NeMo ran as "{best}", the fastest in a calibration of {CALIBRATION_SECONDS:g} s
each; every line of its manifests, noise included, has a duration:

{table_text(["NeMo's loader", speed_columns[1]], ([name, f"{speed:.1f}"] for name, speed in speeds.items()))}

The curves are next to this file.
"""


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


def encoded_seconds(side: str, curve: Curve, nemo_ranks: int) -> float:
    """Returns the seconds of audio that all ranks encode in a step, padding not included."""
    first, last = curve["points"][0], curve["points"][-1]
    num_ranks = 2 if side == "ours" else nemo_ranks
    seconds: float = num_ranks * (last["encoded_s"] - first["encoded_s"]) / (last["step"] - first["step"])
    return seconds


def summary(side: str, seed: int, curve: Curve, nemo_ranks: int) -> list[str]:
    """Returns speed and best loss of a run."""
    first, last = curve["points"][0], curve["points"][-1]
    took = _seconds(curve, last, "step")
    audio = (2 if side == "ours" else nemo_ranks) * (last["audio_s"] - first["audio_s"])
    below = max(point["token_entropy"] - point["losses"][SETS[0]] for point in curve["points"])
    steps = last["step"] - first["step"]
    return [f"{side}, {seed}", f"{steps / took:.2f}", f"{audio / took:.1f}", f"{below:.3f}"]


def draw(curves: Mapping[tuple[str, int], Curve], levels: list[float], path: Path) -> None:
    """Draws loss minus entropy over the minutes since the start of the process."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for (side, seed), curve in curves.items():
        if side in CHANGED:
            continue
        minutes = [_seconds(curve, point, "start") / 60 for point in curve["points"]]
        above = [point["losses"][SETS[0]] - point["token_entropy"] for point in curve["points"]]
        colour = BLUE if side == "ours" else ORANGE
        axes.plot(minutes, above, color=colour, marker=".", label=side if seed == 0 else None)
    for level in levels:
        axes.axhline(-level, color="grey", linewidth=0.6, linestyle="--")
    axes.set_ylim(top=0.5)
    axes.set_xlabel("minutes since the start of the process")
    finish_axes(axes, "held-out loss minus entropy of the tokens, nats", has_legend=True)
    figure.savefig(path, dpi=80)

"""Cuts a recording at pauses, as functions of the probabilities of speech in its frames.

Positions count frames from the start of the recording; spans are half-open. The functions are deterministic and read
nothing else.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.prepare.speech.config import FRAME_SECONDS, SegmentConfig

# Speech begins with a frame of at least `_THRESHOLD` and lasts until one below `_RELEASE`. Silero VAD releases at 0.35,
# which often ends speech before its last syllable (docs/decisions/nestdata/cut-at-pauses.md).
_THRESHOLD, _RELEASE = 0.5, 0.1
# Gaps shorter than a tenth of a second do not count as pauses, nor sounds shorter than a quarter of a second as speech.
_MIN_PAUSE, _MIN_SPEECH = 3, 8
# Costs of a plan. Cutting at a pause costs one divided by its length in seconds: once at a pause of 0.2 s costs as much
# as five times at pauses of 1 s. A cut in running speech costs more than at any pause. A cut that is far too short
# costs the most, because it could be joined with its neighbour.
_COST_IN_SPEECH, _COST_OF_SHORT = 50.0, 100.0
# Share of the longest cut that running speech is cut into, which leaves room to choose the frame.
_FILL = 0.8

Spans = NDArray[np.int64]
"""Spans in frames, ordered and disjoint, shape (num_spans, 2): start and stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameRules:
    """`SegmentConfig` in frames."""

    shortest: int
    """Length that cuts should reach, padding included."""

    longest: int
    """Longest cut, padding included."""

    max_pause: int
    padding: int

    @classmethod
    def of(cls, config: SegmentConfig) -> "FrameRules":
        """Returns the rules of a configuration."""
        return cls(
            shortest=math.ceil(_in_frames(config.min_seconds)),
            longest=math.floor(_in_frames(config.max_seconds)),
            max_pause=math.floor(_in_frames(config.max_pause)),
            padding=round(_in_frames(config.padding_seconds)),
        )

    @property
    def longest_speech(self) -> int:
        """Longest span from the first to the last frame of speech of a cut."""
        return max(1, self.longest - 2 * self.padding)


class CutPlan(NamedTuple):
    """The cuts of a recording."""

    spans: Spans
    """The cuts, with padding. All speech is inside them."""

    num_in_speech: int
    """Number of places where two cuts meet in running speech."""


def speech_runs(probabilities: NDArray[np.float32]) -> Spans:
    """Returns the spans of speech: gaps shorter than 0.1 s are closed, and then spans shorter than 0.25 s dropped.

    Args:
        probabilities: Probability of speech in each frame, shape (num_frames,).
    """
    runs = _spans_of(probabilities >= _RELEASE)
    likely = np.append(np.flatnonzero(probabilities >= _THRESHOLD), len(probabilities))
    runs[:, 0] = likely[np.searchsorted(likely, runs[:, 0])]
    runs = runs[runs[:, 0] < runs[:, 1]]
    if not len(runs):
        return runs
    is_pause = runs[1:, 0] - runs[:-1, 1] >= _MIN_PAUSE
    first, last = np.append(True, is_pause), np.append(is_pause, True)
    runs = np.stack([runs[first, 0], runs[last, 1]], axis=1)
    return runs[runs[:, 1] - runs[:, 0] >= _MIN_SPEECH]


def plan_cuts(runs: Spans, probabilities: NDArray[np.float32], rules: FrameRules) -> CutPlan:
    """Joins spans of speech into cuts that are as long as the rules ask, where possible.

    Cuts are made at all pauses longer than `max_pause`, and otherwise where they cost least: at long pauses rather than
    at short ones, and in running speech only if it is longer than a cut may be.

    Args:
        runs: The spans of speech.
        probabilities: Probability of speech in each frame of the recording, shape (num_frames,).
        rules: The limits.

    Returns:
        Cuts with all speech, ordered, without overlap, and none longer than `rules.longest`.
    """
    units = _divided(runs, probabilities, rules)
    spans = _joined(units, rules)
    num_in_speech = int((spans[1:, 0] == spans[:-1, 1]).sum())
    return CutPlan(_padded(spans, len(probabilities), rules.padding), num_in_speech)


def _in_frames(seconds: float) -> float:
    return round(seconds / FRAME_SECONDS, 6)


def _spans_of(mask: NDArray[np.bool_]) -> Spans:
    changes = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return changes.reshape(-1, 2).astype(np.int64)


def _divided(runs: Spans, probabilities: NDArray[np.float32], rules: FrameRules) -> Spans:
    """Divides the spans of speech that are longer than a cut may be."""
    units: list[tuple[int, int]] = []
    for start, stop in runs.tolist():
        bounds = [start, *_cuts_in_speech(probabilities, start, stop, rules), stop]
        units += pairwise(bounds)
    return np.array(units, np.int64).reshape(-1, 2)


def _cuts_in_speech(probabilities: NDArray[np.float32], start: int, stop: int, rules: FrameRules) -> list[int]:
    """Returns the least speech-like frames at which a span of running speech is divided; none if it is short enough."""
    longest, cuts = rules.longest_speech, list[int]()
    if stop - start <= longest:
        return cuts
    for parts_after in range(-(-(stop - start) // max(1, int(_FILL * longest))) - 1, 0, -1):
        left = stop - start
        if left <= longest:
            break
        low, high = max(1, left - parts_after * longest), min(longest, left - parts_after)
        wanted = max(low, rules.shortest), min(high, left - parts_after * rules.shortest)
        low, high = wanted if wanted[0] <= wanted[1] else (low, high)
        start += low + int(np.argmin(probabilities[start + low : start + high + 1]))
        cuts.append(start)
    return cuts


def _joined(units: Spans, rules: FrameRules) -> Spans:
    """Returns the cheapest way to join consecutive units into cuts, by dynamic programming over their number."""
    if not len(units):
        return units
    starts, stops = units[:, 0].tolist(), units[:, 1].tolist()
    pauses = [0, *(after - before for before, after in zip(stops[:-1], starts[1:], strict=True))]
    cut_costs = [0.0, *(_cut_cost(pause, rules) for pause in pauses[1:])]
    costs, firsts = [0.0], list[int]()
    for last in range(len(units)):
        options = []
        for first in range(last, -1, -1):
            length = stops[last] - starts[first]
            if first < last and (length > rules.longest_speech or pauses[first + 1] > rules.max_pause):
                break
            options.append((costs[first] + cut_costs[first] + _short_cost(length, rules), first))
        cost, first = min(options)
        costs.append(cost)
        firsts.append(first)
    spans, last = list[tuple[int, int]](), len(units) - 1
    while last >= 0:
        spans.append((starts[firsts[last]], stops[last]))
        last = firsts[last] - 1
    return np.array(spans[::-1], np.int64)


def _cut_cost(pause: int, rules: FrameRules) -> float:
    if pause > rules.max_pause:
        return 0.0
    return 1 / (pause * FRAME_SECONDS) if pause else _COST_IN_SPEECH


def _short_cost(length: int, rules: FrameRules) -> float:
    padded = length + 2 * rules.padding
    return _COST_OF_SHORT * (1 - padded / rules.shortest) if padded < rules.shortest else 0.0


def _padded(spans: Spans, num_frames: int, padding: int) -> Spans:
    """Extends each span on both sides, up to the middle of the pause if the next one is near."""
    if not len(spans):
        return spans
    pauses = spans[1:, 0] - spans[:-1, 1]
    before = np.minimum(padding, np.append(spans[0, 0], pauses - pauses // 2))
    after = np.minimum(padding, np.append(pauses // 2, num_frames - spans[-1, 1]))
    return np.stack([spans[:, 0] - before, spans[:, 1] + after], axis=1)

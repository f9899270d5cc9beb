"""Finds, by trials, the largest `max_batch_seconds` whose optimizer steps fit into memory, and the best one.

The check of the training step and the search for a budget both use it. `shapes` decides what to try.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nestdata import AudioNoiseDataset, BatchPlan
from nestmodel.errors import TrainingError
from nestmodel.preflight.budget.shapes import critical_shapes, describe_shapes, shapes_of, typical_shapes
from nestmodel.preflight.measure.memory import gigabytes
from nestmodel.preflight.measure.trial import TrialResult
from nestmodel.preflight.measure.trial_step import Shape
from nestmodel.training.data import NestDataModule

RESOLUTION_S = 5
_NUM_HALVINGS = 4
_RETREAT = 0.95

_MAX_GROWTH = 4
"""A trial is at most this many times as large as the largest one that fits."""

_EXACT_PARTS = 50
"""The search ends when it is exact to one unit, or to one part in this many."""

_RATE_TOLERANCE = 0.02
"""A budget is as good as another if it processes at most this share less audio in the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetTrial:
    """The result of the trials of one budget."""

    max_batch_seconds: float
    fits: bool
    peak_bytes: int | None
    """Largest peak memory that was measured; None if the budget does not fit."""

    audio_s_per_s: float | None
    """Seconds of audio, padding included, that one rank processes in a second; None if it was not measured."""

    too_large: str | None
    """The shape that does not fit, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestCut:
    """The longest cut of a data set, which sets the smallest budget."""

    source: str
    """Key of the corpus in the configuration."""

    seconds: float
    """Its length, which is at least `min_audio_seconds`."""

    budget_seconds: float
    """The budget that it needs, which is more than its length with `quadratic_seconds`."""


class BudgetSearch:
    """Runs and records trials. Budgets are counted in units of 5 s.

    Args:
        data: The data of the run; the plan's other settings are kept.
        device: Name of the device, for messages.
        try_shapes: Runs a trial.
        on_trial: Called with a line of text before and after each trial.
    """

    def __init__(
        self,
        data: NestDataModule,
        device: str,
        try_shapes: Callable[[list[Shape]], TrialResult],
        on_trial: Callable[[str], None] | None = None,
    ) -> None:
        self._corpus, self._config = data.train_dataset.corpus, data.train_dataset.plan.config
        self.sampling_rate = data.sampling_rate
        self.device = device
        self._try_shapes = try_shapes
        self._on_trial = on_trial or (lambda _: None)
        self.allowed_bytes = 0
        self.trials: dict[float, BudgetTrial] = {}
        self.last_too_large: Shape | None = None
        """The shape that did not fit in the latest trial that failed."""

        datasets = {"data.corpus": data.train_dataset, "data.val_corpus": data.val_dataset}
        longest = [_longest_cut(name, dataset) for name, dataset in datasets.items() if dataset is not None]
        self.longest = max(longest, key=lambda cut: cut.seconds)
        self.lowest = math.ceil(self.longest.budget_seconds / RESOLUTION_S)
        self.highest = max(self.lowest, _highest_units(data.train_dataset))

    def largest(self) -> int | None:
        """Returns the largest budget at which all shapes of an epoch fit; None if not even the smallest does."""
        found = self._largest_of(
            self._peak_of_critical, round(self._config.max_batch_seconds / RESOLUTION_S), self.highest
        )
        if found is not None and self._peak_of_all(found) is None:
            # A shape that was thought to be uncritical does not fit, or memory is fragmented by the other shapes.
            found = self._largest_of(self._peak_of_all, int(_RETREAT * found), found - 1)
        return found

    def largest_below(self, seconds: float) -> int | None:
        """Returns the largest budget below `seconds` whose critical shapes fit; None if there is none.

        Nothing is tried if the longest cut fits into no smaller budget.
        """
        highest = min(self.highest, math.ceil(seconds / RESOLUTION_S) - 1)
        return self._largest_of(self._peak_of_critical, highest // 2, highest)

    def best(self, largest: int) -> float:
        """Halves the largest budget as long as the speed remains about the same; returns the best budget in seconds.

        Raises:
            TrainingError: Half of the largest budget does not fit.
        """
        rates: dict[float, float] = {}
        for number in range(_NUM_HALVINGS):
            units = largest >> number
            if units < self.lowest:
                break
            seconds = float(units * RESOLUTION_S)
            if number:
                self._measure_rate(units)
            rates[seconds] = self.trials[seconds].audio_s_per_s or 0.0
            if best_budget(rates) != seconds:  # smaller budgets are slower still
                break
        return best_budget(rates)

    def longest_cut(self, highest: int) -> int | None:
        """Returns the largest length, in whole seconds up to `highest`, of which one cut fits; None if 1 s does not."""

        def peak_of_one(seconds: int) -> int | None:
            return _peak(self._try("one cut", [(1, seconds * self.sampling_rate)]))

        return largest_fitting(peak_of_one, lambda: self.allowed_bytes, start=highest // 2, lowest=1, highest=highest)

    def plan(self, units: int) -> BatchPlan:
        """Returns the plan of the run with another budget."""
        return BatchPlan.of(self._corpus, replace(self._config, max_batch_seconds=float(units * RESOLUTION_S)))

    def _largest_of(self, peak_of: Callable[[int], int | None], start: int, highest: int) -> int | None:
        return largest_fitting(peak_of, lambda: self.allowed_bytes, start=start, lowest=self.lowest, highest=highest)

    def _peak_of_critical(self, units: int) -> int | None:
        """Tries the shapes that may need the most memory; returns the peak, or None if one of them does not fit."""
        return self._run(units, critical_shapes(self.plan(units)))

    def _peak_of_all(self, units: int) -> int | None:
        """Tries all shapes, and measures the speed of typical ones; returns the peak, or None if one does not fit."""
        plan = self.plan(units)
        return self._run(units, shapes_of(plan), timed=typical_shapes(plan))

    def _measure_rate(self, units: int) -> None:
        shapes = typical_shapes(self.plan(units))
        if self._run(units, shapes, timed=shapes) is None:
            raise TrainingError(
                f"a batch of {units * RESOLUTION_S} s does not fit, but a larger one did: other processes use the "
                f"memory of {self.device}. Try again when nothing else runs there."
            )

    def _run(self, units: int, shapes: list[Shape], *, timed: Sequence[Shape] = ()) -> int | None:
        """Runs and records a trial.

        Args:
            units: The budget.
            shapes: The shapes of the steps, in order.
            timed: The shapes among them whose speed is measured.

        Returns:
            The peak memory in bytes, or None if a shape does not fit.
        """
        seconds = float(units * RESOLUTION_S)
        result = self._try(f"{seconds:g} s", shapes)
        peak, rate = _peak(result), None
        if timed and peak is not None:
            times, each = dict(zip(shapes, result.times, strict=True)), self._config.microbatches_per_step
            time_s = sum(times[shape].seconds_per_microbatch(each) for shape in timed)
            rate = sum(cuts * samples for cuts, samples in timed) / self.sampling_rate / time_s
        known = self.trials.get(seconds)
        self.trials[seconds] = BudgetTrial(
            max_batch_seconds=seconds,
            fits=peak is not None,
            peak_bytes=None if peak is None else max(peak, (known.peak_bytes if known else None) or 0),
            audio_s_per_s=rate,
            too_large=describe_shapes([result.too_large], self.sampling_rate) if result.too_large else None,
        )
        return peak

    def _try(self, what: str, shapes: list[Shape]) -> TrialResult:
        self._on_trial(f"trying {what}: {len(shapes)} shapes, {describe_shapes(shapes, self.sampling_rate)}")
        result = self._try_shapes(shapes)
        self.allowed_bytes = result.allowed_bytes
        if result.too_large:
            self.last_too_large = result.too_large
            outcome = f"{describe_shapes([result.too_large], self.sampling_rate)} does not fit"
        else:
            outcome = f"fits, {gigabytes(result.peak_bytes)} of {gigabytes(result.allowed_bytes)}"
        self._on_trial(f"  {outcome}")
        return result


def _peak(result: TrialResult) -> int | None:
    return None if result.too_large else result.peak_bytes


def largest_fitting(
    peak_of: Callable[[int], int | None], allowed_bytes: Callable[[], int], *, start: int, lowest: int, highest: int
) -> int | None:
    """Returns the largest number in [lowest, highest] that fits, to 1 or to 2 %, if every smaller number fits as well.

    The memory of a step grows nearly linearly with the budget, so the next number is predicted from the two largest
    that fit. If a prediction gains less than bisection would, the next number is the middle of the remaining ones.

    Args:
        peak_of: Returns the peak memory in bytes of a trial, or None if it does not fit.
        allowed_bytes: Returns the memory that a trial may use; called after the first trial.
        start: The first number to try.
        lowest: The smallest number allowed.
        highest: The largest number allowed.

    Returns:
        A number that was tried and fits; None if `lowest` does not fit.
    """
    fitting: dict[int, int] = {}
    low, high = lowest - 1, highest + 1  # all up to `low` fit, `high` does not, or is not allowed
    number, was_halved = min(max(start, lowest), highest), True
    while high - low > (max(1, low // _EXACT_PARTS) if fitting and high <= highest else 1):
        before = high - low
        peak = peak_of(number)
        if peak is None:
            high = number
        else:
            low, fitting[number] = number, peak
        was_halved = 2 * (high - low) <= before + 1
        number = _next_number(fitting, allowed_bytes(), low, high, is_predicted=was_halved or high > highest)
    return low if low >= lowest else None


def _next_number(fitting: dict[int, int], allowed_bytes: int, low: int, high: int, *, is_predicted: bool) -> int:
    """Returns a number between `low` and `high`."""
    middle = (low + high) // 2
    if not fitting:
        return max(low + 1, min(middle, high - 1))
    number = min(middle, 2 * low)
    if is_predicted and len(fitting) > 1:
        (first, first_peak), (second, second_peak) = sorted(fitting.items())[-2:]
        if second_peak > first_peak:
            slope = (second_peak - first_peak) / (second - first)
            number = second + int((allowed_bytes - second_peak) / slope)
        number = min(number, _MAX_GROWTH * low)
    return max(low + 1, min(number, high - 1))


def best_budget(rates: dict[float, float]) -> float:
    """Returns the smallest budget that processes about as much audio a second as the fastest one.

    Args:
        rates: Audio-seconds a second by budget in seconds.
    """
    fastest = max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= (1 - _RATE_TOLERANCE) * fastest)


def _longest_cut(source: str, dataset: AudioNoiseDataset) -> LongestCut:
    plan, longest = dataset.plan, _longest_samples(dataset)
    return LongestCut(
        source=source,
        seconds=longest / plan.sampling_rate,
        budget_seconds=plan.budget.cost(longest) / plan.sampling_rate,
    )


def _highest_units(dataset: AudioNoiseDataset) -> int:
    """Returns a budget above which the batches do not change."""
    plan = dataset.plan
    num_positions = sum(bucket.num_cuts for bucket in plan.buckets)
    num_cuts = math.ceil(num_positions / plan.config.microbatches_per_step)
    num_cuts = min(num_cuts, plan.config.max_cuts or num_cuts)
    return math.ceil(num_cuts * plan.budget.cost(_longest_samples(dataset)) / plan.sampling_rate / RESOLUTION_S)


def _longest_samples(dataset: AudioNoiseDataset) -> int:
    """Returns the length to which the longest cut is extended: that of `min_audio_seconds` at least."""
    longest = max(int(np.max(lengths[-1:])) for lengths in dataset.corpus.num_samples if len(lengths))
    return max(longest, dataset.plan.min_samples)

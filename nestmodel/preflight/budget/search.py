"""Finds, by trials, the largest `max_batch_seconds` whose optimizer steps fit into memory, and the best one.

Nothing is trained or written. `shapes` decides what to try, and `trial` runs each trial in a process of
its own.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from nestdata import AudioNoiseDataset, BatchPlan
from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.preflight.budget.shapes import (
    best_budget,
    critical_shapes,
    describe_shapes,
    largest_fitting,
    shapes_of,
    typical_shapes,
)
from nestmodel.preflight.measure.child_trial import TrialResult, TrialSettings, run_trial
from nestmodel.preflight.measure.memory import available_bytes, gigabytes, parse_bytes
from nestmodel.preflight.measure.trial_step import Shape
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel

_RESOLUTION_S = 5
_NUM_HALVINGS = 4
_RETREAT = 0.95


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """Limits of a search for a batch budget."""

    memory_limit: str | None = None
    """Memory of one rank with its unit, such as `8GiB`. Required on a CPU; on a GPU, None means all free memory."""

    memory_margin: float = 0.1
    """Share of the memory that stays free, in [0, 1): for fragmentation, buffers of NCCL, other processes."""

    timeout_s: float = 300.0
    """Longest time for the start of a trial, and for one step, in seconds."""

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit, "preflight.memory_limit")
        if not 0.0 <= self.memory_margin < 1.0:
            raise ConfigError(f"preflight.memory_margin is {self.memory_margin:g}: expected a share in [0, 1).")
        if self.timeout_s <= 0:
            raise ConfigError(f"preflight.timeout_s is {self.timeout_s:g}: give a positive number of seconds.")


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
class BudgetReport:
    """The result of a search for a batch budget."""

    device: str
    allowed_bytes: int
    """Memory that a step was allowed to use: the limit without the margin."""

    largest_seconds: float
    """Largest `max_batch_seconds` that fits, to 5 s or to 2 %."""

    best_seconds: float
    """Smallest `max_batch_seconds` that processes at most 2 % less audio a second than the fastest."""

    is_limited_by_corpus: bool
    """Whether a larger budget would change no batch, because the corpus or `max_cuts` sets the limit."""

    trials: tuple[BudgetTrial, ...]
    """One entry for each budget that was tried, in ascending order."""

    def yaml(self) -> str:
        """Returns the lines of a configuration file that set the best budget."""
        return f"data:\n  plan:\n    max_batch_seconds: {self.best_seconds:.1f}\n"

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary of values that JSON can represent."""
        return asdict(self)


def find_budget(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: BudgetConfig = BudgetConfig(),
    on_trial: Callable[[str], None] | None = None,
) -> BudgetReport:
    """Finds the largest and the best batch budget for the memory of one rank.

    A trial runs optimizer steps on noise with the sizes, precision and checkpointing of the run, and with DDP's copy
    of the gradients. The search tries only the shapes that may need the most memory; its result is accepted only if
    all shapes of an epoch fit in one process.

    Args:
        model: The model of the run; it is not changed.
        data: The data of the run; the plan's other settings are kept.
        trainer: The trainer, configured as for one rank of the run.
        config: Memory limit and margin.
        on_trial: Called with a line of text before and after each trial.

    Raises:
        ConfigError: The trainer has several ranks, or the memory limit is missing or more than what is available.
        TrainingError: Not even the smallest budget fits, or a trial failed for a reason other than memory.
    """
    _check(model, data, trainer, config)
    search = _Search(model, data, trainer, config, on_trial or (lambda _: None))
    units = search.largest()
    best = search.best(units)
    return BudgetReport(
        device=search.settings.device,
        allowed_bytes=search.allowed_bytes,
        largest_seconds=float(units * _RESOLUTION_S),
        best_seconds=best,
        is_limited_by_corpus=units == search.highest,
        trials=tuple(sorted(search.trials.values(), key=lambda trial: trial.max_batch_seconds)),
    )


class _Search:
    """Runs and records trials. Budgets are counted in units of 5 s."""

    def __init__(
        self,
        model: NestModel,
        data: NestDataModule,
        trainer: pl.Trainer,
        config: BudgetConfig,
        on_trial: Callable[[str], None],
    ) -> None:
        self._dataset = data.train_dataset
        self._config = self._dataset.plan.config
        self._rate = data.sampling_rate
        self._on_trial = on_trial
        limit = config.memory_limit
        self.settings = TrialSettings(
            model=model.config,
            kernels=model.kernels,
            num_shapes=self._config.num_shapes,
            precision=str(trainer.precision),
            device=str(trainer.strategy.root_device),
            num_threads=torch.get_num_threads(),
            limit_bytes=None if limit is None else parse_bytes(limit, "preflight.memory_limit"),
            margin=config.memory_margin,
            timeout_s=config.timeout_s,
        )
        self.allowed_bytes = 0
        self.trials: dict[float, BudgetTrial] = {}
        self.lowest = max(_lowest_units(each) for each in (data.train_dataset, data.val_dataset) if each is not None)
        self.highest = max(self.lowest, _highest_units(self._dataset))

    def largest(self) -> int:
        """Returns the largest budget that fits.

        Raises:
            TrainingError: Not even the smallest budget fits.
        """
        start = round(self._config.max_batch_seconds / _RESOLUTION_S)
        found = self._largest_of(self._peak_of_critical, start, self.highest)
        if found is not None and self._peak_of_all(found) is None:
            # A shape that was thought to be uncritical does not fit, or memory is fragmented by the other shapes.
            start, highest = int(_RETREAT * found), found - 1
            found = self._largest_of(self._peak_of_all, start, highest) if highest >= self.lowest else None
        if found is None:
            raise self._nothing_fits()
        return found

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
            if number:
                self._measure_rate(units)
            seconds = float(units * _RESOLUTION_S)
            rates[seconds] = self.trials[seconds].audio_s_per_s or 0.0
            if best_budget(rates) != seconds:  # smaller budgets are slower still
                break
        return best_budget(rates)

    def _largest_of(self, peak_of: Callable[[int], int | None], start: int, highest: int) -> int | None:
        return largest_fitting(peak_of, lambda: self.allowed_bytes, start=start, lowest=self.lowest, highest=highest)

    def _peak_of_critical(self, units: int) -> int | None:
        """Tries the shapes that may need the most memory; returns the peak, or None if one of them does not fit."""
        return self._run(units, critical_shapes(self._plan(units)), num_timed=0)

    def _peak_of_all(self, units: int) -> int | None:
        """Tries all shapes, and measures the speed of typical ones; returns the peak, or None if one does not fit."""
        plan = self._plan(units)
        typical = typical_shapes(plan)
        return self._run(units, [*shapes_of(plan), *typical], num_timed=len(typical))

    def _measure_rate(self, units: int) -> None:
        """Measures the speed of the typical shapes of a budget after a warm-up."""
        shapes = typical_shapes(self._plan(units))
        if self._run(units, shapes * 2, num_timed=len(shapes)) is None:
            raise TrainingError(
                f"a batch of {units * _RESOLUTION_S} s does not fit, but a larger one did: other processes use the "
                f"memory of {self.settings.device}. Try again when nothing else runs there."
            )

    def _run(self, units: int, shapes: list[Shape], *, num_timed: int) -> int | None:
        """Runs and records a trial.

        Args:
            units: The budget.
            shapes: The shapes of the steps, in order.
            num_timed: Number of the last steps whose speed is measured.

        Returns:
            The peak memory in bytes, or None if a shape does not fit.
        """
        seconds = float(units * _RESOLUTION_S)
        result = self._try(f"{seconds:g} s", shapes)
        rate = None
        if num_timed and not result.too_large:
            each = self._config.microbatches_per_step
            time_s = sum(time.seconds_per_microbatch(each) for time in result.times[-num_timed:])
            rate = sum(cuts * samples for cuts, samples in shapes[-num_timed:]) / self._rate / time_s
        known = self.trials.get(seconds)
        peak = None if result.too_large else max(result.peak_bytes, (known.peak_bytes if known else None) or 0)
        self.trials[seconds] = BudgetTrial(
            max_batch_seconds=seconds,
            fits=result.too_large is None,
            peak_bytes=peak,
            audio_s_per_s=rate,
            too_large=describe_shapes([result.too_large], self._rate) if result.too_large else None,
        )
        return None if result.too_large else result.peak_bytes

    def _try(self, what: str, shapes: list[Shape]) -> TrialResult:
        longest = describe_shapes(shapes[:2], self._rate)
        self._on_trial(f"trying {what}: {len(set(shapes))} shapes, {longest}{' ...' if len(set(shapes)) > 2 else ''}")
        result = run_trial(self.settings, shapes)
        self.allowed_bytes = result.allowed_bytes
        if result.too_large:
            outcome = f"{describe_shapes([result.too_large], self._rate)} does not fit"
        else:
            outcome = f"fits, {gigabytes(result.peak_bytes)} of {gigabytes(result.allowed_bytes)}"
        self._on_trial(f"  {outcome}")
        return result

    def _plan(self, units: int) -> BatchPlan:
        return BatchPlan.of(self._dataset.corpus, replace(self._config, max_batch_seconds=float(units * _RESOLUTION_S)))

    def _nothing_fits(self) -> TrainingError:
        """Finds the length that would fit, and returns an error that contains it."""
        plan = self._plan(self.lowest)
        longest = max(bucket.padded_samples for bucket in plan.buckets)
        remedies = (
            ""
            if self.settings.model.encoder.checkpoint_activations
            else (", or set model.config.encoder.checkpoint_activations")
        )
        start, highest = int(longest / self._rate / 2), math.ceil(longest / self._rate)
        fitting = largest_fitting(
            self._peak_of_one,
            lambda: self.allowed_bytes,
            start=start,
            lowest=1,
            highest=highest,
        )
        allowed = gigabytes(self.allowed_bytes)
        if fitting is None:
            return TrainingError(
                f"not even one cut of 1 s fits into {allowed}: the weights, gradients and moments of the model take "
                f"the memory. Raise --memory_limit, or choose a smaller model."
            )
        if fitting == highest:
            return TrainingError(
                f"max_batch_seconds cannot be below {self.lowest * _RESOLUTION_S} s, because the longest cut lasts "
                f"{longest / self._rate:.1f} s, and batches of that size do not fit into {allowed}. Set "
                f"data.plan.max_cuts, or prepare the corpus with a lower --max-seconds{remedies}."
            )
        return TrainingError(
            f"not even one cut of {longest / self._rate:.1f} s fits into {allowed}; up to {fitting} s do. Prepare the "
            f"corpus with --max-seconds {fitting} or --window-seconds {fitting}{remedies}."
        )

    def _peak_of_one(self, seconds: int) -> int | None:
        result = self._try("one cut", [(1, seconds * self._rate)])
        return None if result.too_large else result.peak_bytes


def _check(model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: BudgetConfig) -> None:
    if trainer.world_size > 1:
        raise ConfigError(
            f"a budget is searched by one process, and the trainer has {trainer.world_size} ranks. Add "
            "--trainer.devices 1 --trainer.num_nodes 1, and start it without torchrun or srun on a machine of the "
            "kind that the run uses: the result holds for any number of ranks."
        )
    if data.sampling_rate != model.config.features.sampling_rate:
        raise ConfigError(
            f"the corpus is at {data.sampling_rate} Hz, the model for {model.config.features.sampling_rate} Hz. "
            f"Prepare it with --sampling-rate {model.config.features.sampling_rate}."
        )
    device = trainer.strategy.root_device.type
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"a budget cannot be searched on {device}: use --trainer.accelerator gpu or cpu.")
    if device == "cpu":
        _check_limit_of_cpu(config.memory_limit)


def _check_limit_of_cpu(memory_limit: str | None) -> None:
    available = available_bytes()
    if not available:
        raise ConfigError("a budget for a CPU can be searched on Linux only, because the search reads /proc.")
    if memory_limit is None:
        raise ConfigError(
            "on a CPU, say how much memory one rank may use: --memory_limit 8GiB, for example. "
            f"{gigabytes(available)} are available here."
        )
    if parse_bytes(memory_limit, "preflight.memory_limit") > available:
        raise ConfigError(
            f"preflight.memory_limit is {memory_limit}, but only {gigabytes(available)} are available here. Lower it, "
            "or end other processes."
        )


def _lowest_units(dataset: AudioNoiseDataset) -> int:
    """Returns the smallest budget that the longest cut fits into."""
    plan = dataset.plan
    longest = max(_longest_samples(dataset), plan.min_samples)
    return math.ceil(plan.budget.cost(longest) / plan.sampling_rate / _RESOLUTION_S)


def _highest_units(dataset: AudioNoiseDataset) -> int:
    """Returns a budget above which the batches do not change."""
    plan = dataset.plan
    longest = max(_longest_samples(dataset), plan.min_samples)
    num_positions = sum(bucket.num_cuts for bucket in plan.buckets)
    num_cuts = math.ceil(num_positions / plan.config.microbatches_per_step)
    num_cuts = min(num_cuts, plan.config.max_cuts or num_cuts)
    return math.ceil(num_cuts * plan.budget.cost(longest) / plan.sampling_rate / _RESOLUTION_S)


def _longest_samples(dataset: AudioNoiseDataset) -> int:
    return max(int(np.max(lengths[-1:])) for lengths in dataset.corpus.num_samples if len(lengths))

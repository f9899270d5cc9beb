"""The search for a batch budget: a bisection over `max_batch_seconds`. Nothing is trained or written."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from nestdata import AudioNoiseDataset, BatchPlan
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.memory import available_bytes
from nestmodel.preflight.memory import gigabytes
from nestmodel.preflight.preflight_config import BudgetConfig, parse_bytes
from nestmodel.preflight.trial import describe_shapes, largest_shapes
from nestmodel.preflight.trial_child import TrialChild, TrialSettings
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel, check_sampling_rate

_RESOLUTION_S = 5
"""Budgets are counted in units of this length."""

_EXACT_PARTS = 50
"""The search ends when it is exact to one unit, or to one part in this many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetTrial:
    """The result of the trial of one budget."""

    max_batch_seconds: float
    fits: bool
    peak_bytes: int | None
    """Peak memory; None if the budget does not fit."""

    audio_s_per_s: float | None
    """Seconds of audio that a step of the shape with the most samples takes in a second; None if it does not fit."""

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

    is_limited_by_corpus: bool
    """Whether a larger budget would change no batch, because the corpus or `max_cuts` sets the limit."""

    trials: tuple[BudgetTrial, ...]
    """One entry for each budget that was tried, in ascending order."""

    def yaml(self) -> str:
        """Returns the lines of a configuration file that set the largest budget."""
        return f"data:\n  plan:\n    max_batch_seconds: {self.largest_seconds:.1f}\n"

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary of values that JSON can represent."""
        return asdict(self)


def find_budget(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: BudgetConfig = BudgetConfig(),
    on_line: Callable[[str], None] | None = None,
) -> BudgetReport:
    """Finds the largest batch budget for the memory of one rank.

    A trial runs optimizer steps on noise with the sizes, precision and checkpointing of the run, and with DDP's copy
    of the gradients, for the largest shapes of an epoch.

    Args:
        model: The model of the run; it is not changed.
        data: The data of the run; the plan's other settings are kept.
        trainer: The trainer, configured as for one rank of the run.
        config: Memory limit and margin.
        on_line: Called with a line of text before and after each trial.

    Raises:
        ConfigError: The trainer has several ranks, or the memory limit is missing or more than what is available.
        TrainingError: Not even the smallest budget fits, or a trial failed for a reason other than memory.
    """
    _check(model, data, trainer, config)
    plan_config, rate = data.plan.config, data.sampling_rate
    source, longest_s, budget_s = _longest_cut(data)
    lowest = math.ceil(budget_s / _RESOLUTION_S)
    highest = max(lowest, _highest_units(data.train_dataset))
    show = on_line or (lambda _: None)
    trials: dict[int, BudgetTrial] = {}
    allowed = 0

    def fits(units: int) -> bool:
        nonlocal allowed
        seconds = float(units * _RESOLUTION_S)
        plan = BatchPlan.of(data.train_dataset.corpus, replace(plan_config, max_batch_seconds=seconds))
        shapes = largest_shapes(plan)
        show(f"trying {seconds:g} s: {describe_shapes(shapes, rate)}")
        result = child.run(plan.config, shapes)
        allowed = result.allowed_bytes
        too_large = describe_shapes([result.too_large], rate) if result.too_large else None
        trials[units] = BudgetTrial(
            max_batch_seconds=seconds,
            fits=too_large is None,
            peak_bytes=None if too_large else result.peak_bytes,
            audio_s_per_s=None if too_large else shapes[0][0] * shapes[0][1] / rate / result.seconds[0],
            too_large=too_large,
        )
        memory = f"{gigabytes(result.peak_bytes)} of {gigabytes(allowed)}"
        show(f"  {too_large} does not fit" if too_large else f"  fits, {memory}")
        return too_large is None

    with closing(TrialChild(_trial_settings(model, trainer, config))) as child:
        start = round(plan_config.max_batch_seconds / _RESOLUTION_S)
        largest = largest_fitting(fits, start=start, lowest=lowest, highest=highest)
    if largest is None:
        raise TrainingError(
            f"a batch of {trials[lowest].too_large} does not fit into {gigabytes(allowed)}, and max_batch_seconds "
            f"cannot be below {lowest * _RESOLUTION_S} s, because the longest cut of {source} lasts "
            f"{longest_s:.1f} s. Prepare it with a lower --max-seconds, or set data.plan.max_cuts or "
            "model.config.encoder.checkpoint_activations."
        )
    return BudgetReport(
        device=str(trainer.strategy.root_device),
        allowed_bytes=allowed,
        largest_seconds=float(largest * _RESOLUTION_S),
        is_limited_by_corpus=largest == highest,
        trials=tuple(trials[units] for units in sorted(trials)),
    )


def largest_fitting(fits: Callable[[int], bool], *, start: int, lowest: int, highest: int) -> int | None:
    """Returns the largest number in [lowest, highest] that fits, to 1 or to 2 %, if every smaller number fits as well.

    `start` is tried after `lowest`, and doubled until it does not fit.
    """
    if not fits(lowest):
        return None
    low, high = lowest, highest + 1  # what fits, and what does not
    number = min(max(start, lowest + 1), highest)
    while high - low > max(1, low // _EXACT_PARTS):
        if fits(number):
            low = number
        else:
            high = number
        number = (low + high) // 2 if high <= highest else min(2 * low, highest)
    return low


def _check(model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: BudgetConfig) -> None:
    if trainer.world_size > 1:
        raise ConfigError(
            f"a budget is searched by one process, and the trainer has {trainer.world_size} ranks. Add "
            "--trainer.devices 1 --trainer.num_nodes 1, and start it without torchrun or srun."
        )
    check_sampling_rate(model.config, data.sampling_rate)
    available, limit = available_bytes(), config.memory_limit
    if trainer.strategy.root_device.type == "cpu" and (limit is None or parse_bytes(limit) > available):
        raise ConfigError(
            f"on a CPU, give the memory that one rank may use, at most the {gigabytes(available)} that are available "
            f"here: --memory-limit 8GiB, for example. It is {limit or 'not set'}."
        )


def _trial_settings(model: NestModel, trainer: pl.Trainer, config: BudgetConfig) -> TrialSettings:
    limit = config.memory_limit
    return TrialSettings(
        model=model.config,
        backend=model.backend_name,
        precision=str(trainer.precision),
        device=str(trainer.strategy.root_device),
        num_threads=torch.get_num_threads(),
        limit_bytes=None if limit is None else parse_bytes(limit),
        margin=config.memory_margin,
        timeout_s=config.timeout_s,
    )


def _longest_cut(data: NestDataModule) -> tuple[str, float, float]:
    """Returns the key of the corpus with the longest cut, its seconds, and the budget that it needs in seconds.

    The budget is more than the length with `quadratic_seconds`.
    """
    cuts = []
    for source, dataset in (("data.corpus", data.train_dataset), ("data.val_corpus", data.val_dataset)):
        if dataset is not None:
            longest, rate = _longest_samples(dataset), dataset.plan.sampling_rate
            cuts.append((source, longest / rate, dataset.plan.budget.cost(longest) / rate))
    return max(cuts, key=lambda cut: cut[1])


def _highest_units(dataset: AudioNoiseDataset) -> int:
    """Returns a budget above which the batches do not change."""
    plan = dataset.plan
    num_positions = sum(bucket.num_cuts for bucket in plan.buckets)
    num_cuts = math.ceil(num_positions / plan.config.microbatches_per_step)
    num_cuts = min(num_cuts, plan.config.max_cuts or num_cuts)
    return math.ceil(num_cuts * plan.budget.cost(_longest_samples(dataset)) / plan.sampling_rate / _RESOLUTION_S)


def _longest_samples(dataset: AudioNoiseDataset) -> int:
    """Returns the length of the longest cut in samples, after it was extended to `min_audio_seconds` if shorter."""
    longest = max(int(np.max(lengths[-1:])) for lengths in dataset.corpus.num_samples if len(lengths))
    return max(longest, dataset.plan.min_samples)

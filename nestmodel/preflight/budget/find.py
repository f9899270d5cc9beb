"""The search for a batch budget: runs each trial in a process of its own. Nothing is trained or written."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytorch_lightning as pl
import torch

from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.preflight.budget.check import wrong_sampling_rate
from nestmodel.preflight.budget.search import RESOLUTION_S, BudgetSearch, BudgetTrial
from nestmodel.preflight.measure.child_trial import TrialSettings, run_trial
from nestmodel.preflight.measure.memory import MEMORY_MARGIN, available_bytes, gigabytes, parse_bytes
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """Limits of a search for a batch budget."""

    memory_limit: str | None = None
    """Memory of one rank with its unit, such as `8GiB`. Required on a CPU; on a GPU, None means all free memory."""

    memory_margin: float = MEMORY_MARGIN
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
    settings = _trial_settings(model, data, trainer, config)
    search = BudgetSearch(data, settings.device, lambda shapes: run_trial(settings, shapes), on_trial)
    units = search.largest()
    if units is None:
        raise _nothing_fits(search, model, data)
    best = search.best(units)
    return BudgetReport(
        device=settings.device,
        allowed_bytes=search.allowed_bytes,
        largest_seconds=float(units * RESOLUTION_S),
        best_seconds=best,
        is_limited_by_corpus=units == search.highest,
        trials=tuple(sorted(search.trials.values(), key=lambda trial: trial.max_batch_seconds)),
    )


def _check(model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: BudgetConfig) -> None:
    if trainer.world_size > 1:
        raise ConfigError(
            f"a budget is searched by one process, and the trainer has {trainer.world_size} ranks. Add "
            "--trainer.devices 1 --trainer.num_nodes 1, and start it without torchrun or srun on a machine of the "
            "kind that the run uses: the result holds for any number of ranks."
        )
    if problem := wrong_sampling_rate(model, data):
        raise ConfigError(problem)
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


def _trial_settings(model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: BudgetConfig) -> TrialSettings:
    limit = config.memory_limit
    return TrialSettings(
        model=model.config,
        kernels=model.kernels,
        num_shapes=data.train_dataset.plan.config.num_shapes,
        precision=str(trainer.precision),
        device=str(trainer.strategy.root_device),
        num_threads=torch.get_num_threads(),
        limit_bytes=None if limit is None else parse_bytes(limit, "preflight.memory_limit"),
        margin=config.memory_margin,
        timeout_s=config.timeout_s,
    )


def _nothing_fits(search: BudgetSearch, model: NestModel, data: NestDataModule) -> TrainingError:
    """Finds the length that would fit, and returns an error that contains it."""
    longest_s = max(bucket.padded_samples for bucket in search.plan(search.lowest).buckets) / data.sampling_rate
    highest = math.ceil(longest_s)
    fitting, allowed = search.longest_cut(highest), gigabytes(search.allowed_bytes)
    if fitting is None:
        return TrainingError(
            f"not even one cut of 1 s fits into {allowed}: the weights, gradients and moments of the model take "
            f"the memory. Raise --memory_limit, or choose a smaller model."
        )
    has_checkpoints = model.config.encoder.checkpoint_activations
    remedy = "" if has_checkpoints else ", or set model.config.encoder.checkpoint_activations"
    if fitting == highest:
        return TrainingError(
            f"max_batch_seconds cannot be below {search.lowest * RESOLUTION_S} s, because the longest cut of "
            f"{search.longest.source} lasts {search.longest.seconds:.1f} s, and batches of that size do not fit "
            f"into {allowed}. Set data.plan.max_cuts, or prepare the corpus with a lower --max-seconds{remedy}."
        )
    return TrainingError(
        f"not even one cut of {longest_s:.1f} s fits into {allowed}; up to {fitting} s do. Prepare the corpus with "
        f"--max-seconds {fitting} or --window-seconds {fitting}{remedy}."
    )

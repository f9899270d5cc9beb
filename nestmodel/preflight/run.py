"""Runs the preflight on all ranks: settings, disk, shards, audio, memory of a step, feeding, store, and collectives.

This module holds the list of checks and their order. A check that raises an error on a rank has failed on that rank,
and the other checks continue. If a rank does not answer in time, it is named and the preflight ends. Nothing is
trained or written.

To add a check, write a function that returns a `CheckResult` and add a line to `rank_checks`.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import pytorch_lightning as pl
import torch

from nestdata import last_error_line
from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.preflight.budget.check import check_step
from nestmodel.preflight.checks import (
    check_collectives,
    check_disk,
    check_reading,
    check_restarts,
    check_shared_memory,
    describe_look_ahead,
)
from nestmodel.preflight.exchange import StoreExchange
from nestmodel.preflight.feeding import check_feeding
from nestmodel.preflight.measure.collectives import allocate_buffers
from nestmodel.preflight.measure.loader_speed import cores_of_rank, own_cores
from nestmodel.preflight.report import CheckReport, CheckResult, PreflightReport
from nestmodel.preflight.settings import compare_settings, rank_settings_or_error
from nestmodel.preflight.shards import check_shards
from nestmodel.preflight.stores.check import check_object_store
from nestmodel.training.data import NestDataModule
from nestmodel.training.lightning_private import launched_processes, set_process_group_timeout
from nestmodel.training.module import NestModel

_LAUNCHED_TIMEOUT_S = 20.0

RankResults = list[CheckResult | None]
"""Results of one check, one per rank; None for a rank that did not answer in time."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightConfig:
    """Extent of a preflight."""

    num_batches: int = 3
    """Number of batches that each rank reads."""

    timeout_s: float = 300.0
    """How long ranks wait for each other, at the start and in each check, in seconds."""

    feeding_seconds: float = 2.0
    """How long each number of loader workers is measured, in seconds; 0 skips the check `feeding`."""

    store_seconds: float = 2.0
    """How long the object store of the speech is measured, in seconds, with single and with parallel requests; 0
    leaves the measurement out."""

    def __post_init__(self) -> None:
        if self.store_seconds < 0:
            raise ConfigError(f"preflight.store_seconds is {self.store_seconds:g}: give 0 or a positive number.")
        if self.feeding_seconds < 0:
            raise ConfigError(
                f"preflight.feeding_seconds is {self.feeding_seconds:g}: give a number of seconds, or 0 for none."
            )
        if self.num_batches < 1:
            raise ConfigError(f"preflight.num_batches is {self.num_batches}: give at least 1.")
        if self.timeout_s <= 0:
            raise ConfigError(f"preflight.timeout_s is {self.timeout_s:g}: give a positive number of seconds.")


def rank_checks(
    model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: PreflightConfig
) -> list[tuple[str, Callable[[], CheckResult]]]:
    """Returns names and functions of the checks that each rank performs independently, in the order they run."""
    return [
        ("restarts", lambda: check_restarts(os.environ)),
        ("disk", lambda: check_disk(model, trainer)),
        ("shared memory", lambda: check_shared_memory(data, trainer)),
        ("shards", lambda: check_shards(data, trainer, config.timeout_s)),
        ("reading", lambda: check_reading(data, trainer, config.num_batches)),
        ("training step", lambda: check_step(model, data, trainer)),
    ]


def run_preflight(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: PreflightConfig = PreflightConfig(),
    on_report: Callable[[PreflightReport], None] | None = None,
) -> PreflightReport:
    """Runs all checks on all ranks.

    Ranks are started as by `trainer.fit`. With several ranks, call `fit` on another trainer afterwards.

    Args:
        model: The model of the run; it is not changed.
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        config: Extent of the preflight.
        on_report: Called on rank 0 before any rank returns, because some launchers end all ranks as soon as one exits.

    Returns:
        The report; it is equal on all ranks.

    Raises:
        TrainingError: The ranks could not form a process group, or rank 0 does not answer.
    """
    launcher: Any = trainer.strategy.launcher
    if launcher is None:
        return _run(model, data, trainer, config, on_report)
    return cast(PreflightReport, launcher.launch(_run, model, data, trainer, config, on_report))


def _run(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: PreflightConfig,
    on_report: Callable[[PreflightReport], None] | None,
) -> PreflightReport:
    with _process_group(trainer, config.timeout_s):
        preflight = _Preflight(model, data, trainer, config)
        report = preflight.report()
        if trainer.is_global_zero and on_report is not None:
            on_report(report)
        _finish(trainer, preflight.exchange)
    return report


class _Preflight:
    """Runs the checks of this rank, and exchanges their results with the other ranks.

    The process group must have been formed.
    """

    def __init__(self, model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: PreflightConfig) -> None:
        self._model = model
        self._data = data
        self._trainer = trainer
        self._config = config
        self._figures: dict[str, float] = {}  # of this rank
        self.exchange = StoreExchange(trainer.global_rank, trainer.world_size, config.timeout_s)

    def report(self) -> PreflightReport:
        """Runs all checks, up to the first one for which a rank does not answer."""
        missing = CheckResult(
            status="failed",
            value="no answer",
            advice=f"did not answer within {self._config.timeout_s:g} s. Look at its output, and at its machine.",
        )
        checks = []
        for name, results in self._results_of_checks():
            checks.append(CheckReport(name=name, ranks=tuple(result or missing for result in results)))
            if None in results:
                break
        device = str(self._trainer.strategy.root_device.type)
        return PreflightReport(world_size=self._trainer.world_size, device=device, checks=tuple(checks))

    def _results_of_checks(self) -> Iterator[tuple[str, RankResults]]:
        """Yields the name and the results of each check, equal on all ranks."""
        model, data, trainer, config, figures = self._model, self._data, self._trainer, self._config, self._figures
        yield "settings", self._check_settings()
        # Gathered in any case, because ranks may differ in the settings that decide whether it is shown.
        described = self._check_on_all_ranks("look-ahead", lambda: describe_look_ahead(model))
        if any(result is None or result.status != "skipped" for result in described):
            yield "look-ahead", described
        for name, check in rank_checks(model, data, trainer, config):
            # A loader would wait for a store that does not answer, for longer than the others wait for this rank.
            is_blocked = name == "reading" and bool(figures.get("unreachable_shards"))
            yield name, self._check_on_all_ranks(name, _blocked if is_blocked else check)
        yield "feeding", self._check_feeding()
        measure_s = 0.0 if figures.get("unreachable_shards") else config.store_seconds
        step_rate = figures.get("step_audio_s_per_s")
        check = lambda: check_object_store(data, trainer, measure_s, step_rate)  # noqa: E731
        yield "store", self._check_on_all_ranks("store", check)
        yield "collectives", self._check_collectives()

    def _check_on_all_ranks(self, topic: str, check: Callable[[], CheckResult]) -> RankResults:
        """Runs a check on this rank and returns the results of all ranks; an error of the check is a failed result."""
        try:
            result = check()
        except Exception as error:
            result = CheckResult(status="failed", value=type(error).__name__, advice=last_error_line(error))
        results = [
            None if fields is None else CheckResult(**{**fields, "notes": tuple(fields["notes"])})
            for fields in self.exchange.all_gather(topic, asdict(result))
        ]
        own = results[self._trainer.global_rank]
        self._figures |= own.figures if own is not None else {}
        return results

    def _check_settings(self) -> RankResults:
        settings = rank_settings_or_error(self._model, self._data, self._trainer)
        gathered = self.exchange.all_gather("settings", settings)
        results = iter(compare_settings([answer for answer in gathered if answer is not None]))
        return [None if answer is None else next(results) for answer in gathered]

    def _check_feeding(self) -> RankResults:
        """Measures loader and step on all ranks at the same time, as they compete for the cores of their node."""
        cores = self.exchange.all_gather("cores", own_cores())

        def check() -> CheckResult:
            if not self._config.feeding_seconds:
                return CheckResult(status="skipped", value="not asked for")
            if not {"step_seconds", "seconds_per_batch"} <= self._figures.keys():
                return CheckResult(status="skipped", value="batches or steps could not be measured")
            num_cores = cores_of_rank(cores, self._trainer.global_rank)
            return check_feeding(self._model, self._data, self._trainer, num_cores, self._config.feeding_seconds)

        return self._check_on_all_ranks("feeding", check)

    def _check_collectives(self) -> RankResults:
        """Times collectives, unless a rank cannot allocate their buffers: the others would wait until the timeout."""
        if self._trainer.world_size == 1:
            return [CheckResult(status="skipped", value="one rank")]
        buffers: list[torch.Tensor] = []

        def allocate() -> CheckResult:
            buffers.extend(allocate_buffers(self._model, self._trainer.strategy.root_device))
            return CheckResult(status="ok", value="allocated")

        allocated = self._check_on_all_ranks("buffers", allocate)
        if any(result is None or result.status == "failed" for result in allocated):
            return allocated
        microbatches_per_step = self._data.train_dataset.plan.config.microbatches_per_step
        step_s = self._figures.get("step_seconds")  # of one microbatch
        compute_s = None if step_s is None else step_s * max(1, microbatches_per_step // self._trainer.world_size)
        # NCCL aborts the process at the full timeout, before it could report a result.
        timeout_s = self._config.timeout_s / 2
        return self._check_on_all_ranks("collectives", lambda: check_collectives(buffers, timeout_s, compute_s))


def _blocked() -> CheckResult:
    return CheckResult(status="skipped", value="shards cannot be reached")


@contextmanager
def _process_group(trainer: pl.Trainer, timeout_s: float) -> Iterator[None]:
    """Forms the process group of the trainer's strategy, and destroys it at the end."""
    set_process_group_timeout(trainer, timeout_s)
    try:
        trainer.strategy.setup_environment()
    except (RuntimeError, ValueError) as error:
        if trainer.world_size == 1:
            raise
        raise TrainingError(
            f"rank {trainer.global_rank}: the {trainer.world_size} ranks did not connect within {timeout_s:g} s "
            f"({last_error_line(error)}). Start all of them, and check MASTER_ADDR and MASTER_PORT."
        ) from error
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _finish(trainer: pl.Trainer, exchange: StoreExchange) -> None:
    """Waits for all ranks, and for the processes that Lightning's launcher started."""
    # The launcher kills rank 0 as soon as another rank has exited with code 1, so its list is emptied.
    launched = launched_processes(trainer)
    processes = list(launched)
    launched.clear()
    exchange.finish()
    if processes:
        torch.distributed.destroy_process_group()
    for process in processes:
        try:
            process.wait(_LAUNCHED_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

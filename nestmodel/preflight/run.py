"""What one runs before the expensive run: do the ranks agree, is there room, can the audio be read, does a step fit?

Owns the order of the checks. A check that raises on one rank has failed there, and the others go
on; a rank that does not come back is named, and ends the preflight. Nothing is trained and nothing is written.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import pytorch_lightning as pl
import torch

from nestmodel.errors import ConfigError, TrainingError
from nestmodel.preflight.checks import (
    ERROR,
    check_disk,
    check_reading,
    check_restarts,
    check_shared_memory,
    compare_facts,
    last_line,
    run_facts,
)
from nestmodel.preflight.hardware import check_collectives, check_step
from nestmodel.preflight.report import CheckReport, CheckResult, PreflightReport
from nestmodel.preflight.store import StoreExchange
from nestmodel.training.data import NestDataModule
from nestmodel.training.lightning_private import launched_processes, set_process_group_timeout
from nestmodel.training.module import NestModel

_LAUNCHED_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightConfig:
    """How much is tried."""

    num_batches: int = 3
    """Batches that each rank reads."""

    timeout_s: float = 300.0
    """How long ranks wait for each other, in each check."""

    def __post_init__(self) -> None:
        if self.num_batches < 1:
            raise ConfigError(f"preflight.num_batches is {self.num_batches}: give at least 1.")
        if self.timeout_s <= 0:
            raise ConfigError(f"preflight.timeout_s is {self.timeout_s:g}: give a positive number of seconds.")


def run_preflight(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: PreflightConfig = PreflightConfig(),
    on_report: Callable[[PreflightReport], None] | None = None,
) -> PreflightReport:
    """Checks on all ranks what a run needs; they start as for `trainer.fit`, which has to be called on another trainer.

    Args:
        model: What is to be trained. It is left as it is.
        data: What it is to be trained on.
        trainer: As for the run.
        config: How much is tried.
        on_report: Called on rank 0 before any rank goes on: a launcher may end all of them once one has left.

    Returns:
        The same report on every rank.

    Raises:
        TrainingError: The ranks did not meet, or rank 0 has gone.
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
        meeting = StoreExchange(trainer.global_rank, trainer.world_size, config.timeout_s)
        checks = []
        for name, ranks in _results(model, data, trainer, config, meeting):
            missing = CheckResult(
                status="failed",
                value="did not come back",
                advice=f"did not come back within {config.timeout_s:g} s. Look at its output, and at its machine.",
            )
            checks.append(CheckReport(name=name, ranks=tuple(one or missing for one in ranks)))
            if None in ranks:
                break
        device = str(trainer.strategy.root_device.type)
        report = PreflightReport(world_size=trainer.world_size, device=device, checks=tuple(checks))
        if trainer.is_global_zero and on_report is not None:
            on_report(report)
        _let_go(trainer, meeting)
    return report


def _results(
    model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: PreflightConfig, meeting: StoreExchange
) -> Iterator[tuple[str, list[CheckResult | None]]]:
    """Yields name and results of check after check, the same on all ranks."""

    def of_all(name: str, check: Callable[[], CheckResult]) -> tuple[str, list[CheckResult | None]]:
        words = meeting.exchange(name, asdict(_attempt(check)))
        return name, [None if word is None else CheckResult(**word) for word in words]

    try:
        facts = run_facts(model, data, trainer)
    except Exception as error:
        facts = {ERROR: last_line(error)}
    told = meeting.exchange("settings", facts)
    compared = iter(compare_facts([one for one in told if one is not None]))
    yield "settings", [None if one is None else next(compared) for one in told]

    yield of_all("restarts", lambda: check_restarts(os.environ))
    yield of_all("disk", lambda: check_disk(model, trainer))
    yield of_all("shared memory", lambda: check_shared_memory(data, trainer))
    yield of_all("reading", lambda: check_reading(data, trainer, config.num_batches))
    name, steps = of_all("training step", lambda: check_step(model, data, trainer))
    yield name, steps

    if trainer.world_size == 1:
        yield "collectives", [CheckResult(status="skipped", value="one rank")]
        return
    buffers: list[torch.Tensor] = []

    def allocate() -> CheckResult:
        sizes = (1, sum(p.numel() for p in model.parameters() if p.requires_grad))
        buffers.extend(torch.zeros(size, device=trainer.strategy.root_device) for size in sizes)
        return CheckResult(status="ok", value="allocated")

    # A rank that cannot take part must not be waited for in a collective.
    _, ready = of_all("buffers", allocate)
    if any(one is None or one.status == "failed" for one in ready):
        yield "collectives", ready
        return
    own = steps[trainer.global_rank]
    step_s = own.figures.get("step_seconds") if own is not None else None
    share = max(1, data.train_dataset.plan.config.microbatches_per_step // trainer.world_size)
    patience_s = config.timeout_s / 2  # at the whole of it, NCCL would end the process, and nothing be told
    yield of_all(
        "collectives",
        lambda: check_collectives(buffers, patience_s, None if step_s is None else step_s * share),
    )


def _attempt(check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except Exception as error:
        return CheckResult(status="failed", value=type(error).__name__, advice=last_line(error))


@contextmanager
def _process_group(trainer: pl.Trainer, timeout_s: float) -> Iterator[None]:
    strategy = trainer.strategy
    set_process_group_timeout(trainer, timeout_s)
    try:
        strategy.setup_environment()
    except (RuntimeError, ValueError) as error:
        if trainer.world_size == 1:
            raise
        raise TrainingError(
            f"rank {trainer.global_rank}: the {trainer.world_size} ranks did not meet within {timeout_s:g} s "
            f"({last_line(error)}). Start all of them, and look at MASTER_ADDR and MASTER_PORT."
        ) from error
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _let_go(trainer: pl.Trainer, meeting: StoreExchange) -> None:
    # Lightning's launcher would kill rank 0 when it sees that another has ended with an exit code of 1.
    started = launched_processes(trainer)
    processes = list(started)
    started.clear()
    meeting.leave()
    if processes:
        torch.distributed.destroy_process_group()
    for process in processes:
        try:
            process.wait(_LAUNCHED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

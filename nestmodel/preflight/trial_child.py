"""Trials in a child process within a memory limit, one after another, so that a search survives running out of memory.

A child whose trial did not fit is replaced before the next trial, because a failed allocation may leave fragmented
memory behind. On a CPU, this process watches the resident memory of the child and ends it above the limit. A limit of
the address space (RLIMIT_AS) would be wrong: torch reserves gigabytes that it never touches. On a GPU, torch's
allocator enforces the limit.

The child ends itself if this process ends, and is the first process that Linux ends if memory runs out.
"""

import logging
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from nestdata import PlanConfig, last_error_line
from nestmodel.config import BackendName, NestConfig
from nestmodel.errors import TrainingError
from nestmodel.preflight.memory import resident_bytes
from nestmodel.preflight.trial import Shape, TrialResult, clean_up, run_shapes, trial_step_of

_POLL_S = 0.01
"""Interval at which the resident memory of a child is read."""


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings that are the same for all trials of a search."""

    model: NestConfig
    backend: BackendName
    precision: str
    device: str
    """`cpu`, or a GPU such as `cuda:0`."""

    num_threads: int
    limit_bytes: int | None
    """Memory of a trial, of which `margin` stays free; None sets no limit. On a GPU, free memory is a limit as well."""

    margin: float
    """Share of the memory that a trial must leave free, in [0, 1)."""

    timeout_s: float
    """Longest time for the start of a child and its first step, and for each other step, in seconds."""

    @property
    def limit_of_cpu(self) -> int:
        """What a trial on a CPU may use."""
        assert self.limit_bytes is not None
        return round(self.limit_bytes * (1 - self.margin))


class TrialChild:
    """Runs trials in a child process, which is started when it is needed. It has to be closed."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._child: BaseProcess | None = None
        self._connection: Connection

    def run(self, plan: PlanConfig, shapes: Sequence[Shape]) -> TrialResult:
        """Runs optimizer steps of each shape, as `run_shapes`, and returns whether all of them fit.

        Args:
            plan: Settings of the plan whose shapes these are.
            shapes: The shapes, at least one.

        Raises:
            TrainingError: The child failed for a reason other than memory, or made no progress in time.
        """
        result = self._watch(self._child or self._start(), plan, shapes)
        if result.too_large:
            self.close()
        return result

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._connection.close()
        self._child = None

    def _watch(self, child: BaseProcess, plan: PlanConfig, shapes: Sequence[Shape]) -> TrialResult:
        """Runs a trial in the child. On a CPU, waiting ends when the child needs too much memory."""
        settings, num_steps = self._settings, 0
        is_on_cpu, deadline = settings.device == "cpu", time.monotonic() + settings.timeout_s
        try:
            self._connection.send((plan, shapes))
            while not (is_on_cpu and resident_bytes(child.pid or 0) > settings.limit_of_cpu):
                if self._connection.poll(_POLL_S):
                    match self._connection.recv():
                        case TrialResult() as result:
                            return result
                        case str() as error:
                            raise TrainingError(f"a trial step failed: {error}")
                    num_steps, deadline = num_steps + 1, time.monotonic() + settings.timeout_s
                elif time.monotonic() > deadline:
                    raise TrainingError(
                        f"a trial made no progress for {settings.timeout_s:g} s. Raise --timeout_s if a step, or the "
                        "compilation of the blocks, takes longer."
                    )
        except (EOFError, OSError) as error:  # the child has ended
            child.join()
            if not (is_on_cpu and child.exitcode == -signal.SIGKILL):  # by Linux, which ran out of memory
                raise TrainingError(f"a trial ended with exit code {child.exitcode}. Its error is above.") from error
        # Without a finished step, the first shape is reported, even if the model itself does not fit.
        shape = shapes[min(num_steps // 2, len(shapes) - 1)]
        return TrialResult(too_large=shape, peak_bytes=0, allowed_bytes=settings.limit_of_cpu, seconds=())

    def _start(self) -> BaseProcess:
        context = get_context("spawn")
        self._connection, there = context.Pipe()
        self._child = context.Process(target=run_trials, args=(there, self._settings))
        with there:
            self._child.start()
        return self._child


def run_trials(connection: Connection, settings: TrialSettings) -> None:
    """Runs the trials that a connection describes, until it is closed.

    Sends None after each step, and the result, or an error as text, after each trial.
    """
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")  # libraries warn in the run as well
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    device = torch.device(settings.device)
    torch.set_num_threads(settings.num_threads)
    allowed = _limit_gpu(settings, device) if device.type == "cuda" else settings.limit_of_cpu
    while True:
        try:
            plan, shapes = connection.recv()
        except (EOFError, OSError):  # the parent needs no further trial, or has ended
            return
        outcome: TrialResult | str
        try:
            outcome = _run(settings, device, allowed, plan, shapes, lambda: connection.send(None))
        except Exception as error:
            outcome = last_error_line(error)
        connection.send(outcome)


def _run(
    settings: TrialSettings,
    device: torch.device,
    allowed: int,
    plan: PlanConfig,
    shapes: Sequence[Shape],
    on_step: Callable[[], None],
) -> TrialResult:
    torch.compiler.reset()  # code for the shapes of earlier trials would count towards torch's limit
    make_step = partial(trial_step_of, settings.model, settings.backend, _trainer(settings, device), plan, shapes)
    with clean_up(device):
        # With DDP's copy of the gradients, so that a budget holds for any number of ranks.
        return run_shapes(make_step, shapes, device=device, allowed_bytes=allowed, with_ddp=True, on_step=on_step)


def _limit_gpu(settings: TrialSettings, device: torch.device) -> int:
    """Makes torch enforce the limit of the memory, and returns it."""
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = round(min(free, settings.limit_bytes or free) * (1 - settings.margin))
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    return allowed


def _trainer(settings: TrialSettings, device: torch.device) -> pl.Trainer:
    precision: Any = settings.precision
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=precision,
        plugins=[LightningEnvironment()],  # ignores the cluster that this process may run on
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

"""A trial in a child process, within a memory limit.

Each trial has a process of its own, because an out-of-memory error may leave a GPU or an allocator in a state in which
later trials fail or need more memory. On a CPU, this process watches the resident memory of the child and ends it above
the limit. A limit of the address space (RLIMIT_AS) would be wrong: torch reserves gigabytes that it never touches. On a
GPU, torch's allocator enforces the limit.

The child ends itself if this process ends, and is the first process that Linux ends if memory runs out.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from nestdata import PlanConfig, last_error_line
from nestmodel.config import NestConfig
from nestmodel.errors import TrainingError
from nestmodel.nn.gpu.forms import Kernels
from nestmodel.preflight.measure.memory import resident_bytes
from nestmodel.preflight.measure.trial import TrialResult, run_shapes
from nestmodel.preflight.measure.trial_step import Shape, TrialStep, trial_step_of

_POLL_S = 0.01
"""Interval at which the resident memory of a child is read."""

_MAX_DETAIL = 300


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings that are the same for all trials of a search."""

    model: NestConfig
    kernels: Kernels
    num_shapes: int | None
    """Number of fixed shapes; None if there are hundreds."""

    precision: str
    device: str
    """`cpu`, or a GPU such as `cuda:0`."""

    num_threads: int
    limit_bytes: int | None
    """Memory of a trial, of which `margin` stays free. On a GPU, free memory is a limit as well; None sets no other."""

    margin: float
    """Share of the memory that a trial must leave free, in [0, 1)."""

    timeout_s: float
    """Longest time for the start of a trial, and for one step, in seconds."""

    @property
    def limit_of_cpu(self) -> int:
        """What a trial on a CPU may use."""
        assert self.limit_bytes is not None
        return round(self.limit_bytes * (1 - self.margin))


def run_trial(settings: TrialSettings, shapes: list[Shape]) -> TrialResult:
    """Runs optimizer steps of each shape in a child process, as `run_shapes`, and returns whether all of them fit.

    Raises:
        TrainingError: The child failed for a reason other than memory, or made no progress in time.
    """
    here, there = Pipe()
    command = [sys.executable, "-c", f"from {__name__} import main; main({there.fileno()})"]
    with here, tempfile.TemporaryFile("w+", errors="replace") as output:
        with there:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[there.fileno()]
            )
        with child:
            try:
                return _watch(child, here, settings, shapes)
            except (EOFError, OSError) as error:  # the child has ended
                detail = f"a trial ended with exit code {child.wait()}: {_last_line(output)}"
                raise TrainingError(detail) from error
            finally:
                child.kill()


def _watch(
    child: "subprocess.Popen[bytes]", connection: Connection, settings: TrialSettings, shapes: list[Shape]
) -> TrialResult:
    """Returns the result of a child. On a CPU, a child that needs too much memory is not waited for."""
    is_on_cpu, num_messages, deadline = settings.device == "cpu", 0, time.monotonic() + settings.timeout_s
    try:
        connection.send((settings, shapes))
        while not (is_on_cpu and resident_bytes(child.pid) > settings.limit_of_cpu):
            if connection.poll(_POLL_S):
                match connection.recv():
                    case TrialResult() as result:
                        return result
                    case str() as error:
                        raise TrainingError(f"a trial step failed: {error}")
                num_messages, deadline = num_messages + 1, time.monotonic() + settings.timeout_s
            elif time.monotonic() > deadline:
                raise TrainingError(
                    f"a trial made no progress for {settings.timeout_s:g} s. Raise --timeout_s if a step, or the "
                    "compilation of the blocks, takes longer."
                )
    except (EOFError, OSError):
        if not (is_on_cpu and child.wait() == -signal.SIGKILL):  # by the kernel, which ran out of memory
            raise
    # Without a finished step, the first shape is reported, even if the model itself does not fit.
    num_steps = max(0, num_messages - 1)
    shape = shapes[min(num_steps // 2, len(shapes) - 1)]
    return TrialResult(too_large=shape, peak_bytes=0, allowed_bytes=settings.limit_of_cpu, times=())


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    return lines[-1][:_MAX_DETAIL] if lines else "no message on standard error"


def main(descriptor: int) -> None:
    """Runs the trial that a connection describes; sends None at the start and after each step, then the result."""
    connection = Connection(descriptor)
    settings, shapes = connection.recv()
    connection.send(None)
    threading.Thread(target=_exit_with_parent, args=[connection], daemon=True).start()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        connection.send(_run(settings, shapes, lambda: connection.send(None)))
    except Exception as error:
        connection.send(last_error_line(error))


def _run(settings: TrialSettings, shapes: list[Shape], on_step: Callable[[], None]) -> TrialResult:
    device = torch.device(settings.device)
    torch.set_num_threads(settings.num_threads)
    allowed = _limit_gpu(settings, device) if device.type == "cuda" else settings.limit_of_cpu

    def make_step() -> TrialStep:
        seconds = max(cuts * samples for cuts, samples in shapes) / settings.model.features.sampling_rate
        plan = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=1, num_shapes=settings.num_shapes)
        return trial_step_of(settings.model, settings.kernels, _trainer(settings, device), plan)

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


def _exit_with_parent(connection: Connection) -> None:
    """Ends this process when its parent, which sends nothing more, has ended."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)

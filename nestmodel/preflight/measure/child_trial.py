"""One trial of a batch budget: optimizer steps of given shapes in a child process, within a memory limit.

Each trial has a process of its own, because an out-of-memory error may leave a GPU or an allocator in a state in which
later trials fail or need more memory. On a CPU, this process watches the resident memory of the child and ends it above
the limit. A limit of the address space (RLIMIT_AS) would be wrong: torch reserves gigabytes that it never touches. On a
GPU, torch's allocator enforces the limit.

The child ends itself if this process ends, and is the first process that Linux ends if memory runs out.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from nestdata import last_error_line
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.nn.gpu.kernel_choice import Kernels
from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.preflight.measure.memory import PeakMemory, resident_bytes
from nestmodel.preflight.measure.trial_step import Shape, StepTime, TrialStep, noise_batch

_POLL_S = 0.01
"""Interval at which the resident memory of a child is read."""

_MAX_DETAIL = 300


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings that are the same for all trials of a search."""

    model: NestConfig
    kernels: Kernels
    num_shapes: int | None
    """Number of fixed shapes, for compiled blocks; None if there are hundreds."""

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

    def __post_init__(self) -> None:
        if self.device == "cpu" and self.limit_bytes is None:
            raise ConfigError("a trial on a CPU needs a memory limit: give limit_bytes.")
        if not 0.0 <= self.margin < 1.0:
            raise ConfigError(f"the memory margin is {self.margin:g}: expected a share in [0, 1).")
        if self.timeout_s <= 0:
            raise ConfigError(f"the timeout of a trial is {self.timeout_s:g}: give a positive number of seconds.")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The outcome of a trial."""

    too_large: Shape | None
    """The shape whose step does not fit into memory; None if all steps fit."""

    peak_bytes: int
    """Peak memory; 0 if the trial does not fit."""

    allowed_bytes: int
    """Memory that the steps were allowed to use: the limit without the margin."""

    times: tuple[StepTime, ...]
    """Times of the steps, in the order of the shapes; fewer if one did not fit."""


def run_trial(settings: TrialSettings, shapes: list[Shape]) -> TrialResult:
    """Runs one optimizer step of each shape in a child process, in order, and returns whether all of them fit.

    Raises:
        TrainingError: The child failed for a reason other than memory, or made no progress in time.
    """
    command = [sys.executable, "-m", "nestmodel.preflight.measure.child_trial"]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):  # the exit code of the child is reported below
                child.stdin.write(json.dumps({**asdict(settings), "shapes": shapes}) + "\n")
                child.stdin.flush()
            return _Watch(child, settings, shapes, errors).result()
        finally:
            child.kill()
            with suppress(BrokenPipeError):  # what the child has not read is written again when stdin is closed
                child.stdin.close()


class _Watch:
    """Reads the messages of a child and ends it when its resident memory exceeds what is allowed."""

    def __init__(
        self, child: "subprocess.Popen[str]", settings: TrialSettings, shapes: list[Shape], errors: IO[str]
    ) -> None:
        self._child = child
        self._settings = settings
        self._shapes = shapes
        self._errors = errors
        self._allowed = round((settings.limit_bytes or 0) * (1 - settings.margin))
        self._times: list[StepTime] = []
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def result(self) -> TrialResult:
        """Returns the result as soon as the child has finished or was ended."""
        while True:
            message = self._next_message()
            if message is None:
                return self._out_of_memory()
            match message["kind"]:
                case "start":
                    self._allowed = message["allowed_bytes"]
                case "step":
                    self._times.append(StepTime(**message["time"]))
                case "out_of_memory":
                    return self._out_of_memory()
                case "end":
                    # The peak may have been between two readings of this process.
                    if message["peak_bytes"] > self._allowed:
                        return self._out_of_memory()
                    return TrialResult(
                        too_large=None,
                        peak_bytes=message["peak_bytes"],
                        allowed_bytes=self._allowed,
                        times=tuple(self._times),
                    )
                case _:
                    raise TrainingError(f"a trial step failed: {message['detail']}")

    def _next_message(self) -> dict[str, Any] | None:
        """Returns the next message; None if the child exceeded its memory."""
        deadline = time.monotonic() + self._settings.timeout_s
        is_on_cpu = self._settings.device == "cpu"
        while (line := self._next_line()) is None:
            if is_on_cpu and resident_bytes(self._child.pid) > self._allowed:
                return None
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"a trial made no progress for {self._settings.timeout_s:g} s. Raise --timeout_s if a step, or "
                    "the compilation of the blocks, takes longer."
                )
        if line:
            message: dict[str, Any] = json.loads(line)
            return message
        code = self._child.wait()
        if code == -signal.SIGKILL and is_on_cpu:
            return None  # killed by the kernel, which ran out of memory
        raise TrainingError(f"a trial ended with exit code {code}: {self._last_error()}")

    def _read_lines(self) -> None:
        assert self._child.stdout is not None
        while line := self._child.stdout.readline():
            self._lines.put(line)
        self._lines.put("")

    def _next_line(self) -> str | None:
        """Returns the next line; an empty one at the end of the output, and None if there is none yet."""
        try:
            return self._lines.get(timeout=_POLL_S)
        except queue.Empty:
            return None

    def _out_of_memory(self) -> TrialResult:
        # Without a finished step, the first shape is reported, even if the model itself does not fit.
        shape = self._shapes[min(len(self._times), len(self._shapes) - 1)]
        return TrialResult(too_large=shape, peak_bytes=0, allowed_bytes=self._allowed, times=tuple(self._times))

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][:_MAX_DETAIL] if lines else "no message on standard error"


def main() -> int:
    """Runs the trial that stdin describes, and writes one line of JSON to stdout for each event."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do not disturb the messages

    def send(kind: str, **fields: Any) -> None:
        out.write(json.dumps({"kind": kind, **fields}) + "\n")

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    shapes = [(cuts, samples) for cuts, samples in request.pop("shapes")]
    parts = {"model": NestConfig.from_dict(request["model"]), "kernels": Kernels(**request["kernels"])}
    settings = TrialSettings(**{**request, **parts})
    try:
        _run(settings, shapes, send)
    except Exception as error:
        if is_out_of_memory(error):
            send("out_of_memory")
        else:
            send("error", detail=last_error_line(error))
    return 0


def _run(settings: TrialSettings, shapes: list[Shape], send: Callable[..., None]) -> None:
    device = torch.device(settings.device)
    torch.set_num_threads(settings.num_threads)
    allowed = _allowed_bytes(settings, device)
    send("start", allowed_bytes=allowed)
    step = TrialStep(
        settings.model,
        _trainer(settings, device),
        kernels=settings.kernels,
        num_shapes=settings.num_shapes,
    )
    # DDP keeps its own copy of the gradients, so that a budget holds for any number of ranks.
    copy = torch.ones(step.num_trained, device=device)
    memory = PeakMemory(device)
    for shape in shapes:
        send("step", time=asdict(step(noise_batch(shape))))
    send("end", peak_bytes=memory.peak_bytes())
    del copy


def _allowed_bytes(settings: TrialSettings, device: torch.device) -> int:
    """Returns the memory that the steps may use, and makes torch enforce it on a GPU."""
    if device.type != "cuda":
        assert settings.limit_bytes is not None
        return round(settings.limit_bytes * (1 - settings.margin))
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


def _exit_with_parent() -> None:
    """Ends this process when its parent, which holds the other end of stdin, has ended."""
    while os.read(0, 1):  # not through sys.stdin, whose lock the interpreter needs at exit
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

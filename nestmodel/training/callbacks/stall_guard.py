"""Lightning callback of the stall guard: every rank writes heartbeats, and one monitor per node observes them.

This module decides when a heartbeat is written. Observation, diagnosis and report are in `nestguard`.
"""

import itertools
import math
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

import nestguard
from nestdata import Microbatch, last_error_line
from nestguard import Phase
from nestmodel.errors import ConfigError
from nestmodel.run_config import GuardConfig
from nestmodel.training.launcher import AgreedExit, node_run_id
from nestmodel.training.lightning_private import process_group_timeout_s, set_process_group_timeout
from nestmodel.training.pace import mark_end_of_backward
from nestmodel.training.ranks import end_with_parent, launch_id, record_launcher


class CudaEvent:
    """A point in the work of the current CUDA stream, as `nestguard` expects it.

    The GPU that is current at its creation becomes the current GPU of every thread that calls `is_done`. Otherwise, a
    new thread would use the first GPU, on which the driver could reserve memory for this process.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=False)
        self._device = torch.cuda.current_device()

    def record(self) -> None:
        """Marks the end of the work that was launched on the current stream."""
        self._event.record()

    def is_done(self) -> bool:
        """Returns whether the work before the mark is done; does not wait for it."""
        torch.cuda.set_device(self._device)
        return bool(self._event.query())


def new_event_of(trainer: pl.Trainer) -> Callable[[], CudaEvent] | None:
    """Returns a function that creates events on the device of this rank; None if the device is not a GPU."""
    return CudaEvent if trainer.strategy.root_device.type == "cuda" else None


def read_collectives() -> str:
    """Returns the trace of torch's flight recorder as JSON, with all collectives that are not completed.

    The text is empty without a process group, and for gloo before PyTorch 2.8. The recorder is on by default; the
    environment variable TORCH_NCCL_TRACE_BUFFER_SIZE=0 turns it off, and the trace then contains no collectives.
    """
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
    name = "_dump_nccl_trace_json" if "nccl" in backend else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if not backend or dump is None:
        return ""
    trace: bytes | str = dump(includeCollectives=True, onlyActive=True)
    return trace.decode() if isinstance(trace, bytes) else trace


_MONITOR_CHECK_S = 5.0
"""Interval, in seconds, at which the rank that started the monitor checks that the monitor is alive."""

_MONITOR_EXIT_S = 3.0
"""Seconds that an ending rank waits for its monitor, which removes its files or still watches other ranks."""

_REPORT_S = 60.0
"""Time between a limit and the end of the last rank, in seconds: more than a report takes on a slow machine."""

_starts = itertools.count()


class StallGuard(pl.Callback):
    """Detects a stalled run, reports the stack of the rank that stalls the others, and ends the run with exit code 44.

    Args:
        config: Limits of the phases, and where reports are written.
    """

    def __init__(self, config: GuardConfig = GuardConfig()) -> None:
        record_launcher()
        self.config = config
        self._heartbeat: nestguard.Heartbeat = nestguard.NoHeartbeat()
        self._monitor: nestguard.MonitorHandle | None = None
        self._next_check_s = 0.0
        self._is_only_rank = True
        self._marks_backward = False
        self._ends_step = False

    def start(self, trainer: pl.Trainer) -> None:
        """Starts the heartbeat of this rank and, on the first local rank, the monitor. Further calls do nothing.

        `setup` calls it at the latest. An earlier call also covers the start of the process group, so that a rank
        that never joins it is reported. If the stall guard cannot be set up, a warning is shown and training runs
        without it.

        The timeout of a process group that does not exist yet is raised if it is Lightning's default and would pass
        before the stall guard acts. A warning is shown for any other timeout that is too short.

        Raises:
            ConfigError: A chosen timeout of the process group is at most `limits.step_s`.
        """
        if self._monitor is not None or self._heartbeat.slot is not None or not self.config.enabled:
            return
        self.check_timeout(trainer)
        try:
            self._start_watching(trainer, _identity(trainer))
        except nestguard.GuardError as error:
            warnings.warn(f"the stall guard cannot start, so the run is not watched: {error}", stacklevel=1)

    def check_timeout(self, trainer: pl.Trainer) -> None:
        """Checks and sets the timeout of the process group; `start` describes the errors and warnings."""
        if not self.config.enabled or not isinstance(trainer.strategy, DDPStrategy):
            return
        timeout_s, needed_s = process_group_timeout_s(trainer), self.config.limits.longest_wait_s + _REPORT_S
        default_s = default_pg_timeout.total_seconds()
        if timeout_s in (None, default_s) and not torch.distributed.is_initialized():
            set_process_group_timeout(trainer, max(needed_s, default_s))
        elif timeout_s is not None and timeout_s <= self.config.limits.step_s:
            raise ConfigError(
                f"the process group times out after {timeout_s:g} s, before the stall guard can report the cause "
                f"(limits.step_s is {self.config.limits.step_s:g} s). Raise the strategy's timeout, or lower the limit."
            )
        elif timeout_s is not None and timeout_s < needed_s:
            rank_zero_warn(
                f"the process group times out after {timeout_s:g} s, before the stall guard reports a rank that waits "
                f"for {needed_s:g} s. Give the strategy a timeout of at least as much, or lower guard.limits."
            )

    def _start_watching(self, trainer: pl.Trainer, identity: nestguard.Identity) -> None:
        self._is_only_rank = identity.world_size == 1
        environment: ClusterEnvironment | None = getattr(trainer.strategy, "cluster_environment", None)
        with nestguard.run_directory(f"{node_run_id(environment)}-{next(_starts)}", identity) as directory:
            self._heartbeat = nestguard.Heartbeat(directory, identity)
            self._heartbeat.arm()
            nestguard.set_current(self._heartbeat)
            if identity.local_rank == 0:
                report_dir = self.config.report_dir or Path(trainer.default_root_dir) / "stalls"
                peers = None if environment is None or trainer.num_nodes == 1 else self._peers(environment)
                self._monitor = nestguard.start_monitor(directory, self.config.limits, identity, report_dir, peers)
        end_with_parent(is_on=False)  # from here on, the monitor reports why a rank has ended before it ends the others

    def _peers(self, environment: ClusterEnvironment) -> nestguard.PeerConfig:
        port = environment.main_port
        return nestguard.PeerConfig(
            host=environment.main_address, port=self.config.port or port + 1, run_id=f"{port}/{launch_id()}"
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Starts the stall guard before training, and gives the monitors of several nodes their run token."""
        if stage != "fit" or not self.config.enabled:
            return
        self.start(trainer)
        if trainer.num_nodes > 1:
            # The ranks have just connected to each other. Every rank takes part, also one without a monitor.
            token = trainer.strategy.broadcast(nestguard.new_token())
            if self._monitor is not None:
                self._monitor.set_token(token)
        new_event = new_event_of(trainer)
        self._marks_backward = new_event is not None and not self._is_only_rank
        if new_event is not None:
            self._heartbeat.watch_device(new_event, read_collectives)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes a heartbeat: the rank loads the first batch."""
        self._heartbeat.beat(Phase.LOADING, trainer.global_step, 0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, _module: pl.LightningModule, batch: Microbatch, index: int
    ) -> None:
        """Writes a heartbeat: a microbatch is loaded.

        The heartbeat counts the microbatches of this rank within the step, so that ranks can be compared.
        """
        microbatch = index % trainer.accumulate_grad_batches
        self._ends_step = microbatch == trainer.accumulate_grad_batches - 1
        self._heartbeat.beat(Phase.FORWARD, batch.key.step, microbatch, cut_ids=batch.sample_id)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:  # noqa: ARG002
        """Writes a heartbeat: the backward pass begins, during which DDP waits for the other ranks.

        In the last microbatch of a step, the device waits for them when it has computed its own gradients.
        """
        self._heartbeat.beat(Phase.BACKWARD)
        if self._marks_backward and self._ends_step:
            mark_end_of_backward(loss, lambda: self._heartbeat.mark_device(Phase.COLLECTIVE))

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, batch: Microbatch, index: int
    ) -> None:
        """Writes a heartbeat: the rank loads its next microbatch. Warns once if the monitor has died."""
        done = (index + 1) % trainer.accumulate_grad_batches
        self._heartbeat.beat(Phase.LOADING, batch.key.step + (not done), done)
        if self._monitor is not None and time.monotonic() > self._next_check_s:
            self._next_check_s = time.monotonic() + _MONITOR_CHECK_S
            if not self._monitor.is_alive():
                self._next_check_s = math.inf
                warnings.warn("the stall guard's monitor has died; training continues unwatched.", stacklevel=1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes a heartbeat: validation begins; the step is the last finished one."""
        self._heartbeat.beat(Phase.VALIDATION, trainer.global_step - 1)

    def on_validation_batch_start(self, *_: Any) -> None:
        """Writes a heartbeat: validation makes progress."""
        self._heartbeat.beat(Phase.VALIDATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Writes a heartbeat: training resumes and the rank loads its next batch."""
        self._heartbeat.beat(Phase.LOADING, trainer.global_step, 0)

    def on_train_end(self, *_: Any) -> None:
        """Writes a heartbeat: the last step is finished."""
        self._heartbeat.beat(Phase.FINISHING)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Records why this rank ends, so that the monitor ends the other ranks, which would wait for it."""
        if self._is_only_rank:
            self.teardown(trainer, pl_module, "fit")  # no other rank waits for it
            return
        if isinstance(exception, AgreedExit | KeyboardInterrupt):
            self._heartbeat.finish(Phase.LEAVING)
            if isinstance(exception, AgreedExit) and self._monitor is not None:
                self._monitor.wait(_MONITOR_EXIT_S)  # SLURM kills it when the last rank has exited
            return
        name, line = type(exception).__name__, last_error_line(exception)
        detail = name if line == name else f"{name}: {line}"
        self._heartbeat.finish(Phase.FAILED, detail, "".join(traceback.format_exception(exception)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Records that training has ended. The monitor notices and exits."""
        self._heartbeat.finish(Phase.DONE)
        self._heartbeat.close()
        if self._monitor is not None:
            self._monitor.wait(_MONITOR_EXIT_S)
        if self._heartbeat is nestguard.current():
            nestguard.set_current(nestguard.NoHeartbeat())
        self._heartbeat, self._monitor = nestguard.NoHeartbeat(), None


def _identity(trainer: pl.Trainer) -> nestguard.Identity:
    # A strategy does not know the world size until the process group exists.
    num_local = trainer.num_devices if isinstance(trainer.strategy, DDPStrategy) else 1
    return nestguard.Identity(
        rank=trainer.node_rank * num_local + trainer.local_rank,
        local_rank=trainer.local_rank,
        node_rank=trainer.node_rank,
        world_size=trainer.num_nodes * num_local,
        local_world_size=num_local,
        host=socket.gethostname(),
    )

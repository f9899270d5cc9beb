"""The stall guard of a training run: every rank says what it is doing, and a monitor on each node watches.

Owns when what is said; how it is watched, judged and reported is `nestguard`'s.
"""

import itertools
import math
import os
import socket
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy

import nestguard
from nestdata import AudioNoiseBatch, last_error_line
from nestguard import Phase
from nestmodel.errors import ConfigError
from nestmodel.training.launcher import node_run_id, record_launcher
from nestmodel.training.lightning_private import process_group_timeout_s
from nestmodel.training.preemption import Preempted

_LOOK_S = 5.0
"""Between two looks at whether the monitor is there."""

_PARTING_S = 3.0
"""How long a rank that is done waits for its monitor to end, which may still be watching others."""

_starts = itertools.count()


class StallGuard(pl.Callback):
    """Names the rank that holds up the others, with its stack, and ends the run with exit code 44.

    Args:
        limits: How long a rank may be silent in each phase.
        report_dir: Where reports go; by default `stalls` in `trainer.default_root_dir`.
        port: Where the monitors of several nodes meet, on the first of them; by default the one above MASTER_PORT.
        enabled: Whether it watches at all.

    Raises:
        ConfigError: The port is none.
    """

    def __init__(
        self,
        limits: nestguard.StallLimits = nestguard.StallLimits(),
        report_dir: Path | None = None,
        port: int | None = None,
        enabled: bool = True,
    ) -> None:
        if port is not None and not 0 < port < 65536:
            raise ConfigError(f"guard.port is {port}: give a port from 1 to 65535.")
        record_launcher()
        self.enabled = enabled
        self.limits = limits
        self.report_dir = report_dir
        self.port = port
        self._heartbeat: nestguard.Heartbeat | nestguard.NoHeartbeat = nestguard.NoHeartbeat()
        self._monitor: nestguard.MonitorHandle | None = None
        self._look_at_s = 0.0
        self._is_alone = True

    def start(self, trainer: pl.Trainer) -> None:
        """Begins to watch; at the latest when training is set up. A rank that is missed at the start is seen, too.

        Raises:
            ConfigError: The process group would give up before the guard does.
        """
        if self._monitor is not None or self._heartbeat.place is not None or not self.enabled:
            return
        patience_s = process_group_timeout_s(trainer)
        if patience_s is not None and patience_s <= self.limits.step_s:
            raise ConfigError(
                f"the process group gives up after {patience_s:g} s, before the stall guard can say why "
                f"(limits.step_s is {self.limits.step_s:g} s). Raise the strategy's timeout, or lower the limit."
            )
        try:
            self._watch(trainer, _identity(trainer))
        except nestguard.GuardError as error:
            warnings.warn(f"the stall guard does not watch: {error}", stacklevel=1)

    def _watch(self, trainer: pl.Trainer, identity: nestguard.Identity) -> None:
        self._is_alone = identity.world_size == 1
        shared = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
        environment: ClusterEnvironment | None = getattr(trainer.strategy, "cluster_environment", None)
        name = f"{node_run_id(environment)}-{next(_starts)}".replace("/", "-")
        directory = shared / f"nestguard-{name}-node-{identity.node_rank}"
        self._heartbeat = nestguard.Heartbeat(directory, identity)
        self._heartbeat.arm()
        nestguard.set_current(self._heartbeat)
        if identity.local_rank == 0:
            report_dir = self.report_dir or Path(trainer.default_root_dir) / "stalls"
            peers = None if environment is None or trainer.num_nodes == 1 else self._peers(environment)
            self._monitor = nestguard.start_monitor(directory, self.limits, identity, report_dir, peers)

    def _peers(self, environment: ClusterEnvironment) -> nestguard.PeerConfig:
        known, port = os.environ, environment.main_port
        run = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
        run_id = "/".join([str(port), *(known.get(name, "") for name in run)])
        return nestguard.PeerConfig(host=environment.main_address, port=self.port or port + 1, run_id=run_id)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Begins to watch."""
        if stage == "fit":
            self.start(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """The first batch is being waited for."""
        self._heartbeat.beat(Phase.LOADING, trainer.global_step, 0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, _module: pl.LightningModule, batch: AudioNoiseBatch, index: int
    ) -> None:
        """A batch has come. Ranks are compared by how many microbatches of their own they have got through."""
        place = batch.key.step, index % trainer.accumulate_grad_batches
        self._heartbeat.beat(Phase.FORWARD, *place, cut_ids=batch.sample_id)

    def on_before_backward(self, *_: Any) -> None:
        """The loss is known; gradients are next, and with the last of them the other ranks are waited for."""
        self._heartbeat.beat(Phase.BACKWARD)

    def on_train_batch_end(
        self, trainer: pl.Trainer, _module: pl.LightningModule, _outputs: Any, batch: AudioNoiseBatch, index: int
    ) -> None:
        """The next batch is being waited for."""
        done = (index + 1) % trainer.accumulate_grad_batches
        self._heartbeat.beat(Phase.LOADING, batch.key.step + (not done), done)
        if self._monitor is not None and time.monotonic() > self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_S
            if not self._monitor.is_alive():
                self._look_at_s = math.inf
                warnings.warn("the stall guard's monitor has died; training goes on unwatched.", stacklevel=1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Validation begins, after the last step that was made."""
        self._heartbeat.beat(Phase.VALIDATION, trainer.global_step - 1)

    def on_validation_batch_start(self, *_: Any) -> None:
        """Validation gets on."""
        self._heartbeat.beat(Phase.VALIDATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Back to training."""
        self._heartbeat.beat(Phase.LOADING, trainer.global_step, 0)

    def on_train_end(self, *_: Any) -> None:
        """The last step is made."""
        self._heartbeat.beat(Phase.FINISHING)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Says why this rank ends; the monitor does not let the others wait for it."""
        if self._is_alone:
            self.teardown(trainer, pl_module, "fit")  # nobody waits for it
            return
        if isinstance(exception, Preempted | KeyboardInterrupt):
            self._heartbeat.finish(Phase.LEAVING)
            return
        name, line = type(exception).__name__, last_error_line(exception)
        detail = name if line == name else f"{name}: {line}"
        self._heartbeat.finish(Phase.FAILED, detail, "".join(traceback.format_exception(exception)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Training has ended as it should; the monitor sees it at its next look, and ends as well."""
        self._heartbeat.finish(Phase.DONE)
        self._heartbeat.close()
        if self._monitor is not None:
            self._monitor.wait(_PARTING_S)
        if self._heartbeat is nestguard.current():
            nestguard.set_current(nestguard.NoHeartbeat())
        self._heartbeat, self._monitor = nestguard.NoHeartbeat(), None


def _identity(trainer: pl.Trainer) -> nestguard.Identity:
    # Before the process group is there, a strategy does not know the world yet.
    num_local = trainer.num_devices if isinstance(trainer.strategy, DDPStrategy) else 1
    return nestguard.Identity(
        rank=trainer.node_rank * num_local + trainer.local_rank,
        local_rank=trainer.local_rank,
        node_rank=trainer.node_rank,
        world_size=trainer.num_nodes * num_local,
        local_world_size=num_local,
        host=socket.gethostname(),
    )

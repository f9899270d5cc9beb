"""Leaving when asked to: one checkpoint, of the same optimizer step on every rank, then a known exit code.

A run whose `trainer.max_time` is over ends in the same way, but as one that is done.

SIGTERM and SIGUSR1 (SLURM's warning before a job is taken down) only set a flag on the rank that they reach. The flags
travel with the sums that the ranks add up at every step anyway, so that all of them learn of it at the same step,
whichever rank was asked, and nobody waits in a collective of its own.
"""

import signal
import threading
from types import FrameType
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.utilities import rank_zero_info

import nestguard
from nestmodel.training.checkpoints import Checkpoints
from nestmodel.training.launcher import destroy_process_group_at_exit, is_started_by_lightning, record_launcher
from nestmodel.training.lightning_private import disable_signal_handling, update_logged_metrics
from nestmodel.training.module import NestModel
from nestmodel.training.step_limits import ends_step

EXIT_PREEMPTED = 75
"""Exit code of a run that left when it was asked to: its checkpoint is written, start it again."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """The run has ended because it was asked to; the checkpoint is written."""


class PreemptionHandler(pl.Callback):
    """Ends training at the next optimizer step after SIGTERM or SIGUSR1, or when its time is up, with a checkpoint."""

    def __init__(self) -> None:
        record_launcher()
        self._handlers: dict[signal.Signals, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes the signals over from Lightning, which answers them with a collective from wherever a rank is."""
        if stage != "fit":
            return
        model = cast(NestModel, pl_module)
        for callback in cast(Any, trainer).callbacks:
            if isinstance(callback, Timer):
                _take_over(callback, model)
        if threading.current_thread() is not threading.main_thread():
            return

        def ask(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - what the interpreter passes
            model.stop_requests.preempted_here = True

        self._handlers = {number: signal.signal(number, ask) for number in _SIGNALS}
        disable_signal_handling(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Leaves where any rank was asked to.

        Raises:
            Preempted: With `EXIT_PREEMPTED`.
        """
        model = cast(NestModel, pl_module)
        if not ends_step(trainer, batch_idx):
            return
        if model.stop_requests.must_finish:
            rank_zero_info(f"trainer.max_time is over: step {trainer.global_step} was the last.")
            trainer.should_stop = True
        if not model.stop_requests.must_exit:
            return
        update_logged_metrics(trainer)
        callbacks = [one for one in cast(Any, trainer).callbacks if isinstance(one, Checkpoints)]
        for callback in callbacks or [Checkpoints()]:
            callback.save(trainer)
        # A launcher ends the others once the first has left, and rank 0 may still be writing.
        nestguard.current().beat(nestguard.Phase.CHECKPOINT, trainer.global_step - 1)
        trainer.strategy.barrier("leaving")
        destroy_process_group_at_exit()
        rank_zero_info(f"left at step {trainer.global_step}, when asked to; start the run again with --ckpt_path last.")
        # Lightning kills the rank that it started the others from once one of them has another code than 0.
        raise Preempted(0 if is_started_by_lightning() else EXIT_PREEMPTED)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Gives the signals back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, error: BaseException) -> None:
        """Gives the signals back, or hears no more of them where the run leaves anyway."""
        if isinstance(error, Preempted):
            # A launcher passes them on as soon as one rank has left, and none would then have its known exit code.
            self._handlers = dict.fromkeys(self._handlers, signal.SIG_IGN)
        self.teardown(trainer, pl_module, "fit")


def _take_over(timer: Timer, model: NestModel) -> None:
    """Has a timer ask no rank but its own: Lightning's broadcasts after every microbatch, within a step, too."""

    def note(*_: Any) -> None:
        left_s = timer.time_remaining()
        model.stop_requests.out_of_time_here |= left_s is not None and left_s <= 0

    cast(Any, timer).on_train_batch_end = note

"""Preemption: all ranks stop after the same optimizer step, write one checkpoint, and exit with a documented code.

SIGTERM, SIGUSR1 (SLURM's warning before it ends a job), SIGHUP (a terminal that is closed) and Ctrl-C only set a flag
on the rank that receives them. The flags are part of the vector that all ranks all-reduce at every optimizer step, so
all ranks stop after the same step, whichever of them received the signal, and no step needs an additional collective.
`trainer.max_time` travels in the same way, but ends the run normally. Signals before training begins are handled by
`ranks.leave_on_signals`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, NoReturn, cast

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

import nestguard
from nestmodel.training.launcher import AgreedExit
from nestmodel.training.lightning_private import disable_signal_handling, launched_processes, update_logged_metrics
from nestmodel.training.module import NestModel
from nestmodel.training.ranks import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    PREEMPTING_SIGNALS,
    is_first_rank,
    leave_before_training,
    record_launcher,
)
from nestmodel.training.saving.checkpoints import Checkpoints, savers_of
from nestmodel.training.step_limits import ends_step

_LEAVE_S = 1.0
"""Seconds after the second Ctrl-C in which the other ranks may end by themselves."""

_NOTICE = "Ctrl-C: the run ends after this step, with a checkpoint. Press it again to end at once, without one."


class InterruptWatch:
    """Counts Ctrl-C from `start` to `stop`. It changes nothing if SIGINT was ignored before, as under nohup.

    Args:
        on_first: Called in the thread at the first Ctrl-C.
        started_ranks: Returns the ranks that this process has started, which the second one ends as well.
    """

    def __init__(self, on_first: Callable[[], None], started_ranks: Callable[[], Sequence[Any]] = list) -> None:
        self._on_first = on_first
        self._started_ranks = started_ranks
        self._previous_handler: Any = None
        self._previous_wakeup_fd = -1
        self._read_fd = self._write_fd = -1

    def start(self) -> None:
        """Installs the signal handler and starts the thread. Call it in the main thread."""
        self._previous_handler = signal.getsignal(signal.SIGINT)
        if self._previous_handler is signal.SIG_IGN:
            return
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        _close_wakeup_fd_in_forks()
        # Before the handler: a signal between the two would be lost.
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, _do_nothing)
        threading.Thread(target=self._run, name="interrupt-watch", daemon=True).start()

    def stop(self) -> None:
        """Restores the previous handler and ends the thread. Call it in the main thread."""
        if self._write_fd == -1:
            return
        signal.signal(signal.SIGINT, self._previous_handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._write_fd)  # the thread reads the end of the pipe
        self._write_fd = -1

    def _run(self) -> None:
        num_interrupts = 0
        while numbers := os.read(self._read_fd, 64):
            for _ in range(numbers.count(signal.SIGINT)):
                num_interrupts += 1
                if num_interrupts > 1:
                    _leave(self._started_ranks())
                self._on_first()
                if is_first_rank():
                    # Not through `sys.stderr`: a panel redirects it and locks. The reader of a pipe may be gone.
                    with suppress(OSError):
                        os.write(2, f"\n{_NOTICE}\n".encode())
        os.close(self._read_fd)


def _leave(started_ranks: Sequence[Any]) -> NoReturn:
    """Ends this process and its ranks at once, from the thread, without clean-up: the user has given the run up."""
    nestguard.current().finish(nestguard.Phase.LEAVING)
    deadline_s = time.monotonic() + _LEAVE_S
    while (left := [rank for rank in started_ranks if rank.poll() is None]) and time.monotonic() < deadline_s:
        for rank in left:
            rank.send_signal(signal.SIGINT)  # the second one for this rank
        time.sleep(_LEAVE_S / 10)
    for rank in left:
        rank.kill()
    if is_first_rank():
        with suppress(OSError):
            os.write(2, b"error: Ctrl-C twice: the run has ended without a new checkpoint.\n")
    os._exit(EXIT_INTERRUPTED)


@cache
def _close_wakeup_fd_in_forks() -> None:
    """Keeps forked loader workers from writing the signals that they receive into the pipe of their rank."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handles SIGINT. Without a handler in Python, the interpreter would not write the signal to the pipe."""


class Preempted(AgreedExit):
    """The run exits because it was preempted or interrupted; its checkpoint is written."""


class PreemptionHandler(pl.Callback):
    """Writes a checkpoint and ends training after the optimizer step in which a signal or Ctrl-C arrives.

    The signals are `PREEMPTING_SIGNALS`, unless they were ignored before, as SIGHUP is under nohup. A second Ctrl-C
    ends all ranks at once; see `InterruptWatch`. Training also ends after the step in which it
    has lasted `max_time_s` seconds.

    Args:
        max_time_s: Longest time of training, from its start in this process; None for no limit. The `max_time` of
            Lightning's Trainer would broadcast after every microbatch.
    """

    def __init__(self, max_time_s: float | None = None) -> None:
        record_launcher()
        self.max_time_s = max_time_s
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._interrupts: InterruptWatch | None = None
        self._farewell = ""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Installs the signal handlers in place of Lightning's, which may start a collective at any point of a step."""
        if stage == "fit":
            disable_signal_handling(trainer)
            if threading.current_thread() is threading.main_thread():
                self._install(trainer, cast(NestModel, pl_module))
            else:
                rank_zero_warn(
                    "training runs in a thread, so that SIGTERM, SIGUSR1, SIGHUP and Ctrl-C do not write a checkpoint "
                    "before they end it."
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Starts the clock."""
        if self.max_time_s is not None:
            cast(NestModel, pl_module).stop_requests.deadline_s = time.monotonic() + self.max_time_s

    def _install(self, trainer: pl.Trainer, model: NestModel) -> None:
        def request(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the interpreter passes both
            model.stop_requests.preempted_here = True

        def interrupt() -> None:
            model.stop_requests.preempted_here = model.stop_requests.interrupted_here = True

        handled = [number for number in PREEMPTING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, request) for number in handled}
        self._interrupts = InterruptWatch(interrupt, lambda: launched_processes(trainer))
        self._interrupts.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Writes a checkpoint and exits if any rank was preempted by the end of this optimizer step.

        Raises:
            Preempted: With `EXIT_PREEMPTED`, or `EXIT_INTERRUPTED` after Ctrl-C on any rank.
            NotSaved: The checkpoint could not be written.
        """
        model = cast(NestModel, pl_module)
        if not ends_step(trainer, batch_idx):
            return
        if model.stop_requests.must_finish:
            rank_zero_info(f"trainer.max_time has passed: step {trainer.global_step} was the last.")
            trainer.should_stop = True
        if not model.stop_requests.must_exit:
            return
        update_logged_metrics(trainer)
        for saver in savers_of(trainer) or [Checkpoints()]:
            saver.save_last(trainer)
        # The ranks agree on the exit code only here, so that the vector of every step need not carry it.
        is_interrupted = trainer.strategy.reduce_boolean_decision(model.stop_requests.interrupted_here, all=False)
        what, remedy = "preempted", "start the run again with --resume"
        if is_interrupted:
            what, remedy = "interrupted", "continue with the same command and --resume"
        self._farewell = f"{what} after step {trainer.global_step}; {remedy}."
        raise Preempted(EXIT_INTERRUPTED if is_interrupted else EXIT_PREEMPTED)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Restores the previous signal handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is leave_before_training else handler)
        self._previous_handlers = {}
        if self._interrupts is not None:
            self._interrupts.stop()
            self._interrupts = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, error: BaseException) -> None:
        """Restores the previous signal handlers, or ignores the signals when the run is exiting anyway."""
        if isinstance(error, AgreedExit):
            # Some launchers signal the other ranks as soon as one has exited, which would change their exit codes.
            self._previous_handlers = dict.fromkeys(self._previous_handlers, signal.SIG_IGN)
        if isinstance(error, Preempted):
            rank_zero_info(self._farewell)  # by a callback after `Progress`, whose panel has ended: this stays last
        self.teardown(trainer, pl_module, "fit")

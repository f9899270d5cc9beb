"""Exit codes of a run, which schedulers read, and what signals do before training handles them."""

import contextlib
import ctypes
import signal
import sys
from types import FrameType

from nestmodel.training.ranks import is_first_rank, is_started_by_lightning

EXIT_INTERRUPTED = 130
"""Ctrl-C has ended the run."""

EXIT_NOT_SAVED = 74
"""The last checkpoint could not be written: make space, then resume from the one before."""

EXIT_PREEMPTED = 75
"""A scheduler has ended the run: start it again with `--resume`."""

PREEMPTING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals after which a run writes a checkpoint and exits with `EXIT_PREEMPTED`."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`."""


def leave_on_signals() -> None:
    """Makes `PREEMPTING_SIGNALS` end this process with `EXIT_PREEMPTED`, until training handles them.

    A signal that was ignored before stays ignored. Python runs the handler between two of its own instructions, so a
    process that waits in C++ code exits when that code returns. The system ends a rank that Lightning has started when
    the process that started it has ended.
    """
    if is_started_by_lightning():
        end_with_parent(is_on=True)
    for number in PREEMPTING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave_before_training)


def end_with_parent(*, is_on: bool) -> None:
    """Sets whether the system kills this process when its parent ends; only on Linux.

    The stall guard turns it off when it watches the ranks.
    """
    with contextlib.suppress(AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_on else 0)


def leave_before_training(number: int, _frame: FrameType | None) -> None:
    """Handles a signal that has come before training."""
    if is_first_rank():
        print(f"error: {signal.Signals(number).name} before training; there is nothing to save.", file=sys.stderr)  # noqa: T201
    raise SystemExit(EXIT_PREEMPTED)

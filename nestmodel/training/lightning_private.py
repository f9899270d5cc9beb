"""Every use of Lightning's private names, each with its reason.

No other module of the project touches an underscore name of Lightning. The tests of this module fail when Lightning
renames or changes one of them; `pyproject.toml` bounds Lightning from above for the same reason.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy


def log_by_global_step(trainer: pl.Trainer) -> None:
    """Numbers what is logged by optimizer steps.

    Lightning numbers metrics by a counter of its own, which is one off after a resume from some checkpoints.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def update_logged_metrics(trainer: pl.Trainer) -> None:
    """Writes the metrics of the step that was just made.

    Lightning does so only after `on_train_batch_end`, in which a preempted run exits.
    """
    cast(Any, trainer)._logger_connector.update_train_step_metrics()


def dump_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the full state of a run, as `trainer.save_checkpoint` would write it.

    The public method reaches a barrier and writes the file itself, neither atomically nor on one rank alone.
    """
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def scale_loop_progress(checkpoint: dict[str, Any], share: int) -> None:
    """Converts, in place, the progress of Lightning's loops to another number of microbatches a rank and step.

    Lightning counts the microbatches of one rank. A checkpoint holds whole steps, so that the counts can be converted.

    Args:
        checkpoint: As Lightning wrote it.
        share: Microbatches of each step that a rank takes from now on.
    """
    loop = checkpoint["loops"]["fit_loop"]
    made = loop["epoch_loop.batch_progress"]["total"]["ready"]
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    if not steps or made == steps * share:
        return
    before = made // steps
    for counts in (loop["epoch_loop.batch_progress"]["total"], loop["epoch_loop.batch_progress"]["current"]):
        unfinished = counts["processed"] - counts["completed"]  # the last microbatch, while its hooks run
        counts.update(dict.fromkeys(counts, counts["processed"] // before * share))
        counts["completed"] -= unfinished


def disable_signal_handling(trainer: pl.Trainer) -> None:
    """Leaves signals to `PreemptionHandler`.

    Lightning's own SIGTERM handler enters a collective from wherever a rank happens to be, and it broadcasts before
    every microbatch whether a signal has come: the sums of each step carry that already.
    """
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    cast(Any, trainer)._signal_connector.register_signal_handlers = nothing
    cast(Any, trainer).fit_loop.epoch_loop._broadcast_sigterm_tensor = nothing


def allow_clipping(optimizer: torch.optim.Optimizer) -> None:
    """Lets gradients of a fused optimizer be clipped.

    Lightning takes every fused optimizer for one that unscales its gradients itself, and then refuses to clip them.
    """
    cast(Any, optimizer)._step_supports_amp_scaling = False


def fix_gradient_buckets(trainer: pl.Trainer) -> None:
    """Keeps DDP's gradient buckets as they are, and buffers unsynchronised.

    DDP otherwise rearranges the buckets after the first backward pass of a process, which changes the order in which
    the gradients of three or more ranks are added up. Buffers are equal on all ranks already.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._ddp_kwargs.update(find_unused_parameters=True, broadcast_buffers=False)


def process_group_timeout_s(trainer: pl.Trainer) -> float | None:
    """Returns the timeout of the process group in seconds, or None without one."""
    strategy = trainer.strategy
    return strategy._timeout.total_seconds() if isinstance(strategy, DDPStrategy) and strategy._timeout else None


def set_process_group_timeout(trainer: pl.Trainer, timeout_s: float) -> None:
    """Sets the timeout of a process group that is not yet initialised, in seconds."""
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._timeout = timedelta(seconds=timeout_s)


def validates_by_time(trainer: pl.Trainer) -> bool:
    """Tells whether `val_check_interval` was given as a time, which Lightning keeps apart from the public setting."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """Tells whether Lightning would divide each rank's share of the data once more."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def is_attached(module: pl.LightningModule) -> bool:
    """Tells whether a module has a trainer; the public property raises where it has none."""
    return module._trainer is not None


def launched_processes(trainer: pl.Trainer) -> list[Any]:
    """Returns Lightning's own list of the ranks that this process has started: clearing it takes them over."""
    processes: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    return processes

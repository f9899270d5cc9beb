"""Every use of Lightning's private names and undocumented formats, each with its reason.

No other module of the project uses a private name of Lightning; ruff checks this. Every
function here has a test in `tests/nestmodel/training/test_lightning_private.py` that fails when Lightning renames or
changes what the function depends on. `pyproject.toml` limits the version of Lightning for the same reason.
"""

from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from typing import Any, cast

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.nn.parallel import DistributedDataParallel


def log_by_global_step(trainer: pl.Trainer) -> None:
    """Numbers logged metrics by optimizer step.

    Lightning numbers metrics by a counter of its own, which is off by one after a resume from some checkpoints. The
    public alternative, logging a metric named `step`, would drop the column `epoch` and round the step to float32.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def set_global_step(trainer: pl.Trainer, step: int) -> None:
    """Sets `trainer.global_step`, which Lightning restores for `fit` only, and the step of logged metrics."""
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    log_by_global_step(trainer)


def update_logged_metrics(trainer: pl.Trainer) -> None:
    """Sends the metrics of the last optimizer step to the loggers.

    Lightning does this only after `on_train_batch_end`, the hook in which a preempted run exits.
    """
    cast(Any, trainer)._logger_connector.update_train_step_metrics()


def dump_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the full state of a run, as `trainer.save_checkpoint` would write it.

    The public method waits for all ranks at a barrier and does not write the file atomically.
    """
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def scale_loop_progress(checkpoint: dict[str, Any], microbatches_per_rank: int) -> None:
    """Converts the progress of Lightning's loops, in place, to another number of microbatches per rank and step.

    Lightning counts the microbatches of one rank, a number that depends on the number of ranks. The conversion is
    exact, because a checkpoint is written after a whole optimizer step.

    Args:
        checkpoint: Checkpoint as Lightning wrote it.
        microbatches_per_rank: Microbatches that each rank processes per step after the resume.
    """
    loop = checkpoint["loops"]["fit_loop"]
    made = loop["epoch_loop.batch_progress"]["total"]["ready"]
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    if not steps or made == steps * microbatches_per_rank:
        return
    made_per_step = made // steps
    for counts in (loop["epoch_loop.batch_progress"]["total"], loop["epoch_loop.batch_progress"]["current"]):
        unfinished = counts["processed"] - counts["completed"]  # the last microbatch, while its hooks run
        counts.update(dict.fromkeys(counts, counts["processed"] // made_per_step * microbatches_per_rank))
        counts["completed"] -= unfinished


def leave_finished_epoch(checkpoint: dict[str, Any]) -> None:
    """Changes a checkpoint, in place, so that a resume begins the next epoch if the run had ended with an epoch.

    Lightning begins a new epoch only if the checkpoint was written before the end of the old one. After a run that has
    reached `max_steps` at the end of an epoch, it would continue that epoch, and end it after one microbatch.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epoch, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
    if not batches["is_last_batch"] or epoch["completed"] != epoch["ready"]:
        return
    batches["is_last_batch"] = False
    optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (batches, loop["epoch_loop.scheduler_progress"], *optimizer.values()):
        progress["current"] = dict.fromkeys(progress["current"], 0)


def disable_signal_handling(trainer: pl.Trainer) -> None:
    """Prevents Lightning from handling signals, which `PreemptionHandler` does instead.

    Lightning's SIGTERM handler starts a collective at an arbitrary point of the program, and Lightning broadcasts
    before every microbatch whether a signal has arrived. The sums of each optimizer step already carry this flag.
    """
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    cast(Any, trainer)._signal_connector.register_signal_handlers = nothing
    cast(Any, trainer).fit_loop.epoch_loop._broadcast_sigterm_tensor = nothing


def allow_clipping(optimizer: torch.optim.Optimizer) -> None:
    """Makes Lightning unscale and clip the gradients of a fused optimizer.

    Lightning assumes that every fused optimizer unscales its gradients itself, and then refuses to clip them. The
    attribute belongs to torch, which passes the gradient scale to optimizers that have it set.
    """
    cast(Any, optimizer)._step_supports_amp_scaling = False


def fix_gradient_buckets(trainer: pl.Trainer) -> None:
    """Makes DDP keep its initial gradient buckets, hold gradients in them, and leave buffers unsynchronised.

    DDP otherwise rearranges the buckets after the first backward pass of a process. This changes the order in which
    gradients of three or more ranks are summed, so that a resumed run would not be bit-for-bit equal. Only
    `find_unused_parameters` turns this off. Gradients as views of the buckets need not be copied back, and with one
    microbatch per rank and step they need no memory of their own. They have to be set to None before each step, as
    Lightning does: DDP then copies new gradients into the buckets and computes the same bits as without views. Buffers
    are equal on all ranks already; torch 2.13 renamed the argument that leaves them so. The public alternative,
    arguments of `DDPStrategy`, is available only to the code that creates the strategy.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        has_new_name = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        sync_buffers = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
        trainer.strategy._ddp_kwargs.update(
            {"find_unused_parameters": True, "gradient_as_bucket_view": True, sync_buffers: False}
        )


def attach_model(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Makes a model the `lightning_module` of a trainer that does not run. Lightning sets it only when a run begins."""
    trainer.strategy._lightning_module = model
    model.trainer = trainer


def process_group_timeout_s(trainer: pl.Trainer) -> float | None:
    """Returns the timeout of the process group in seconds, or None without one."""
    strategy = trainer.strategy
    return strategy._timeout.total_seconds() if isinstance(strategy, DDPStrategy) and strategy._timeout else None


def set_process_group_timeout(trainer: pl.Trainer, timeout_s: float) -> None:
    """Sets the timeout in seconds of a process group that is not initialised yet."""
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._timeout = timedelta(seconds=timeout_s)


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning would replace the sampler of a loader by a distributed one."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def finds_launcher(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning detects the launcher itself, without a class that the user has given."""
    return not isinstance(trainer._accelerator_connector._cluster_environment_flag, ClusterEnvironment)


def forks_ranks(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning would fork the other ranks from this process, as it does in notebooks."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def launched_processes(trainer: pl.Trainer) -> list[Any]:
    """Returns Lightning's own list of the ranks that this process started; a caller that clears it must end them."""
    processes: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    return processes

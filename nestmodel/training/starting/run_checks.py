"""Single checks of a run's settings; `before_start` makes all of them before the ranks start.

Every check reads settings only: no collective, no audio and no weights. The hooks of `NestModel` and `NestDataModule`
make the same checks for those who call `Trainer.fit` themselves.
"""

import os
from typing import Any, cast

import pytorch_lightning as pl

from nestdata import BatchPlan
from nestmodel.attention_context import format_context
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError, LaunchError
from nestmodel.training.lightning_private import finds_launcher, uses_distributed_sampler
from nestmodel.training.saving.checkpoints import Checkpoints
from nestmodel.training.starting.ranks import check_ranks, find_launch
from nestmodel.training.step_limits import validates_at_multiples

MAX_LOOK_AHEAD_S = 3.0
"""Largest look-ahead, in seconds, of a trained encoder with causal convolutions and regular contexts."""

_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "32", "bf16", "16")
"""Precisions with weights in float32; the last three are older names of the first three."""


def num_ranks(trainer: pl.Trainer) -> int:
    """Returns the number of ranks of a run.

    Raises:
        LaunchError: A launcher that Lightning has found by itself has started others.
    """
    if finds_launcher(trainer):
        check_ranks(os.environ, trainer.num_devices, trainer.num_nodes)
    return trainer.num_devices * trainer.num_nodes


def check_share(trainer: pl.Trainer, plan: BatchPlan) -> int:
    """Returns how many microbatches of a step each rank processes.

    Raises:
        ConfigError: The ranks cannot share a step equally, or are not those that a launcher has started.
    """
    world_size = num_ranks(trainer)
    try:
        return len(plan.microbatches_of(0, world_size))
    except ConfigError as error:
        launch = find_launch(os.environ)
        if launch is None:
            raise
        raise LaunchError(
            f"{error} The number of ranks is {launch.source}, and --devices {trainer.num_devices} x --num-nodes "
            f"{trainer.num_nodes}."
        ) from None


def check_precision(precision: str | int | None) -> None:
    """Raises ConfigError if a precision of Lightning changes the type of the weights; None is Lightning's default."""
    if precision is not None and str(precision) not in _PRECISIONS:
        raise ConfigError(
            f"trainer.precision is {precision}, which trains with weights of another type than float32. Set it to "
            "bf16-mixed or 16-mixed, which compute in 16 bits with weights in float32, or to 32-true."
        )


def check_sampling_rate(config: NestConfig, rate: int | None) -> None:
    """Raises ConfigError if the corpus has another sampling rate than the features; None is an unknown rate."""
    if rate not in (None, config.features.sampling_rate):
        raise ConfigError(
            f"the corpus is at {rate} Hz and model.config.features.sampling_rate is {config.features.sampling_rate}. "
            "Prepare the corpus with --sampling-rate, or change the model."
        )


def check_look_ahead(config: NestConfig) -> None:
    """Raises ConfigError if the look-ahead of an encoder with causal convolutions adds up to seconds over blocks."""
    encoder = config.encoder
    is_causal = encoder.causal_downsampling or encoder.conv_context[1] == 0
    if not is_causal or encoder.att_context_style != "regular":
        return
    for left, right in encoder.att_context_size:
        seconds = config.look_ahead_s((left, right))
        if right > 0 and seconds is not None and seconds > MAX_LOOK_AHEAD_S:
            raise ConfigError(
                f"model.config.encoder.att_context_size {format_context((left, right))}, att_context_style regular: "
                f"{right} frames to the right add up over {encoder.num_layers} blocks to a look-ahead of {seconds:.1f} "
                "s. Set att_context_style to chunked_limited, with which they do not, or the right side to 0."
            )


def check_accumulation(trainer: pl.Trainer, plan: BatchPlan) -> int:
    """Checks that the trainer leaves the microbatches of a step to the plan, and that the ranks can share them.

    Returns:
        Number of microbatches that each rank processes per step.

    Raises:
        ConfigError: A setting of the trainer conflicts with the plan, or the ranks cannot share a step equally.
    """
    world_size = num_ranks(trainer)
    microbatches_per_rank = check_share(trainer, plan)
    if trainer.accumulate_grad_batches not in (1, microbatches_per_rank):
        raise ConfigError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but it is computed from "
            f"data.plan.microbatches_per_step and the number of ranks ({microbatches_per_rank} here). Leave it out."
        )
    if world_size > 1 and uses_distributed_sampler(trainer):
        raise ConfigError(
            "trainer.use_distributed_sampler is on, but the loader of each rank already yields only the "
            "microbatches of that rank. Turn it off."
        )
    if overfit_batches := cast(Any, trainer).overfit_batches:
        raise ConfigError(
            f"trainer.overfit_batches is {overfit_batches}, which the loader does not support because it has a "
            "sampler of its own. Leave it out, and prepare a corpus of a few utterances instead."
        )
    return microbatches_per_rank


def check_best(trainer: pl.Trainer, *, steps_per_epoch: int, validates: bool) -> None:
    """Checks that there will be validations after steps that have checkpoints, if the best checkpoint is kept.

    Args:
        trainer: Trainer of the run.
        steps_per_epoch: Steps of an epoch of the plan.
        validates: Whether there is a validation corpus.

    Raises:
        ConfigError: There will not.
    """
    for saver in trainer.checkpoint_callbacks:
        if not isinstance(saver, Checkpoints) or saver.config.monitor is None:
            continue
        if not validates or trainer.limit_val_batches == 0:
            raise ConfigError(
                "checkpoints.monitor is val_loss, but there is no validation: give data.val_corpus, leave "
                "limit_val_batches as it is, or leave the monitor out."
            )
        if not validates_at_multiples(trainer, steps_per_epoch, saver.config.every_n_steps):
            raise ConfigError(
                "checkpoints.monitor is val_loss, but some validations come after steps without a checkpoint: set "
                f"trainer.val_check_interval to a multiple of checkpoints.every_n_steps ({saver.config.every_n_steps})."
            )

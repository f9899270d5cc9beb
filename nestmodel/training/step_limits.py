"""The trainer's limits in whole optimizer steps: length of an epoch, interval between validations, validation length.

Lightning counts microbatches of one rank, whose number per step depends on the number of ranks. The settings of a run
count steps, which `steps_to_microbatches` converts to microbatches once, when the trainer is built. So a run validates
after the same steps and on the same data for any number of ranks, also after a resume. The limits of a program's own
trainer are microbatches, as in Lightning. `round_limit` rounds both to whole steps, and changes nothing when called
again.
"""

import math

import pytorch_lightning as pl

_LIMITS = ("limit_train_batches", "limit_val_batches", "val_check_interval")


def ends_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Returns whether a microbatch is the last of its optimizer step on this rank. Epochs consist of whole steps.

    Args:
        trainer: Trainer whose `accumulate_grad_batches` is the number of microbatches per rank and step.
        batch_idx: Index of the microbatch within the epoch, as Lightning passes it to hooks.
    """
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def steps_to_microbatches(trainer: pl.Trainer, microbatches_per_rank: int) -> None:
    """Converts the limits that are numbers of optimizer steps to microbatches; shares stay. Call it once.

    Args:
        trainer: Trainer that has just been built; it is changed.
        microbatches_per_rank: Microbatches that each rank processes per step.
    """
    for name in _LIMITS:
        if isinstance(limit := getattr(trainer, name), int):
            setattr(trainer, name, limit * microbatches_per_rank)


def round_limit(trainer: pl.Trainer, name: str, microbatches_per_rank: int, num_steps: int) -> None:
    """Rounds a limit to whole optimizer steps: a number of microbatches up; a share down, to at least one step.

    Args:
        trainer: Trainer whose limit is changed.
        name: The limit.
        microbatches_per_rank: Microbatches that each rank processes per step.
        num_steps: Steps of the whole epoch; a limit that is a share is a share of these.
    """
    limit: int | float = getattr(trainer, name)
    if isinstance(limit, int):
        setattr(trainer, name, math.ceil(limit / microbatches_per_rank) * microbatches_per_rank)
    elif 0.0 < limit < 1.0:
        setattr(trainer, name, max(1, int(limit * num_steps)) * microbatches_per_rank)


def steps_of_epoch(trainer: pl.Trainer, steps_per_epoch: int) -> int:
    """Returns the optimizer steps of an epoch of a trainer whose limits are whole steps.

    Args:
        trainer: Trainer whose `accumulate_grad_batches` and `limit_train_batches` are used.
        steps_per_epoch: Steps of an epoch of the plan.
    """
    return min(steps_per_epoch, _in_steps(trainer, trainer.limit_train_batches, steps_per_epoch))


def validates_at_multiples(trainer: pl.Trainer, steps_per_epoch: int, every_n_steps: int) -> bool:
    """Returns whether all validations of a run come after multiples of a number of optimizer steps.

    Args:
        trainer: Trainer whose limits are whole steps.
        steps_per_epoch: Steps of an epoch of the plan.
        every_n_steps: The number of steps.
    """
    epoch = steps_of_epoch(trainer, steps_per_epoch)
    starts_anew = trainer.check_val_every_n_epoch is not None  # the interval counts from the start of each epoch
    interval = _in_steps(trainer, trainer.val_check_interval, epoch)
    return interval % every_n_steps == 0 and not (starts_anew and epoch % every_n_steps)


def num_steps_of_run(trainer: pl.Trainer, steps_per_epoch: int | None = None) -> int | None:
    """Returns the optimizer steps of a whole run, including earlier starts; None if it has no last step.

    Args:
        trainer: Trainer whose `max_steps`, `max_epochs` and `limit_train_batches` are used.
        steps_per_epoch: Steps of an epoch of the plan; by default the length of the trainer's loader, in steps.
    """
    per_epoch: float
    steps = [] if trainer.max_steps < 0 else [trainer.max_steps]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        if steps_per_epoch is None:
            per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        else:
            per_epoch = steps_of_epoch(trainer, steps_per_epoch)
        steps += [] if math.isinf(per_epoch) else [trainer.max_epochs * int(per_epoch)]
    return min(steps, default=None)


def _in_steps(trainer: pl.Trainer, limit: int | float, num_steps: int) -> int:
    """Returns a limit in steps; a share, which is 1.0 or 0.0, is all of the `num_steps` of an epoch or none."""
    return limit // trainer.accumulate_grad_batches if isinstance(limit, int) else int(limit * num_steps)

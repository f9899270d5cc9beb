"""The trainer's limits in whole optimizer steps: how long an epoch is, when validation comes, and how long it takes.

Lightning counts microbatches of one rank, of which a step takes more or fewer by the number of ranks. In steps, a run
validates after the same steps and on the same data wherever it goes on.
"""

from weakref import WeakKeyDictionary

import pytorch_lightning as pl

from nestmodel.errors import ConfigError
from nestmodel.training.lightning_private import validates_by_time

_Limit = int | float
_told: WeakKeyDictionary[pl.Trainer, dict[str, tuple[_Limit, _Limit]]] = WeakKeyDictionary()
"""What a trainer was given and what it was told instead, by setting: a trainer may fit more than once."""


def ends_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Tells whether a microbatch is the last of its optimizer step on this rank; epochs are whole steps.

    Args:
        trainer: Accumulates this rank's share of a step.
        batch_idx: Index of the microbatch within the epoch, as Lightning passes it to hooks.
    """
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def count_training_in_steps(trainer: pl.Trainer, share: int, steps_per_epoch: int) -> None:
    """Has `limit_train_batches` and `val_check_interval` count optimizer steps, or parts of an epoch in whole steps.

    Args:
        trainer: Whose settings are rewritten.
        share: Microbatches of a step that each rank takes.
        steps_per_epoch: Of the plan.

    Raises:
        ConfigError: Validation is due at a time, or after more steps than an epoch has.
    """
    if validates_by_time(trainer):
        raise ConfigError(
            "trainer.val_check_interval is a time, after which ranks would validate at different steps. Give a number "
            "of optimizer steps, and trainer.check_val_every_n_epoch null."
        )
    steps_per_epoch = min(steps_per_epoch, _tell(trainer, "limit_train_batches", share, steps_per_epoch))
    interval = _tell(trainer, "val_check_interval", share, steps_per_epoch)
    if interval > steps_per_epoch > 0 and trainer.check_val_every_n_epoch is not None:
        raise ConfigError(
            f"trainer.val_check_interval is {interval} optimizer steps, and an epoch has {steps_per_epoch}. Lower it, "
            "or set trainer.check_val_every_n_epoch to null, which counts on over epochs."
        )


def count_validation_in_steps(trainer: pl.Trainer, share: int, num_steps: int) -> None:
    """Has `limit_val_batches` count as many microbatches as a training step has, of all ranks together.

    Args:
        trainer: Whose settings are rewritten.
        share: Microbatches of a step that each rank takes.
        num_steps: How many steps the validation corpus would make.
    """
    _tell(trainer, "limit_val_batches", share, num_steps)


def _tell(trainer: pl.Trainer, name: str, share: int, whole: int) -> int:
    """Rewrites a setting for Lightning; returns it in steps, of which a whole epoch has so many."""
    settings = vars(trainer)
    told = _told.setdefault(trainer, {})
    given, before = told.get(name, (settings[name], None))
    if before is not None and settings[name] != before:
        given = settings[name]  # somebody has changed it since
    if isinstance(given, int):
        steps = given
    else:
        steps = max(1, int(given * whole)) if given else 0
    is_whole = isinstance(given, float) and given == 1.0
    settings[name] = 1.0 if is_whole else steps * share
    told[name] = given, settings[name]
    return whole if is_whole else steps

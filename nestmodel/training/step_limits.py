"""The trainer's limits in whole optimizer steps: length of an epoch, interval between validations, validation length.

Lightning counts microbatches of one rank, whose number per step depends on the number of ranks. With limits in steps,
a run validates after the same steps and on the same data for any number of ranks, also after a resume.
"""

import math
from weakref import WeakKeyDictionary

import pytorch_lightning as pl

from nestmodel.errors import ConfigError

_Limit = int | float
_converted: WeakKeyDictionary[pl.Trainer, dict[str, tuple[_Limit, _Limit]]] = WeakKeyDictionary()
"""For each trainer and setting, the value that the user gave and the value set instead: a trainer may fit again."""


def ends_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Returns whether a microbatch is the last of its optimizer step on this rank. Epochs consist of whole steps.

    Args:
        trainer: Trainer whose `accumulate_grad_batches` is the number of microbatches per rank and step.
        batch_idx: Index of the microbatch within the epoch, as Lightning passes it to hooks.
    """
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def check_training_limits(trainer: pl.Trainer, steps_per_epoch: int) -> None:
    """Checks `limit_train_batches` and `val_check_interval`, which are optimizer steps, before they are converted.

    Args:
        trainer: Trainer with the settings; it is not changed.
        steps_per_epoch: Steps of an epoch of the plan.

    Raises:
        ConfigError: The validation interval is a time, or is longer than an epoch.
    """
    # Lightning does not set the attribute if the interval was given as a time.
    if not isinstance(getattr(trainer, "val_check_interval", None), int | float):
        raise ConfigError(
            "trainer.val_check_interval is a time, so that ranks would validate at different steps. Give a number of "
            "optimizer steps, and set check_val_every_n_epoch of the trainer to None (null)."
        )
    steps_per_epoch = _steps_of_epoch(trainer, steps_per_epoch)
    interval = _steps(_given(trainer, "val_check_interval"), steps_per_epoch)
    if interval > steps_per_epoch > 0 and trainer.check_val_every_n_epoch is not None:
        raise ConfigError(
            f"trainer.val_check_interval is {interval} optimizer steps, but an epoch has {steps_per_epoch}. Lower it, "
            "or set check_val_every_n_epoch of the trainer to None (null), which counts steps across epochs."
        )


def validates_at_multiples(trainer: pl.Trainer, steps_per_epoch: int, every_n_steps: int) -> bool:
    """Returns whether all validations of a run come after multiples of a number of optimizer steps.

    Args:
        trainer: Trainer with the settings, converted or not.
        steps_per_epoch: Steps of an epoch of the plan.
        every_n_steps: The number of steps.
    """
    epoch = _steps_of_epoch(trainer, steps_per_epoch)
    starts_anew = trainer.check_val_every_n_epoch is not None  # the interval counts from the start of each epoch
    interval = _steps(_given(trainer, "val_check_interval"), epoch)
    return interval % every_n_steps == 0 and not (starts_anew and epoch % every_n_steps)


def convert_training_limits(trainer: pl.Trainer, microbatches_per_rank: int, steps_per_epoch: int) -> None:
    """Converts `limit_train_batches` and `val_check_interval` from optimizer steps to microbatches.

    An integer is a number of steps. A float is a fraction of an epoch, rounded down to whole steps, at least one.

    Args:
        trainer: Trainer whose settings are changed.
        microbatches_per_rank: Microbatches that each rank processes per step.
        steps_per_epoch: Steps of an epoch of the plan.

    Raises:
        ConfigError: As `check_training_limits`; no setting is changed then.
    """
    check_training_limits(trainer, steps_per_epoch)
    epoch = _convert_limit(trainer, "limit_train_batches", microbatches_per_rank, steps_per_epoch)
    _convert_limit(trainer, "val_check_interval", microbatches_per_rank, min(steps_per_epoch, epoch))


def convert_validation_limit(trainer: pl.Trainer, microbatches_per_rank: int, num_steps: int) -> None:
    """Converts `limit_val_batches` from steps to microbatches; a step has as many microbatches as in training.

    Args:
        trainer: Trainer whose setting is changed.
        microbatches_per_rank: Microbatches that each rank processes per step.
        num_steps: Steps of the whole validation corpus.
    """
    _convert_limit(trainer, "limit_val_batches", microbatches_per_rank, num_steps)


def num_steps_of_run(trainer: pl.Trainer, steps_per_epoch: int | None = None) -> int | None:
    """Returns the optimizer steps of a whole run, those of earlier starts included; None if it has no last step.

    Args:
        trainer: Trainer whose `max_steps`, `max_epochs` and `limit_train_batches` count.
        steps_per_epoch: Steps of an epoch of the plan; by default those that the trainer's loader has yielded.
    """
    per_epoch: float
    steps = [] if trainer.max_steps < 0 else [trainer.max_steps]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        if steps_per_epoch is None:
            per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        else:
            per_epoch = _steps_of_epoch(trainer, steps_per_epoch)
        steps += [] if math.isinf(per_epoch) else [trainer.max_epochs * int(per_epoch)]
    return min(steps, default=None)


def _convert_limit(trainer: pl.Trainer, name: str, microbatches_per_rank: int, num_steps: int) -> int:
    """Sets one setting to a number of microbatches, and returns it in steps; `num_steps` is the whole epoch."""
    given = _given(trainer, name)
    steps = _steps(given, num_steps)
    is_whole = isinstance(given, float) and given == 1.0
    set_now = 1.0 if is_whole else steps * microbatches_per_rank
    setattr(trainer, name, set_now)
    _converted.setdefault(trainer, {})[name] = given, set_now
    return steps


def _given(trainer: pl.Trainer, name: str) -> _Limit:
    """Returns a setting as the user gave it, also after its conversion."""
    now: _Limit = getattr(trainer, name)
    given, set_before = _converted.get(trainer, {}).get(name, (now, None))
    # Another value than that of the conversion was set by the user afterwards.
    return given if set_before is None or now == set_before else now


def _steps_of_epoch(trainer: pl.Trainer, steps_per_epoch: int) -> int:
    """Returns the steps of an epoch of the trainer, given those of an epoch of the plan."""
    return min(steps_per_epoch, _steps(_given(trainer, "limit_train_batches"), steps_per_epoch))


def _steps(given: _Limit, num_steps: int) -> int:
    """Returns a limit in steps; `num_steps` is the whole epoch."""
    if isinstance(given, int):
        return given
    if given == 1.0:
        return num_steps
    return max(1, int(given * num_steps)) if given else 0

"""Why training has ended, as far as no error and no signal has ended it."""

from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping

from nestmodel.training.step_limits import num_steps_of_run
from nestmodel.training.stopping.stop_requests import StopRequests


def end_reason(trainer: pl.Trainer, requests: StopRequests, steps_per_epoch: int, first_step: int) -> str | None:
    """Returns which limit has ended a run; None if it has made the last of its steps.

    Args:
        trainer: Of the run, after `fit`.
        requests: Of its model.
        steps_per_epoch: Steps of an epoch of the plan.
        first_step: Optimizer steps made before this start.
    """
    has_trained = trainer.global_step > first_step
    num_steps = num_steps_of_run(trainer, steps_per_epoch)
    if num_steps is not None and trainer.global_step >= num_steps:
        return None if has_trained else _without_steps(trainer, num_steps)
    callbacks = cast(Any, trainer).callbacks
    if requests.must_finish:
        return "trainer.max_time has passed"
    if not trainer.should_stop:
        return None
    reasons = [callback.stopping_reason_message for callback in callbacks if isinstance(callback, EarlyStopping)]
    reason = next((reason for reason in reasons if reason), "a callback has set trainer.should_stop")
    return reason if has_trained else f"no step was made: {reason}"


def _without_steps(trainer: pl.Trainer, num_steps: int) -> str:
    """Returns why a run had no step left to make, and what would let it make more."""
    if num_steps == 0:
        limits = ("max_epochs", "limit_train_batches")
        return f"no step was made: trainer.{next(name for name in limits if not getattr(trainer, name))} is 0"
    limit = "max_steps" if num_steps == trainer.max_steps else "max_epochs"
    return f"trainer.{limit} of {getattr(trainer, limit):,} was reached by earlier starts: raise it to train longer"

"""Training of the small models of probes by one rule, and the weights of their best epoch.

Adam, with a learning rate that falls linearly to 0 over the epochs. Training ends early when the error on held-out data
has not improved for some epochs. The weights of the best epoch are kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppingRule:
    """When the training of a model ends."""

    max_epochs: int
    """Maximum number of passes over the training data, at the end of which the learning rate is 0."""

    patience: int
    """Training ends when the held-out error has not improved for this number of epochs."""


class Training(NamedTuple):
    """How a model was trained."""

    held_out_error: float
    """Error on the held-out data after the best epoch."""

    best_epoch: int
    """Number of the best epoch, from 1, whose weights the model has."""

    num_epochs: int
    """Number of epochs until the training ended."""

    num_steps: int
    """Number of optimizer steps until the training ended."""


def train(
    model: nn.Module,
    losses: Callable[[int], Iterable[Tensor]],
    held_out_error: Callable[[], float],
    *,
    steps_per_epoch: int,
    learning_rate: float,
    rule: StoppingRule,
    max_gradient_norm: float | None = None,
) -> Training:
    """Trains a model until the error on held-out data no longer improves, and loads the weights of the best epoch.

    Args:
        model: Its parameters are changed.
        losses: Yields the losses of the steps of an epoch, which are numbered from 1. Each is computed after the step
            before it.
        held_out_error: Returns the error of the present model on held-out data.
        steps_per_epoch: Number of losses of an epoch.
        learning_rate: Of Adam, at the first step.
        rule: When the training ends.
        max_gradient_norm: Gradients are clipped to this norm; None does not clip them.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, rule.max_epochs * steps_per_epoch)
    lowest, best_epoch, epoch = float("inf"), 0, 0
    best: dict[str, Tensor] = {}
    while epoch < rule.max_epochs and epoch - best_epoch < rule.patience:
        epoch += 1
        for loss in losses(epoch):
            optimizer.zero_grad()
            loss.backward()
            if max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm)
            optimizer.step()
            schedule.step()
        error = held_out_error()
        if error < lowest:
            lowest, best_epoch = error, epoch
            best = {name: values.clone() for name, values in model.state_dict().items()}
    model.load_state_dict(best)
    return Training(lowest, best_epoch, epoch, epoch * steps_per_epoch)

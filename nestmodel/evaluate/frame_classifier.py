"""A linear classifier of single frames: softmax regression on one layer, trained by one rule for every layer.

Features are standardised. Adam's learning rate falls linearly to 0 over the epochs; training ends early when the
accuracy on held-out frames has not improved for some epochs, and the weights of the best epoch are kept.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestdata import derive_key
from nestmodel.evaluate.ctc_head import StoppingRule

LEARNING_RATE = 0.01
FRAMES_PER_STEP = 512

_STD_OFFSET = 1e-5  # added to standard deviations, which are divisors and zero for a constant dimension


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledFrames:
    """Frames of one layer with their units."""

    values: Float[Tensor, "frames dim"]
    units: Int[Tensor, " frames"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameClassifier:
    """A trained classifier, and how it was trained."""

    mean: Float[Tensor, " dim"]
    scale: Float[Tensor, " dim"]
    linear: nn.Linear
    best_epoch: int
    num_epochs: int
    num_steps: int

    @torch.no_grad()
    def predict(self, values: Float[Tensor, "frames dim"]) -> Int[Tensor, " frames"]:
        """Returns the most likely unit of each frame."""
        logits: Tensor = self.linear((values - self.mean) * self.scale)
        return logits.argmax(dim=1)


def fit_frames(
    training: LabelledFrames, held_out: LabelledFrames, num_units: int, rule: StoppingRule, seed: int
) -> FrameClassifier:
    """Fits a classifier to frames; `seed` determines the initial weights and the order of the frames."""
    mean, scale = training.values.mean(dim=0), 1 / (training.values.std(dim=0, correction=0) + _STD_OFFSET)
    values, held_out_values = (training.values - mean) * scale, (held_out.values - mean) * scale
    generator = torch.Generator().manual_seed(derive_key(seed, "probe frames") >> 1)
    linear = nn.Linear(values.shape[1], num_units)
    nn.init.normal_(linear.weight, std=0.01, generator=generator)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.Adam(linear.parameters(), lr=LEARNING_RATE)
    steps_per_epoch = math.ceil(len(values) / FRAMES_PER_STEP)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, rule.max_epochs * steps_per_epoch)
    best_accuracy, best_epoch, epoch = -1.0, 0, 0
    best = (linear.weight.detach().clone(), linear.bias.detach().clone())
    while epoch < rule.max_epochs and epoch - best_epoch < rule.patience:
        epoch += 1
        for rows in torch.randperm(len(values), generator=generator).split(FRAMES_PER_STEP):
            optimizer.zero_grad()
            F.cross_entropy(linear(values[rows]), training.units[rows]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            accuracy = float((linear(held_out_values).argmax(dim=1) == held_out.units).double().mean())
        if accuracy > best_accuracy:
            best_accuracy, best_epoch = accuracy, epoch
            best = (linear.weight.detach().clone(), linear.bias.detach().clone())
    with torch.no_grad():
        linear.weight.copy_(best[0])
        linear.bias.copy_(best[1])
    return FrameClassifier(
        mean=mean,
        scale=scale,
        linear=linear,
        best_epoch=best_epoch,
        num_epochs=epoch,
        num_steps=epoch * steps_per_epoch,
    )

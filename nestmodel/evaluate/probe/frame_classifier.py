"""A linear classifier of single frames: softmax regression on one layer, trained by the rule of `training`.

Features are standardised. The held-out error is the share of the held-out frames whose unit is not predicted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestdata import derive_key
from nestmodel.evaluate.probe.training import StoppingRule, Training, train

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
    training: Training

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

    def losses(_epoch: int) -> Iterator[Tensor]:
        for rows in torch.randperm(len(values), generator=generator).split(FRAMES_PER_STEP):
            yield F.cross_entropy(linear(values[rows]), training.units[rows])

    @torch.no_grad()
    def held_out_error() -> float:
        return float((linear(held_out_values).argmax(dim=1) != held_out.units).double().mean())

    found = train(
        linear,
        losses,
        held_out_error,
        steps_per_epoch=math.ceil(len(values) / FRAMES_PER_STEP),
        learning_rate=LEARNING_RATE,
        rule=rule,
    )
    return FrameClassifier(mean=mean, scale=scale, linear=linear, training=found)

"""Transforms as users write them, and mistakes that they make."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.synthesis import Samples


@dataclass
class Echo:
    """Adds the samples of 3 ms before, at a random level."""

    level: float = 0.5

    def __call__(self, samples: Samples, sampling_rate: int, rng: np.random.Generator) -> Samples:
        """Returns the samples with their echo."""
        lag, changed = int(0.003 * sampling_rate), samples.copy()
        changed[lag:] += np.float32(self.level * rng.random()) * samples[:-lag]
        return changed


@dataclass
class Delay:
    """Moves the samples."""

    least: int
    most: int

    def __call__(self, samples: Samples, _rate: int, rng: np.random.Generator) -> Samples:
        """Returns the samples, later."""
        return np.roll(samples, int(rng.integers(self.least, self.most + 1)))


def halve_in_place(samples: Samples, _rate: int, _rng: np.random.Generator) -> Samples:
    """Writes to its argument."""
    samples *= np.float32(0.5)
    return samples


class Fading:
    """Remembers how often it was called."""

    calls = 0

    def __call__(self, samples: Samples, _rate: int, _rng: np.random.Generator) -> Samples:
        """Returns quieter samples each time."""
        self.calls += 1
        return samples / np.float32(self.calls)


class Following:
    """Remembers the samples before, and so depends on the order of the batches."""

    level = 1.0

    def __call__(self, samples: Samples, _rate: int, _rng: np.random.Generator) -> Samples:
        """Returns samples at the level of those before."""
        before, self.level = self.level, float(np.abs(samples).max())
        return samples * np.float32(before)


def drawn_by_torch(samples: Samples, _rate: int, _rng: np.random.Generator) -> Any:
    """Draws from a generator that nobody seeds."""
    import torch

    return torch.from_numpy(samples) * torch.rand(())


def without_rng(samples: Samples, _rate: int) -> Samples:
    """Takes too few arguments."""
    return samples


def shorter(samples: Samples, _rate: int, _rng: np.random.Generator) -> Samples:
    """Returns fewer samples."""
    return samples[:-1]


def returning_nothing(samples: Samples, _rate: int, _rng: np.random.Generator) -> None:
    """Forgets to return."""
    samples *= 2

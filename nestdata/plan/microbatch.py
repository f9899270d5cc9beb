"""`MicrobatchKey`, which identifies a microbatch, and `PlannedMicrobatch`, all that a plan says about one."""

import operator
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from nestdata.plan.positions import Bucket


class MicrobatchKey(NamedTuple):
    """Identifies a microbatch: `dataset[MicrobatchKey(step, microbatch)]`, or `dataset[step, microbatch]`.

    Together with the plan and the corpora, it determines every sample of the batch.
    """

    step: int
    """Optimizer step, counted from the start of training; it continues to count after the first epoch."""

    microbatch: int
    """Microbatch of the step, in [0, microbatches_per_step)."""

    @classmethod
    def of(cls, given: "MicrobatchLike") -> "MicrobatchKey":
        """Returns the key of (step, microbatch), or of microbatch 0 of a step."""
        step, microbatch = given if isinstance(given, tuple) else (given, 0)
        return cls(operator.index(step), operator.index(microbatch))


MicrobatchLike = MicrobatchKey | tuple[int, int] | SupportsIndex
"""What `MicrobatchKey.of` accepts."""


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """The cuts of a microbatch, and the length to which they are padded."""

    key: MicrobatchKey
    epoch: int
    """Epoch of the plan, counted from 0."""

    indices: NDArray[np.int64]
    """Indices of the cuts in the corpora, shape (cuts,)."""

    buckets: tuple[Bucket, ...]
    """The buckets of the epoch, longest cuts first."""

    bucket_number: int
    """Number of the bucket that the cuts come from."""

    @property
    def bucket(self) -> Bucket:
        """The bucket that the cuts come from."""
        return self.buckets[self.bucket_number]

    @property
    def padded_samples(self) -> int:
        """Length in samples to which the cuts are padded."""
        return self.bucket.padded_samples

"""Batch norm whose running statistics move once per optimizer step, by the microbatches of all ranks.

As torch has it, each rank's statistics follow the microbatches of that rank, and those of rank 0 are what is saved: a
model then depends on how many ranks shared the work. Here a run collects the statistics of its microbatches, the
caller adds them up over ranks in whatever collective it has, and all ranks move by their mean.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class StepBatchNorm(nn.BatchNorm1d):
    """Torch's batch norm, until it is told to collect. Normalises by the statistics of the microbatch either way.

    With one microbatch a step, collecting gives the same running statistics.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self._collected: Tensor | None = None
        self._counts = True

    def start_collecting(self) -> None:
        """From here on, training leaves the running statistics alone, and adds up those of the microbatches."""
        assert self.running_mean is not None
        self._collected = torch.zeros(2, self.num_features, device=self.running_mean.device)

    def stop_collecting(self) -> None:
        """Lets training move the running statistics again."""
        self._collected = None

    def take_collected(self) -> Float[Tensor, "2 features"]:
        """Returns the sums over microbatches of means and of unbiased variances, and starts again at zero."""
        assert self._collected is not None
        taken = self._collected.clone()
        self._collected.zero_()
        return taken

    def update(self, statistics: Float[Tensor, "2 features"]) -> None:
        """Moves the running mean and variance towards those of a step by the momentum."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        for running, of_step in zip((self.running_mean, self.running_var), statistics, strict=True):
            running.mul_(1 - self.momentum).add_(of_step, alpha=self.momentum)
        self.num_batches_tracked.add_(1)

    def forward(self, input: Float[Tensor, "batch features *frames"]) -> Float[Tensor, "batch features *frames"]:
        """Normalises each feature by its mean and variance over the microbatch; in eval mode by the running ones."""
        if not self.training or self._collected is None:
            return super().forward(input)
        # Moved all the way, running statistics of zero become those of the microbatch.
        mean, var = (torch.zeros_like(row) for row in self._collected)
        normalised = F.batch_norm(input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        if self._counts:
            self._collected.add_(torch.stack([mean, var]))
        return normalised

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """Leaves all statistics as they are while a pass is done a second time."""
        assert self.num_batches_tracked is not None
        momentum, self.momentum, self._counts = self.momentum, 0.0, False
        counted = self.num_batches_tracked.clone()
        try:
            yield
        finally:
            self.momentum, self._counts = momentum, True
            self.num_batches_tracked.copy_(counted)

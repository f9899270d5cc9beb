"""Batch norm whose running statistics are updated once per optimizer step, from the microbatches of all ranks.

With torch's batch norm, each rank has running statistics of its own microbatches, and rank 0 saves its own, so the
saved model depends on the number of ranks. `StepBatchNorm` instead collects the statistics of microbatches.
The caller sums them over ranks with a collective of its choice, and all ranks update with the same mean.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class StepBatchNorm(nn.BatchNorm1d):
    """Batch norm that can defer the update of its running statistics to the end of an optimizer step.

    Until `start_collecting` is called, it behaves exactly like `torch.nn.BatchNorm1d`. In training, inputs are always
    normalised by the statistics of their own microbatch. With one microbatch per step, collecting gives the same
    running statistics as torch.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self._collected: Tensor | None = None
        # A tensor: torch would compile a graph for each value of a number.
        self._num_collected: Tensor | None = None
        self._is_frozen = False

    def start_collecting(self) -> None:
        """Makes training collect the statistics of microbatches instead of updating the running statistics."""
        assert self.running_mean is not None
        self._collected = self.running_mean.new_zeros(2, self.num_features)
        self._num_collected = self.running_mean.new_zeros(())

    def stop_collecting(self) -> None:
        """Makes training update the running statistics again, once per microbatch."""
        self._collected = None

    def pop_collected(self, num_microbatches: int) -> Float[Tensor, "2 features"]:
        """Returns the sums over microbatches of means and of unbiased variances, and resets them to zero.

        Args:
            num_microbatches: Number of microbatches. If the norm was called more often than that, its calls are
                averaged; if it was never called, the running statistics are returned, once for each microbatch.
        """
        assert self._collected is not None
        assert self._num_collected is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        collected = self._collected * (num_microbatches / self._num_collected)
        running = torch.stack([self.running_mean, self.running_var]) * num_microbatches
        found = torch.where(self._num_collected > 0, collected, running)
        self._collected.zero_()
        self._num_collected.zero_()
        return found

    def forward(self, input: Float[Tensor, "batch features *frames"]) -> Float[Tensor, "batch features *frames"]:
        """Normalises each feature by its mean and variance in the microbatch; in eval mode by the running ones."""
        if not self.is_collecting:
            return super().forward(input)
        assert self._collected is not None
        # With a momentum of 1, the statistics of the microbatch replace the running statistics that are passed in.
        statistics = torch.zeros_like(self._collected)
        mean, var = statistics
        normalised = F.batch_norm(input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        self.collect(statistics)
        return normalised

    @property
    def is_collecting(self) -> bool:
        """Whether the statistics of the next microbatch are collected."""
        return self.training and self._collected is not None

    def collect(self, statistics: Float[Tensor, "2 features"]) -> None:
        """Adds the mean and the unbiased variance of a microbatch, unless its forward pass is recomputed."""
        assert self._collected is not None
        assert self._num_collected is not None
        if not self._is_frozen:
            self._collected.add_(statistics)
            self._num_collected.add_(1)

    @contextmanager
    def frozen_statistics(self) -> Iterator[None]:
        """Leaves all statistics unchanged while a forward pass is recomputed."""
        assert self.num_batches_tracked is not None
        momentum, self.momentum, self._is_frozen = self.momentum, 0.0, True
        num_batches = self.num_batches_tracked.clone()
        try:
            yield
        finally:
            self.momentum, self._is_frozen = momentum, False
            self.num_batches_tracked.copy_(num_batches)


def update_running_stats(norms: Sequence[StepBatchNorm], statistics: Sequence[Float[Tensor, "2 features"]]) -> None:
    """Updates the running means and variances of all norms by one operation, with a step's values times the momentum.

    Args:
        norms: The norms, which have the same momentum.
        statistics: Mean and variance of the step, for each of `norms`.
    """
    if not norms:
        return
    momentum = norms[0].momentum
    assert momentum is not None
    running = [values for norm in norms for values in (norm.running_mean, norm.running_var) if values is not None]
    torch._foreach_mul_(running, 1 - momentum)
    torch._foreach_add_(running, [values for of_step in statistics for values in of_step], alpha=momentum)
    torch._foreach_add_([norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None], 1)

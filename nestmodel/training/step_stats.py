"""What adds up over the microbatches and ranks of an optimizer step: gradients, statistics, requests to stop.

A rank that gets a signal, or whose time is over, sets a flag. The flags are part of the vector that all ranks
all-reduce at every step, so that all of them make the same decision after the same step.
"""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nestdata import MicrobatchKey
from nestmodel.errors import TrainingError
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.loss import LossStats
from nestmodel.nn.network_input import NetworkInput


@dataclass
class StopRequests:
    """The flags of one rank. `agree` sets `must_exit` and `must_finish`, which are equal on all ranks."""

    preempted_here: bool = False
    """This rank received a signal to write a checkpoint and exit, or Ctrl-C."""

    interrupted_here: bool = False
    """This rank received Ctrl-C, which decides the exit code of all ranks."""

    deadline_s: float | None = None
    """The time of this rank's monotonic clock at which `trainer.max_time` has passed; None without a limit."""

    must_exit: bool = False
    """At the last optimizer step, some rank had received a signal to write a checkpoint and exit."""

    must_finish: bool = False
    """At the last optimizer step, `trainer.max_time` had passed by the clock of some rank."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, not below 0; None without one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    @property
    def out_of_time_here(self) -> bool:
        """Whether `trainer.max_time` has passed by the clock of this rank."""
        return self.seconds_left == 0.0

    def agree(self, num_preempted: float, num_out_of_time: float) -> None:
        """Sets the shared flags from the number of ranks with each request. Call it with equal values on all ranks."""
        self.must_exit, self.must_finish = num_preempted > 0, num_out_of_time > 0


_SCALER_STEPS = 24
"""A gradient scaler starts at 2**16 and halves at every step that overflows, until no step does."""


class SkippedStepWarning(UserWarning):
    """An optimizer step was skipped because the loss or the gradients are not finite."""


@dataclass
class SkippedSteps:
    """Counts of skipped optimizer steps. All ranks hold the same counts, because they decide by the same sums."""

    total: int = 0
    """Skipped steps of the whole run."""

    in_a_row: int = 0
    """Skipped steps since the last step that was made."""

    def skip(self, what: str, limit: int, has_scaler: bool) -> None:
        """Counts one more skipped step and issues a `SkippedStepWarning`.

        Args:
            what: Which step was skipped and why, for the message.
            limit: Maximum number of consecutive skipped steps.
            has_scaler: Whether gradients are scaled (float16). The scaler first has to find its scale, so 24 more
                skipped steps are allowed.

        Raises:
            TrainingError: More consecutive steps than allowed were skipped.
        """
        self.total += 1
        self.in_a_row += 1
        limit += _SCALER_STEPS if has_scaler else 0
        if self.in_a_row > limit:
            raise TrainingError(
                f"{self.in_a_row} consecutive steps were not finite, more than optimizer.max_skipped_steps allows "
                f"({limit}); {what}. Resume from an earlier checkpoint, or start a new run from its weights, by "
                "--init-from, with a lower --lr."
            )
        warnings.warn(f"{what}.", SkippedStepWarning, stacklevel=3)


class GradientSums:
    """Adds up the gradients of microbatches by one operation for all parameters.

    Torch adds each gradient by an operation of its own: on a GPU, 600 launches for a microbatch of `large`. A parameter
    without a gradient takes over a new one without an operation. So the sums are set aside during a backward pass, and
    the new gradients are added to them after it. Both need memory at the end of the backward pass, which has usually
    freed more than that. Until `add`, the parameters have the gradients of one microbatch.

    Args:
        parameters: The trained parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[tuple[nn.Parameter, Tensor]] = []

    def set_aside(self) -> None:
        """Removes the gradients from the parameters, before a backward pass."""
        self._sums = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in self._sums:
            parameter.grad = None

    def add(self) -> None:
        """Adds the gradients of the parameters to the sums that were set aside; the parameters get the result."""
        summed = [(total, parameter.grad) for parameter, total in self._sums if parameter.grad is not None]
        if summed:
            torch._foreach_add_([total for total, _ in summed], [new for _, new in summed])
        for parameter, total in self._sums:
            parameter.grad = total
        self._sums = []


# One step contains only a few of the classes, so its entropy would be too low. Class counts therefore decay over about
# 200 steps instead.
_COUNT_DECAY = 1 - 1 / 200


class StepNumbers(NamedTuple):
    """Numbers of one rank in one optimizer step, which the ranks add up. They travel as float32."""

    num_nonfinite: Tensor
    """Microbatches with a non-finite loss."""

    num_preempted: float
    """1 if this rank received a signal to write a checkpoint and exit."""

    num_out_of_time: float
    """1 if `trainer.max_time` has passed by the clock of this rank."""

    num_samples: float
    """Samples of audio, without padding."""

    num_microbatches: float


class StepStats:
    """Accumulates the loss statistics of the microbatches of one optimizer step on this rank.

    Args:
        norms: Batch norms that collect statistics of whole steps.
        num_codebooks: Codebooks of the quantizer.
    """

    def __init__(self, norms: Sequence[StepBatchNorm], num_codebooks: int) -> None:
        self._norms = norms
        self._num_codebooks = num_codebooks
        self._values: Tensor | None = None
        self._microbatches: list[tuple[MicrobatchKey, list[str], Tensor]] = []
        self._num_samples = 0

    def add(self, stats: LossStats, batch: NetworkInput) -> None:
        """Adds the statistics of a microbatch."""
        self._num_samples += batch.num_samples
        values = stats.flatten()
        self._values = values if self._values is None else self._values + values
        self._microbatches.append((batch.key, batch.sample_id, stats.nll_sum.detach()))

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches that were added."""
        return len(self._microbatches)

    def check_complete(self, microbatches_per_rank: int, rank: int) -> None:
        """Checks that all microbatches of the step were added.

        Args:
            microbatches_per_rank: Number of microbatches that each rank processes per step.
            rank: Global rank, for the message.

        Raises:
            TrainingError: The data of this rank ended within the step.
        """
        found = self.num_microbatches
        if found != microbatches_per_rank:
            step = self._microbatches[0][0].step
            raise TrainingError(
                f"the data of rank {rank} ended within step {step}, after {found} of {microbatches_per_rank} "
                "microbatches. Either the loader is not the one of NestDataModule, or a loader worker was lost: start "
                "the run again."
            )

    def flatten(self, requests: StopRequests) -> Float[Tensor, " values"]:
        """Packs the sums of this rank into one vector, of the same length on every rank and at every step."""
        assert self._values is not None
        losses = torch.stack([nll_sum for _, _, nll_sum in self._microbatches])
        numbers = StepNumbers(
            num_nonfinite=(~losses.isfinite()).sum().to(losses.dtype),
            num_preempted=float(requests.preempted_here),
            num_out_of_time=float(requests.out_of_time_here),
            num_samples=float(self._num_samples),
            num_microbatches=float(len(losses)),
        )
        # Not `new_tensor`, which copies from the CPU and waits for the device.
        scalars = [each if isinstance(each, Tensor) else losses.new_full((), each) for each in numbers]
        collected = [norm.pop_collected(self.num_microbatches).flatten() for norm in self._norms]
        return torch.cat([torch.stack(scalars), *collected, self._values])

    def unflatten(
        self, values: Float[Tensor, " values"]
    ) -> tuple[LossStats, dict[str, Float[Tensor, ""]], list[Float[Tensor, "2 features"]]]:
        """Unpacks a vector of `flatten` that was summed over all ranks.

        Returns:
            The sums over the scored tokens; the sums of `StepNumbers`, by name; mean and variance for every batch norm,
            averaged over the microbatches.
        """
        first, rest = values.tensor_split([len(StepNumbers._fields)])
        numbers = dict(zip(StepNumbers._fields, first, strict=True))
        sizes = [2 * norm.num_features for norm in self._norms]
        *collected, stats = rest.split([*sizes, len(rest) - sum(sizes)])
        norm_statistics = [sums.view(2, -1) / numbers["num_microbatches"] for sums in collected]
        return LossStats.unflatten(stats, self._num_codebooks), numbers, norm_statistics

    def nonfinite_sources(self) -> str:
        """Describes why the step is not finite, with the cut ids of the microbatches on this rank.

        Lists the microbatches with a non-finite loss, or all of them if every loss on this rank is finite.
        """
        nonfinite = [microbatch for microbatch in self._microbatches if not microbatch[2].isfinite()]
        what = "the loss is not finite" if nonfinite else "the gradients are not finite, although every loss here is"
        listed = "; ".join(
            f"microbatch {key.microbatch}: {', '.join(ids)}" for key, ids, _ in nonfinite or self._microbatches
        )
        return f"{what} ({listed})"


def add_decayed(counts: Tensor | None, stats: LossStats) -> Tensor:
    """Returns class counts, tokens first and predictions second, decayed by one step, plus the counts of a step.

    The training metrics of entropy, perplexity and codebook use are computed from them.

    Args:
        counts: Decayed counts; None before the first step.
        stats: Sums of the step.
    """
    new = torch.stack([stats.token_counts, stats.predicted_counts])
    return new if counts is None else _COUNT_DECAY * counts.to(new.device) + new


def fetch(scalars: Mapping[str, Float[Tensor, ""]]) -> dict[str, Float[Tensor, ""]]:
    """Returns scalars of a device as scalars on the CPU, which waits for the device once."""
    return dict(zip(scalars, torch.stack(list(scalars.values())).cpu().unbind(), strict=True))

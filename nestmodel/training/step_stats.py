"""What is added up over microbatches and ranks, once per optimizer step and in one collective."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nestdata import AudioNoiseBatch, MicrobatchKey
from nestmodel.errors import TrainingError
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.loss_stats import LossStats
from nestmodel.training.stop_requests import StopRequests


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The sums of one optimizer step over all microbatches of all ranks."""

    tally: LossStats
    num_broken: Float[Tensor, ""]
    """Microbatches whose loss is no number."""

    num_preempted: Float[Tensor, ""]
    """Ranks that were asked to checkpoint and exit."""

    num_out_of_time: Float[Tensor, ""]
    """Ranks by whose clock the time is up."""

    statistics: list[Float[Tensor, "2 features"]]
    """Mean and variance of every batch norm, averaged over the microbatches."""


class StepStats:
    """Gathers what the microbatches of one optimizer step leave behind on this rank.

    Args:
        norms: Batch norms that collect statistics.
        num_codebooks: Of the tokens.
    """

    def __init__(self, norms: Sequence[StepBatchNorm], num_codebooks: int) -> None:
        self._norms = norms
        self._num_codebooks = num_codebooks
        self._values: Tensor | None = None
        self._microbatches: list[tuple[MicrobatchKey, list[str], Tensor]] = []

    def add(self, tally: LossStats, batch: AudioNoiseBatch) -> None:
        """Adds a microbatch."""
        values = tally.flatten()
        self._values = values if self._values is None else self._values + values
        self._microbatches.append((batch.key, batch.sample_id, tally.nll_sum.detach()))

    def check_whole(self, share: int, rank: int) -> None:
        """Checks that every microbatch of the step is there.

        Args:
            share: How many of them a rank takes.
            rank: This one, for the message.

        Raises:
            TrainingError: The data of this rank ended before.
        """
        found = len(self._microbatches)
        if found != share:
            step = self._microbatches[0][0].step
            raise TrainingError(
                f"the data of rank {rank} ended in the midst of step {step}, after {found} of {share} "
                "microbatches. The loader is not the one of NestDataModule, or has lost a worker: start the run again."
            )

    def flatten(self, requests: StopRequests) -> Float[Tensor, " values"]:
        """Packs the sums of this rank into one vector, of the same size on every rank and at every step."""
        assert self._values is not None
        losses = torch.stack([nll_sum for _, _, nll_sum in self._microbatches])
        flags = losses.new_tensor([requests.preempted_here, requests.out_of_time_here, len(losses)])
        counts = torch.cat([(~losses.isfinite()).sum().to(losses.dtype).unsqueeze(0), flags])
        collected = [norm.pop_collected().flatten() for norm in self._norms]
        return torch.cat([counts, *collected, self._values])

    def unflatten(self, values: Float[Tensor, " values"]) -> StepTotals:
        """Unpacks the sums over all ranks."""
        (num_broken, num_preempted, num_out_of_time, num_microbatches), rest = values[:4], values[4:]
        sizes = [2 * norm.num_features for norm in self._norms]
        *collected, tally = rest.split([*sizes, len(rest) - sum(sizes)])
        return StepTotals(
            LossStats.unflatten(tally, self._num_codebooks),
            num_broken,
            num_preempted,
            num_out_of_time,
            [sums.view(2, -1) / num_microbatches for sums in collected],
        )

    def nonfinite_sources(self) -> str:
        """Names the microbatches of this rank whose loss is no number, with their cuts; else all of them."""
        broken = [one for one in self._microbatches if not one[2].isfinite()]
        what = "the loss is no number" if broken else "the gradients are no numbers, and every loss here is one"
        listed = "; ".join(
            f"microbatch {key.microbatch}: {', '.join(ids)}" for key, ids, _ in broken or self._microbatches
        )
        return f"{what} ({listed})"

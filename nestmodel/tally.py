"""What is added up over microbatches and ranks, once per optimizer step and in one collective."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nestdata import AudioNoiseBatch, MicrobatchKey
from nestmodel.batch_norm import StepBatchNorm
from nestmodel.errors import TrainingError
from nestmodel.metrics import token_entropy


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over scored tokens that can be added up over microbatches and ranks."""

    nll_sum: Float[Tensor, ""]
    """Negative log-likelihood in nats, averaged over codebooks."""

    num_tokens: Float[Tensor, ""]
    """Scored encoder frames."""

    num_correct: Float[Tensor, ""]
    """Those whose most likely class is the token, averaged over codebooks."""

    token_counts: Float[Tensor, "codebooks classes"]
    """How often each class occurs among the scored tokens."""

    predicted_counts: Float[Tensor, "codebooks classes"]
    """How often each class is the most likely one."""

    def flatten(self) -> Float[Tensor, " values"]:
        """Packs everything into one vector, so that one collective adds it up."""
        heads = torch.stack([self.nll_sum.detach(), self.num_tokens, self.num_correct])
        return torch.cat([heads, self.token_counts.flatten(), self.predicted_counts.flatten()])

    def figures(self, counts: Float[Tensor, "2 codebooks classes"]) -> dict[str, Tensor]:
        """Returns what is logged, by name.

        Args:
            counts: Of the classes among the tokens and among the predictions, over as many steps as entropies need.
        """
        num_tokens = self.num_tokens.clamp(min=1)
        of_tokens, of_predictions = token_entropy(counts[0]), token_entropy(counts[1])
        return {
            "loss": self.nll_sum / num_tokens,
            "accuracy": self.num_correct / num_tokens,
            "codebook_use": (counts[0] > 0.5).float().mean(),
            "token_entropy": of_tokens,
            "token_perplexity": of_tokens.exp(),
            "prediction_entropy": of_predictions,
            "prediction_perplexity": of_predictions.exp(),
        }

    @classmethod
    def unflatten(cls, values: Float[Tensor, " values"], num_codebooks: int) -> "Tally":
        """Unpacks what `flatten` packed."""
        return cls(*values[:3], *values[3:].unflatten(0, (2, num_codebooks, -1)))


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The sums of one optimizer step over all microbatches of all ranks."""

    tally: Tally
    num_broken: Float[Tensor, ""]
    """Microbatches whose loss is no number."""

    num_leaving: Float[Tensor, ""]
    """Ranks that were asked to leave."""

    num_out_of_time: Float[Tensor, ""]
    """Ranks by whose clock the time is up."""

    statistics: list[Float[Tensor, "2 features"]]
    """Mean and variance of every batch norm, averaged over the microbatches."""


class StepSums:
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

    def add(self, tally: Tally, batch: AudioNoiseBatch) -> None:
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

    def flatten(self, *, is_leaving: bool, is_out_of_time: bool) -> Float[Tensor, " values"]:
        """Packs the sums of this rank into one vector, of the same size on every rank and at every step."""
        assert self._values is not None
        losses = torch.stack([nll_sum for _, _, nll_sum in self._microbatches])
        counts = torch.stack(
            [(~losses.isfinite()).sum().to(losses.dtype), *losses.new_tensor([is_leaving, is_out_of_time, len(losses)])]
        )
        collected = [norm.take_collected().flatten() for norm in self._norms]
        return torch.cat([counts, *collected, self._values])

    def unflatten(self, values: Float[Tensor, " values"]) -> StepTotals:
        """Unpacks the sums over all ranks."""
        (num_broken, num_leaving, num_out_of_time, num_microbatches), rest = values[:4], values[4:]
        sizes = [2 * norm.num_features for norm in self._norms]
        *collected, tally = rest.split([*sizes, len(rest) - sum(sizes)])
        return StepTotals(
            Tally.unflatten(tally, self._num_codebooks),
            num_broken,
            num_leaving,
            num_out_of_time,
            [sums.view(2, -1) / num_microbatches for sums in collected],
        )

    def suspects(self) -> str:
        """Names the microbatches of this rank whose loss is no number, with their cuts; else all of them."""
        broken = [one for one in self._microbatches if not one[2].isfinite()]
        what = "the loss is no number" if broken else "the gradients are no numbers, and every loss here is one"
        listed = "; ".join(
            f"microbatch {key.microbatch}: {', '.join(ids)}" for key, ids, _ in broken or self._microbatches
        )
        return f"{what} ({listed})"

"""Sums over scored tokens, from which the loss and the metrics of a step are computed."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nestmodel.nn.loss import NO_TOKEN, masked_nll
from nestmodel.nn.metrics import token_counts, token_entropy
from nestmodel.nn.network import NestOutput
from nestmodel.representation import shapes

METRIC_NAMES = (
    *("loss", "accuracy", "codebook_use", "token_entropy", "token_perplexity"),
    *("prediction_entropy", "prediction_perplexity"),
)
"""Names of the metrics of training and validation, without the prefix `train_` or `val_`."""

CONTEXT_METRICS = ("loss", "accuracy")
"""Those that validation reports for each attention context."""


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over scored tokens, which can be added over microbatches and ranks."""

    nll_sum: Float[Tensor, ""]
    """Negative log-likelihood in nats, summed over frames and averaged over codebooks. Differentiable."""

    num_tokens: Float[Tensor, ""]
    """Number of scored encoder frames."""

    num_correct: Float[Tensor, ""]
    """Number of scored encoder frames whose most likely class is the target, averaged over codebooks."""

    token_counts: Float[Tensor, "codebooks classes"]
    """Occurrences of each class among the target tokens."""

    predicted_counts: Float[Tensor, "codebooks classes"]
    """Occurrences of each class among the most likely classes."""

    __repr__ = shapes

    @property
    def loss(self) -> Float[Tensor, ""]:
        """Mean negative log-likelihood per scored encoder frame, in nats; 0 if no frame is scored."""
        return self.nll_sum / self.num_tokens.clamp(min=1)

    def flatten(self) -> Float[Tensor, " values"]:
        """Packs all sums into one detached vector, so that one collective can add them."""
        heads = torch.stack([self.nll_sum.detach(), self.num_tokens, self.num_correct])
        return torch.cat([heads, self.token_counts.flatten(), self.predicted_counts.flatten()])

    def metrics(self, counts: Float[Tensor, "2 codebooks classes"]) -> dict[str, Tensor]:
        """Returns the logged metrics by name, in the order of `METRIC_NAMES`.

        Args:
            counts: Class counts of the target tokens and of the predictions, for the entropies and codebook use. They
                may cover more steps than the other sums.
        """
        of_tokens, of_predictions = token_entropy(counts[0]), token_entropy(counts[1])
        return {
            "loss": self.loss,
            "accuracy": self.num_correct / self.num_tokens.clamp(min=1),
            "codebook_use": (counts[0] > 0.5).float().mean(),
            "token_entropy": of_tokens,
            "token_perplexity": of_tokens.exp(),
            "prediction_entropy": of_predictions,
            "prediction_perplexity": of_predictions.exp(),
        }

    @classmethod
    def unflatten(cls, values: Float[Tensor, " values"], num_codebooks: int) -> "LossStats":
        """Unpacks the vector returned by `flatten`."""
        return cls(*values[:3], *values[3:].unflatten(0, (2, num_codebooks, -1)))


def loss_stats(output: NestOutput, is_scored: Bool[Tensor, " rows"] | None = None) -> LossStats:
    """Computes the loss and the other sums of one microbatch.

    For a loss to minimise over one microbatch, use `loss_stats(output).loss`. To average over several microbatches or
    ranks, add `nll_sum` and `num_tokens` and divide once.

    Args:
        output: Logits and targets.
        is_scored: False for the rows of `output` that only fill it up; by default all rows are scored.
    """
    predicted, num_classes = output.logits.detach().argmax(dim=1), output.logits.shape[1]
    if is_scored is not None:
        nll_sum, _ = masked_nll(output.logits, output.targets.masked_fill(~is_scored.unsqueeze(1), NO_TOKEN))
        return LossStats(
            nll_sum,
            is_scored.sum().to(nll_sum.dtype),
            ((predicted == output.targets) & is_scored.unsqueeze(1)).float().mean(dim=1).sum(),
            token_counts(output.targets, num_classes, is_scored).float(),
            token_counts(predicted, num_classes, is_scored).float(),
        )
    nll_sum, num_tokens = masked_nll(output.logits, output.targets)
    return LossStats(
        nll_sum,
        nll_sum.new_full((), num_tokens),
        (predicted == output.targets).float().mean(dim=1).sum(),
        token_counts(output.targets, num_classes).float(),
        token_counts(predicted, num_classes).float(),
    )

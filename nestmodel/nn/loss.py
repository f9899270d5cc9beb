"""Loss and metrics of the scored tokens, as sums over one microbatch.

The caller adds the sums and divides once, because the mean is over the scored tokens of all microbatches and ranks of
an optimizer step.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Real
from torch import Tensor

from nestmodel.nn.network import NestOutput

CONTEXT_METRICS = ("loss", "accuracy")
"""Metrics that validation reports for each attention context."""


def masked_nll(
    logits: Float[Tensor, "scored classes codebooks"], tokens: Int[Tensor, "scored codebooks"]
) -> tuple[Float[Tensor, ""], int]:
    """Returns the negative log-likelihood of the scored tokens, summed over frames and averaged over codebooks.

    Args:
        logits: Logits or log-probabilities of the classes at the scored encoder frames. They are converted to float32.
        tokens: The target class of each codebook at these frames, in [0, num_classes).

    Returns:
        The sum, in nats, and the number of rows, to divide it by. Without scored frames the sum is 0 and its gradient
        is 0.

    Source: NEST, arXiv:2408.13106. Differs from NeMo, whose mean is NaN when no token is scored.
    """
    num_classes, num_codebooks = logits.shape[1:]
    # (scored, classes, codebooks) -> (scored * codebooks, classes)
    rows = logits.float().transpose(1, 2).reshape(-1, num_classes)
    nll_sum = F.cross_entropy(rows, tokens.flatten(), reduction="sum")
    return nll_sum / num_codebooks, len(logits)


def token_counts(tokens: Int[Tensor, "*batch codebooks"], num_classes: int) -> Int[Tensor, "codebooks classes"]:
    """Counts the occurrences of each class in each codebook.

    Args:
        tokens: Classes in [0, num_classes).
        num_classes: Number of classes of each codebook.
    """
    rows = tokens.reshape(-1, tokens.shape[-1]).T.contiguous()  # (*batch, codebooks) -> (codebooks, tokens)
    # Not `scatter_add_`: in deterministic mode the CPU waits for it.
    classes = torch.arange(num_classes + 1, dtype=rows.dtype, device=rows.device).repeat(len(rows), 1)
    return torch.searchsorted(rows.sort().values, classes).diff()


def token_entropy(counts: Real[Tensor, "*codebooks classes"]) -> Float[Tensor, " *codebooks"]:
    """Returns the entropy of the class distribution of each codebook, in nats and in double precision.

    Its mean is the loss of a model that knows only the frequency of each class, so a useful model has a lower loss.
    Counts may be weighted. Equally frequent classes give log(classes); zero counts give 0.
    """
    totals = counts.double().sum(-1, keepdim=True)
    shares = counts / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    entropies: Tensor = -torch.special.xlogy(shares, shares).sum(-1)
    return entropies


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

    @property
    def loss(self) -> Float[Tensor, ""]:
        """Mean negative log-likelihood per scored encoder frame, in nats.

        If no frame is scored, it is 0, and so are its gradients; `metrics` then has no value.
        """
        return self.nll_sum / self.num_tokens.clamp(min=1)

    def flatten(self) -> Float[Tensor, " values"]:
        """Packs all sums into one detached vector, so that one collective can add them."""
        heads = torch.stack([self.nll_sum.detach(), self.num_tokens, self.num_correct])
        return torch.cat([heads, self.token_counts.flatten(), self.predicted_counts.flatten()])

    def metrics(self, counts: Float[Tensor, "2 codebooks classes"]) -> dict[str, Tensor]:
        """Returns the logged metrics by name, without the prefix `train_` or `val_`.

        With several codebooks, use and token entropy are also given for each, such as `codebook_use_cb0`. A mean over
        nothing is nan, such as the loss without scored frames.

        Args:
            counts: Class counts of the target tokens and of the predictions, for the entropies and codebook use. They
                may cover more steps than the other sums.
        """
        is_used, entropies = (counts[0] > 0.5).float(), token_entropy(counts[0])
        entropies = entropies.where(counts[0].sum(-1) > 0, torch.nan)
        of_tokens = entropies.mean().float()
        of_predictions = token_entropy(counts[1]).where(counts[1].sum(-1) > 0, torch.nan).mean().float()
        metrics = {
            "loss": self.nll_sum / self.num_tokens,
            "accuracy": self.num_correct / self.num_tokens,
            "codebook_use": is_used.mean(),
            "token_entropy": of_tokens,
            "token_perplexity": of_tokens.exp(),
            "prediction_entropy": of_predictions,
            "prediction_perplexity": of_predictions.exp(),
        }
        if len(is_used) > 1:
            for book, (use, entropy) in enumerate(zip(is_used.mean(-1), entropies.float(), strict=True)):
                metrics |= {f"codebook_use_cb{book}": use, f"token_entropy_cb{book}": entropy}
        return metrics

    @classmethod
    def unflatten(cls, values: Float[Tensor, " values"], num_codebooks: int) -> "LossStats":
        """Unpacks the vector returned by `flatten`."""
        return cls(*values[:3], *values[3:].unflatten(0, (2, num_codebooks, -1)))


def loss_stats(output: NestOutput) -> LossStats:
    """Computes the loss and the other sums of one microbatch.

    For a loss to minimise over one microbatch, use `loss_stats(output).loss`. To average over several microbatches or
    ranks, add `nll_sum` and `num_tokens` and divide once.
    """
    nll_sum, num_rows = masked_nll(output.logits, output.targets)
    predicted, num_classes = output.logits.detach().argmax(dim=1), output.logits.shape[1]
    return LossStats(
        nll_sum,
        nll_sum.new_full((), num_rows),
        (predicted == output.targets).float().mean(dim=1).sum(),
        token_counts(output.targets, num_classes).float(),
        token_counts(predicted, num_classes).float(),
    )

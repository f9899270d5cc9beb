"""Sums over scored tokens, from which the loss and the metrics of a step follow."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nestmodel.nn.metrics import token_entropy


@dataclass(frozen=True, slots=True)
class LossStats:
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
    def unflatten(cls, values: Float[Tensor, " values"], num_codebooks: int) -> "LossStats":
        """Unpacks what `flatten` packed."""
        return cls(*values[:3], *values[3:].unflatten(0, (2, num_codebooks, -1)))

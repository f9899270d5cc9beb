"""What the tokens of a run look like: counts of each class, and how hard they are to guess."""

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor


def token_counts(tokens: Int[Tensor, "*batch codebooks"], num_classes: int) -> Int[Tensor, "codebooks classes"]:
    """Counts how often each class of each codebook occurs.

    Args:
        tokens: Classes in [0, num_classes).
        num_classes: Classes of each codebook.
    """
    rows = tokens.reshape(-1, tokens.shape[-1]).T  # (*batch, codebooks) -> (codebooks, tokens)
    counts = rows.new_zeros(len(rows), num_classes)
    return counts.scatter_add_(1, rows, torch.ones_like(rows))


def token_entropy(counts: Real[Tensor, "*codebooks classes"]) -> Float[Tensor, ""]:
    """Entropy of the classes in nats, averaged over codebooks.

    This is the loss of a model that knows how frequent each class is and nothing else: training starts to pay below
    it. Counts may be weighted. All classes equally frequent give log(classes); no token at all gives 0.
    """
    totals = counts.double().sum(-1, keepdim=True)
    shares = counts / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    entropies: Tensor = -torch.special.xlogy(shares, shares).sum(-1)
    return entropies.mean().float()

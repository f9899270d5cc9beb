"""Statistics of tokens: class counts and entropy."""

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor


def token_counts(
    tokens: Int[Tensor, "*batch codebooks"], num_classes: int, is_counted: Bool[Tensor, "*batch"] | None = None
) -> Int[Tensor, "codebooks classes"]:
    """Counts the occurrences of each class in each codebook.

    Args:
        tokens: Classes in [0, num_classes).
        num_classes: Number of classes of each codebook.
        is_counted: False where the tokens are not counted; by default all are.
    """
    rows = tokens.reshape(-1, tokens.shape[-1]).T  # (*batch, codebooks) -> (codebooks, tokens)
    counts = rows.new_zeros(len(rows), num_classes)
    ones = torch.ones_like(rows) if is_counted is None else is_counted.reshape(-1).to(rows.dtype).expand_as(rows)
    return counts.scatter_add_(1, rows, ones)


def token_entropy(counts: Real[Tensor, "*codebooks classes"]) -> Float[Tensor, ""]:
    """Returns the entropy of the class distribution in nats, averaged over codebooks.

    This is the loss of a model that knows only the frequency of each class, so a useful model has a lower loss. Counts
    may be weighted. Equally frequent classes give log(classes); zero counts give 0.
    """
    totals = counts.double().sum(-1, keepdim=True)
    shares = counts / totals.clamp(min=torch.finfo(totals.dtype).tiny)
    entropies: Tensor = -torch.special.xlogy(shares, shares).sum(-1)
    return entropies.mean().float()

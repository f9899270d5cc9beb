"""Loss of the tokens that count, as a sum and a count.

Owns the sum over one microbatch. Leaves the division to the caller, who knows how many tokens the whole optimizer
step has over all microbatches and ranks.
"""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def masked_nll(
    logits: Float[Tensor, "selected classes codebooks"], tokens: Int[Tensor, "selected codebooks"]
) -> tuple[Float[Tensor, ""], int]:
    """Sums the negative log-likelihood of the selected tokens, averaged over codebooks, in nats.

    Args:
        logits: Scores of the classes at the selected encoder frames; log-probabilities do as well. Float32 is used
            whatever their precision.
        tokens: The class of each codebook at these frames, in [0, num_classes).

    Returns:
        The sum, and the number of selected encoder frames to divide it by. No selected frame gives a sum of 0 whose
        gradient is 0.

    Source: NEST, arXiv:2408.13106, section 3.4. Differs from NeMo, whose mean is NaN when no token counts.
    """
    num_classes, num_codebooks = logits.shape[1:]
    # (selected, classes, codebooks) -> (selected * codebooks, classes)
    rows = logits.float().transpose(1, 2).reshape(-1, num_classes)
    nll_sum = F.cross_entropy(rows, tokens.flatten(), reduction="sum")
    return nll_sum / num_codebooks, len(logits)

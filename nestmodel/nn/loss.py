"""Loss of the scored tokens, as a sum and a count.

The sum is over one microbatch. The caller divides, because the mean is over the scored tokens of all microbatches and
ranks of an optimizer step.
"""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NO_TOKEN = -100
"""Stands for the target of a row that is not scored; the default `ignore_index` of torch's cross entropy."""


def masked_nll(
    logits: Float[Tensor, "scored classes codebooks"], tokens: Int[Tensor, "scored codebooks"]
) -> tuple[Float[Tensor, ""], int]:
    """Returns the negative log-likelihood of the scored tokens, summed over frames and averaged over codebooks.

    Args:
        logits: Logits or log-probabilities of the classes at the scored encoder frames. They are converted to float32.
        tokens: The target class of each codebook at these frames, in [0, num_classes), or `NO_TOKEN`, which adds
            nothing to the sum.

    Returns:
        The sum, in nats, and the number of rows, to divide it by if all of them have a target. Without scored frames
        the sum is 0 and its gradient is 0.

    Source: NEST, arXiv:2408.13106, section 3.4. Differs from NeMo, whose mean is NaN when no token is scored.
    """
    num_classes, num_codebooks = logits.shape[1:]
    # (scored, classes, codebooks) -> (scored * codebooks, classes)
    rows = logits.float().transpose(1, 2).reshape(-1, num_classes)
    nll_sum = F.cross_entropy(rows, tokens.flatten(), reduction="sum")
    return nll_sum / num_codebooks, len(logits)

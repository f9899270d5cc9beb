"""The Noam learning-rate schedule, as a function of the number of the optimizer step alone."""

from nestmodel.config import OptimizerConfig


def noam_lr(step: int, config: OptimizerConfig, d_model: int) -> float:
    """Learning rate of an optimizer step: rises linearly over the warm-up, then falls with the square root.

    Args:
        step: Number of the step, from 1; step 0 has the rate of step 1.
        config: Factor, warm-up and floor. The floor holds after the warm-up only.
        d_model: Length of an encoder frame; the rate scales with its inverse square root.

    Source: "Attention is all you need", arXiv:1706.03762, equation 3, with a factor and a floor.
    """
    count = max(1, step)
    rate: float = config.lr * d_model**-0.5 * min(count**-0.5, count * config.warmup_steps**-1.5)
    return max(rate, config.min_lr) if count > config.warmup_steps else rate

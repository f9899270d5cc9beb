"""The optimizer and its schedule: AdamW under the Noam learning rate, a function of the optimizer step alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nestmodel.config import OptimizerConfig
from nestmodel.training.lightning_private import allow_clipping


def noam_lr(step: int, config: OptimizerConfig, d_model: int) -> float:
    """Returns the learning rate of an optimizer step: linear growth in the warm-up, then inverse square-root decay.

    Args:
        step: Number of the optimizer step, from 1. Step 0 has the learning rate of step 1.
        config: Factor, number of warm-up steps and minimum. The minimum applies after the warm-up only.
        d_model: Dimension of the encoder; the learning rate scales with its inverse square root.

    Source: "Attention Is All You Need", arXiv:1706.03762, equation 3. Differs: a factor and a minimum are added.
    """
    count = max(1, step)
    rate: float = config.lr * d_model**-0.5 * min(count**-0.5, count * config.warmup_steps**-1.5)
    return max(rate, config.min_lr) if count > config.warmup_steps else rate


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer divides gradients by its attribute `grad_scale`, a scalar in float32, if it is set.

    It then writes the quotients to the gradients.

    Source: `FusedAdamMathFunctor` in `fused_adam_utils.cuh` of PyTorch 2.11.
    """
    return isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, d_model: int, device: torch.device
) -> dict[str, Any]:
    """Returns AdamW and its Noam schedule in the form that `configure_optimizers` returns to Lightning.

    Args:
        parameters: Parameters to train.
        config: Settings of AdamW and of the schedule.
        d_model: Dimension of the encoder, for the schedule.
        device: Device of the parameters. On CPU and CUDA the fused implementation is used, which makes one pass over
            weights and moments instead of eight.
    """
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(
        list(parameters), lr=1.0, betas=config.betas, weight_decay=config.weight_decay, fused=fused
    )
    allow_clipping(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: noam_lr(step, config, d_model))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

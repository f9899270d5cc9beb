"""The optimizer, its gradients and its schedule.

It is AdamW under a learning rate that is a function of the optimizer step alone.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nestmodel.config import OptimizerConfig
from nestmodel.errors import ConfigError
from nestmodel.nn.gpu import devices
from nestmodel.training.lightning_private import allow_clipping

_CLIP_EPS = 1e-6
"""`torch.nn.utils.clip_grad_norm_` adds this to the norm before it divides by the norm."""


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


def learning_rate(step: int, config: OptimizerConfig, d_model: int, num_steps: int) -> float:
    """Returns the learning rate of an optimizer step.

    Args:
        step: Number of optimizer steps made before.
        config: Schedule, rate, number of warm-up steps and minimum.
        d_model: Dimension of the encoder, for `noam`.
        num_steps: Steps of the whole run, for `cosine` and `wsd`.

    Source: for `wsd`, MiniCPM, arXiv:2404.06395, with a linear decay.
    """
    if config.schedule == "noam":
        return noam_lr(step, config, d_model)
    count = step + 1
    if count <= config.warmup_steps:
        return config.lr * count / config.warmup_steps
    first = config.warmup_steps
    if config.schedule == "wsd":
        first = max(first, num_steps - round(config.decay_share * num_steps))
    done = min(1.0, max(0, count - first) / max(1, num_steps - first))
    left = 1.0 - done if config.schedule == "wsd" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def divide_and_clip(
    optimizer: torch.optim.Optimizer,
    num_tokens: Float[Tensor, ""],
    max_norm: float | None,
    *,
    is_last_change: bool,
) -> Float[Tensor, ""]:
    """Divides the gradients of an optimizer by the number of scored tokens, and clips the quotients by their norm.

    On a GPU, fused AdamW does both by one division while it reads the gradients: 12 bytes of gradients are moved for
    each parameter, clipped or not. Separate passes would move 28 bytes with Lightning's clipping, and 24 without its
    second norm.

    Args:
        optimizer: The optimizer, whose gradients are sums over tokens.
        num_tokens: Number of scored tokens of the step, at least 1, in float32.
        max_norm: Norm to which longer gradients are scaled down, above 0; None for no clipping.
        is_last_change: Whether nothing else reads or changes the gradients before the optimizer steps.

    Returns:
        The norm of the quotients before clipping.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grads = [parameter.grad for parameter in parameters]
    if is_last_change and devices.is_on_gpu(num_tokens) and _divides_gradients(optimizer):
        norm = torch.nn.utils.get_total_norm(grads) / num_tokens
        factor = None if max_norm is None else torch.clamp(max_norm / (norm + _CLIP_EPS), max=1.0)
        cast(Any, optimizer).grad_scale = num_tokens if factor is None else num_tokens / factor
        return norm
    torch._foreach_div_(grads, num_tokens)
    norm = torch.nn.utils.get_total_norm(grads)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer divides gradients by its attribute `grad_scale`, a scalar in float32, if it is set.

    It then writes the quotients to the gradients.

    Source: `FusedAdamMathFunctor` in `fused_adam_utils.cuh` of PyTorch 2.11.
    """
    return isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)


def check_schedule(config: OptimizerConfig, num_steps: int) -> None:
    """Checks that a schedule has a last step, if it needs one.

    Raises:
        ConfigError: It needs a last step, and the run has none.
    """
    if config.ends_with_run and num_steps <= config.warmup_steps:
        raise ConfigError(
            f"optimizer.schedule {config.schedule} ends at trainer.max_steps, which is {num_steps}: give more steps "
            f"than optimizer.warmup_steps ({config.warmup_steps})."
        )


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizerConfig,
    d_model: int,
    device: torch.device,
    num_steps: int = -1,
) -> dict[str, Any]:
    """Returns AdamW and its schedule in the form that `configure_optimizers` returns to Lightning.

    Args:
        parameters: Parameters to train.
        config: Settings of AdamW and of the schedule.
        d_model: Dimension of the encoder, for the schedule.
        device: Device of the parameters. On CPU and CUDA the fused implementation is used, which makes one pass over
            weights and moments instead of eight.
        num_steps: Steps of the whole run, for the schedules that end with it.

    Raises:
        ConfigError: The schedule ends with the run, whose length is not known.
    """
    check_schedule(config, num_steps)
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(
        list(parameters), lr=1.0, betas=config.betas, weight_decay=config.weight_decay, fused=fused
    )
    allow_clipping(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, config, d_model, num_steps)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

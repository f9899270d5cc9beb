"""What kernels for a GPU compute, by operations of torch: judges of the kernels, and their place on a CPU in tests.

Each function is the operation of the same name in `nestmodel.nn.gpu`, with its arguments.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from nestmodel.nn import encoder
from nestmodel.nn.attention import shift_to_distances
from nestmodel.nn.dropout import drop
from nestmodel.nn.gpu import devices, dropout
from nestmodel.nn.gpu import gated_convolution as convolution
from nestmodel.nn.gpu import relative_attention as attention


@contextmanager
def code_for_gpus() -> Iterator[None]:
    """Runs the code for GPUs on a CPU, with these functions in the place of kernels."""
    _register()
    with (
        patch.object(devices, "is_on_gpu", lambda _: True),
        patch.object(encoder, "has_block_kernels", lambda *_: True),
    ):
        yield


@cache
def _register() -> None:
    operations: list[tuple[Any, Callable[..., Any]]] = [
        (convolution._gated_convolution, gated_convolution),
        (convolution._gradients, gated_convolution_gradients),
        (attention._attention, relative_attention),
        (attention._gradients, relative_attention_gradients),
        (dropout._drop, drop),
    ]
    for operation, definition in operations:
        operation.register_kernel("cpu", definition)


def gated_convolution(
    gates: Tensor, lens: Tensor, gate_bias: Tensor | None, weight: Tensor, bias: Tensor | None, left: int
) -> tuple[Tensor, Tensor]:
    values, opened = _open(gates, lens, gate_bias)
    padded = F.pad((values * opened).to(weight.dtype), (0, 0, left, weight.shape[1] - 1 - left))
    mixed = F.conv1d(padded.transpose(1, 2), weight.unsqueeze(1), bias, groups=len(weight)).transpose(1, 2).contiguous()
    moments = [
        torch.stack([part.mean(1), (part - part.mean(1, keepdim=True)).square().sum(1)], dim=1)
        for part in mixed.float().split(convolution.FRAMES_PER_PART, dim=1)
    ]
    return mixed, torch.stack(moments, dim=1)


def gated_convolution_gradients(
    gates: Tensor, lens: Tensor, gate_bias: Tensor | None, weight: Tensor, grad: Tensor, left: int
) -> tuple[Tensor, Tensor]:
    (num_frames, dim), taps = grad.shape[1:], weight.shape[1]
    values, opened = _open(gates, lens, gate_bias)
    grad, wide = grad.to(values.dtype), weight.to(values.dtype)
    padded = F.pad(values * opened, (0, 0, left, taps - 1 - left))
    of_padded, sums = torch.zeros_like(padded), padded.new_zeros(taps + 3, dim)
    for tap in range(taps):
        of_padded[:, tap : tap + num_frames] += grad * wide[:, tap]
        sums[tap] = (grad * padded[:, tap : tap + num_frames]).sum((0, 1))
    of_values = of_padded[:, left : left + num_frames] * opened
    of_gates = torch.cat([of_values, of_values * values * (1 - opened)], dim=2)
    if gate_bias is not None:
        sums[taps] = grad.sum((0, 1))
        sums[taps + 1 :] = of_gates.sum((0, 1)).view(2, dim)
    return of_gates.to(gates.dtype), sums


def _open(gates: Tensor, lens: Tensor, gate_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns values and what they are multiplied by, in float32 at least; both are 0 in padded frames."""
    is_valid = (torch.arange(gates.shape[1]) < lens.unsqueeze(1)).unsqueeze(2)
    wide = gates.to(_wide(gates))
    values, closed = (wide if gate_bias is None else wide + gate_bias).chunk(2, dim=2)
    return torch.where(is_valid, values, 0.0), torch.where(is_valid, closed.sigmoid(), 0.0)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def relative_attention(
    content: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lens: Tensor,
    limits: Tensor | None,
    key: Tensor | None,
    num_dropped: int,
) -> tuple[Tensor, Tensor]:
    weights, kept = attention_weights(content @ keys.mT, position @ positions.mT, lens, limits, key, num_dropped)
    return kept @ values, weights


def relative_attention_gradients(
    grad: Tensor,
    weights: Tensor,
    content: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    key: Tensor | None,
    num_dropped: int,
) -> tuple[Tensor, ...]:
    of_scores, by_distance, kept = attention_gradients(weights, grad @ values.mT, key, num_dropped)
    return of_scores @ keys, by_distance @ positions, of_scores.mT @ content, kept.mT @ grad, by_distance.mT @ position


def attention_weights(
    scores: Tensor, by_distance: Tensor, lens: Tensor, limits: Tensor | None, key: Tensor | None, num_dropped: int
) -> tuple[Tensor, Tensor]:
    num_utterances, _, num_frames, num_keys = scores.shape
    shifted = shift_to_distances(by_distance.unflatten(1, (num_utterances, num_frames)), num_keys).transpose(0, 1)
    frames = torch.arange(num_keys)
    is_valid = frames < lens.unsqueeze(1)
    is_seen = is_valid[:, None, None, :] & is_valid[:, None, :num_frames, None]
    if limits is not None:
        left, right, chunk = limits.unbind()
        distance = (frames[:num_frames] // chunk).unsqueeze(1) - frames // chunk
        is_seen = is_seen & (distance <= left) & (distance >= -right)
    total = (scores.to(_wide(scores)) + shifted).masked_fill(~is_seen, -math.inf)
    weights = torch.where(is_seen, total.softmax(-1), 0.0).to(scores.dtype)
    return weights, _drop_weights(weights, key, num_dropped)


def attention_gradients(
    weights: Tensor, grad: Tensor, key: Tensor | None, num_dropped: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_utterances, num_heads, num_frames, num_keys = weights.shape
    given = _drop_weights(grad.to(_wide(grad)), key, num_dropped)
    of_scores = (weights * (given - (weights * given).sum(-1, keepdim=True))).to(grad.dtype)
    by_distance = grad.new_zeros(num_heads, num_utterances, num_frames, 2 * num_keys)
    shift_to_distances(by_distance, num_keys).transpose(0, 1).copy_(of_scores)  # a view
    return of_scores, by_distance.flatten(1, 2), _drop_weights(weights, key, num_dropped)


def _drop_weights(weights: Tensor, key: Tensor | None, num_dropped: int) -> Tensor:
    """Drops weights; columns that fill the rows do not count as positions of dropout."""
    if key is None:
        return weights.clone()
    num_frames, num_keys = weights.shape[2:]
    return F.pad(drop(weights[..., :num_frames].contiguous(), key, num_dropped), (0, num_keys - num_frames))

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
from nestmodel.nn.gpu import first_stages as stages
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
        (stages._first_stages, first_stages),
        (stages._gradients, first_stages_gradients),
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
    qkv: Tensor,
    in_bias: Tensor | None,
    positions: Tensor,
    biases: Tensor,
    lens: Tensor,
    limits: Tensor | None,
    key: Tensor | None,
    num_dropped: int,
) -> tuple[Tensor, ...]:
    num_keys, width = positions.shape[1] // 2, positions.shape[2]
    content, position, keys, values = split_heads(qkv, in_bias, biases, num_keys, width)
    weights, kept = attention_weights(content @ keys.mT, position @ positions.mT, lens, limits, key, num_dropped)
    return kept @ values, weights, content, position, keys, values


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
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_scores, by_distance, kept = attention_gradients(weights, grad @ values.mT, key, num_dropped)
    heads = of_scores @ keys, by_distance @ positions, of_scores.mT @ content, kept.mT @ grad
    of_qkv, of_biases = join_heads(heads, grad.shape[2], head_dim)
    return of_qkv, by_distance.mT @ position, of_biases


def split_heads(
    qkv: Tensor, in_bias: Tensor | None, biases: Tensor, num_keys: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_frames, head_dim = qkv.shape[1], qkv.shape[4]
    biased = qkv if in_bias is None else qkv + in_bias.view(qkv.shape[2:])
    of_head, of_keys = (0, width - head_dim), (0, 0, 0, num_keys - num_frames)
    q, k, v = biased.unbind(2)
    content, position = (F.pad((q + bias) * head_dim**-0.5, of_head) for bias in biases)
    k, v = (F.pad(each, of_head + of_keys).transpose(1, 2).contiguous() for each in (k, v))
    return content.transpose(1, 2).contiguous(), position.flatten(0, 1).transpose(0, 1).contiguous(), k, v


def join_heads(grads: tuple[Tensor, Tensor, Tensor, Tensor], num_frames: int, head_dim: int) -> tuple[Tensor, Tensor]:
    batch, num_heads = grads[2].shape[:2]
    by_position = grads[1].view(num_heads, batch, num_frames, -1).transpose(0, 1)
    content, position, keys, values = (
        each[:, :, :num_frames, :head_dim].transpose(1, 2).to(_wide(each))
        for each in (grads[0], by_position, *grads[2:])
    )
    scale = head_dim**-0.5
    of_qkv = torch.stack([(content + position) * scale, keys, values], dim=2)
    sums = [*of_qkv.unbind(2), content * scale, position * scale]
    return of_qkv.to(grads[0].dtype), torch.stack([each.sum((0, 1)).flatten() for each in sums])


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


def first_stages(
    dtype: torch.dtype,
    feats: Tensor,
    lens: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    padding: int,
) -> Tensor:
    x, is_valid = _as_image(feats, lens, dtype, padding)
    x = _pad(_apply_first(x, is_valid, weight1.to(dtype), bias1.to(dtype)), padding)
    x = F.conv2d(x, weight2.to(dtype), bias2.to(dtype), 2, 1, groups=len(weight2))
    return x.permute(0, 2, 3, 1).contiguous()


def first_stages_gradients(
    feats: Tensor, lens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, grad: Tensor, padding: int
) -> Tensor:
    dtype, channels = grad.dtype, len(weight1)
    image, is_valid = _as_image(feats, lens, dtype, padding)
    first = _apply_first(image, is_valid, weight1.to(dtype), bias1.to(dtype))
    convolution_backward = torch.ops.aten.convolution_backward
    geometry = ([2, 2], [1, 1], [1, 1], False, [0, 0])
    given = grad.permute(0, 3, 1, 2)
    of_first, *second = convolution_backward(
        given, _pad(first, padding), weight2.to(dtype), [channels], *geometry, channels, [True, True, True]
    )
    of_first = of_first[:, :, padding - 1 :, padding - 1 :]
    of_first = torch.ops.aten.threshold_backward(of_first, first, 0)
    _, *first_grads = convolution_backward(
        of_first, image, weight1.to(dtype), [channels], *geometry, 1, [False, True, True]
    )
    found = torch.zeros(32, channels, dtype=weight1.dtype, device=grad.device)
    for start, (of_weight, of_bias) in ((0, first_grads), (16, second)):
        found[start : start + 9] = of_weight.flatten(1).T
        found[start + 9] = of_bias
    return found


def _as_image(feats: Tensor, lens: Tensor, dtype: torch.dtype, padding: int) -> tuple[Tensor, Tensor]:
    """Returns features as an image whose padding is zero, and which frames after the first stage are valid."""
    num_frames, num_frames2 = feats.shape[2], stages._halve(feats.shape[2], padding)
    is_valid = torch.arange(num_frames, device=feats.device) < lens.unsqueeze(1)
    image = torch.where(is_valid.unsqueeze(1), feats, 0.0).transpose(1, 2).unsqueeze(1).to(dtype)
    is_valid2 = torch.arange(num_frames2, device=feats.device) < stages._halve(lens, padding).unsqueeze(1)
    return _pad(image, padding), is_valid2[:, None, :, None]


def _pad(image: Tensor, padding: int) -> Tensor:
    """Returns an image for a convolution that pads it with one zero on each side."""
    return F.pad(image, (padding - 1, 0, padding - 1, 0)) if padding > 1 else image


def _apply_first(image: Tensor, is_valid: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.where(is_valid, F.conv2d(image, weight, bias, 2, 1), 0.0).relu_()

"""Section `parts`: single parts of a model, forward and backward, in the implementations that could be chosen."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.context import Context
from benchmarks.gpu.forms import case_of
from benchmarks.gpu.measuring import profile_call, time_call
from benchmarks.gpu.report import Section
from nestmodel import NestConfig, NestNetwork
from nestmodel.nn.attention import RelPositionAttention
from nestmodel.nn.features import LogMelFeatures
from nestmodel.nn.gpu.cast_weights import cast_weights
from nestmodel.nn.gpu.fused_attention import attend, attention_parameters, describe_gpu_frames
from nestmodel.nn.gpu.subsampling import AcceleratedConvSubsampling
from nestmodel.nn.network import num_padded_frames
from nestmodel.nn.precision import product_dtype
from nestmodel.training.schedule import build_optimizer

Run = Callable[[], object]


class Part(NamedTuple):
    """One implementation of a part."""

    row: str
    decides: str
    build: Callable[[], Run]
    """Allocates everything, and returns what is timed."""


def measure_parts(context: Context, section: Section) -> None:
    """Adds a row for each part and implementation, for the models that are compared with NeMo's."""
    parts = [part for model in context.extent.compared for part in parts_of(context, model)]
    for part in context.pending(section, parts, lambda part: part.row):
        run = part.build()
        time = time_call(context, run)
        found = profile_call(context, run)
        section.add(
            {
                "row": part.row,
                "host, ms": time.host_ms,
                "GPU, ms": time.gpu_ms,
                "busy, ms": found.busy_ms,
                "kernels" if context.is_cuda else "operations": sum(kernel.number for kernel in found.kernels),
                "decides": part.decides,
            }
        )
        del run


def parts_of(context: Context, model: str) -> Iterator[Part]:
    """Yields the parts of a model, with the microbatches of section `steps`."""
    config = context.extent.models[model]
    cases = [case_of(context, model, seconds) for seconds in context.extent.cut_seconds]
    num_cuts, num_samples = cases[0].shape
    num_frames = num_padded_frames(num_samples, config.features)
    where = f"{model}, {cases[0].audio}"
    for implementation in ("triton", "torch"):
        yield Part(
            f"{where}, subsampling, {implementation}",
            "whether the kernel of the first two stages pays",
            lambda name=implementation: _subsampling(context, config, num_cuts, num_frames, name),  # type: ignore[misc]
        )
    for name, convolve in (("conv1d", _conv1d), ("conv2d, channels last", _conv2d)):
        yield Part(
            f"{where}, depthwise convolution, {name}",
            "which form the convolution of a block has",
            lambda convolve=convolve: _convolution(context, config, num_cuts, num_frames, convolve),  # type: ignore[misc]
        )
    for case in cases:
        frames = num_padded_frames(case.shape[1], config.features)
        for with_positions in (True, False):
            yield Part(
                f"{model}, {case.audio}, attention{'' if with_positions else ' without positions'}",
                "what the scores by position cost" if with_positions else "the least time that attention can take",
                lambda case=case, frames=frames, with_positions=with_positions: _attention(  # type: ignore[misc]
                    context, config, case.shape[0], frames, with_positions
                ),
            )
    yield Part(
        f"{where}, features", "whether fusing features pays", lambda: _features(context, config, *cases[0].shape)
    )
    for division in ("none", "before", "inside"):
        yield Part(
            f"{model}, optimizer, division {division}",
            "whether AdamW should divide the gradients",
            lambda division=division: _optimizer(context, config, division),  # type: ignore[misc]
        )


def _subsampling(context: Context, config: NestConfig, num_cuts: int, num_frames: int, implementation: str) -> Run:
    encoder = config.encoder
    module = AcceleratedConvSubsampling(
        num_mels=config.features.num_mels,
        channels=encoder.subsampling_channels,
        factor=encoder.subsampling_factor,
        dim=encoder.d_model,
    ).to(context.device)
    module.has_joined_stages = implementation != "torch"
    feats = torch.randn(num_cuts, config.features.num_mels, num_frames, device=context.device)
    lens = torch.full((num_cuts,), num_frames, device=context.device)

    def run() -> None:
        with _autocast(context):
            encoded, _ = module(feats, lens)
        _backward(encoded)

    return run


def _conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padding = weight.shape[2] // 2
    return F.conv1d(x.transpose(1, 2), weight, bias, padding=padding, groups=len(weight)).transpose(1, 2).contiguous()


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    image, padding = x.transpose(1, 2).unsqueeze(2), (0, weight.shape[2] // 2)
    return F.conv2d(image, weight.unsqueeze(2), bias, padding=padding, groups=len(weight)).squeeze(2).transpose(1, 2)


def _convolution(
    context: Context,
    config: NestConfig,
    num_cuts: int,
    num_frames: int,
    convolve: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Run:
    dim = config.encoder.d_model
    layer = nn.Conv1d(dim, dim, config.encoder.conv_kernel_size, groups=dim)
    layer.to(context.device, _dtype(context))
    x = _encoder_frames(context, config, num_cuts, num_frames).to(_dtype(context)).requires_grad_()
    bias = layer.bias
    assert bias is not None
    return lambda: _backward(convolve(x, layer.weight, bias))


def _attention(context: Context, config: NestConfig, num_cuts: int, num_frames: int, with_positions: bool) -> Run:
    encoder = config.encoder
    x = _encoder_frames(context, config, num_cuts, num_frames).requires_grad_()
    if not with_positions:
        heads = x.detach().to(_dtype(context)).unflatten(2, (encoder.num_heads, -1)).transpose(1, 2)
        q, k, v = (heads.clone().requires_grad_() for _ in range(3))
        return lambda: _backward(F.scaled_dot_product_attention(q, k, v, dropout_p=encoder.dropout_att))
    module = RelPositionAttention(
        dim=encoder.d_model, num_heads=encoder.num_heads, dropout=encoder.dropout_att, use_bias=encoder.use_bias
    ).to(context.device)
    lens = torch.full((num_cuts,), x.shape[1], device=context.device)

    def run() -> None:
        with _autocast(context):
            (weights,) = cast_weights([attention_parameters(module)], product_dtype(x))
            mixed = attend(module, x, describe_gpu_frames(x, lens), weights)
        _backward(mixed)

    return run


def _features(context: Context, config: NestConfig, num_cuts: int, num_samples: int) -> Run:
    module = LogMelFeatures(config.features).to(context.device)
    audio = 0.1 * torch.randn(2 * num_cuts, num_samples, device=context.device)
    lens = torch.full((2 * num_cuts,), num_samples, device=context.device)
    return lambda: module(audio, lens)


def _optimizer(context: Context, config: NestConfig, division: str) -> Run:
    parameters = [each for each in NestNetwork(config).to(context.device).parameters() if each.requires_grad]
    optimizer = build_optimizer(parameters, config.optimizer, config.encoder.d_model, context.device)["optimizer"]
    for each in parameters:
        each.grad = torch.full_like(each, 1e-3)
    number = torch.full((), 1.001, device=context.device)
    if division == "inside":
        # The fused implementation divides gradients by this tensor, which a gradient scaler sets otherwise.
        optimizer.grad_scale, optimizer.found_inf = number, torch.zeros((), device=context.device)

    def run() -> None:
        if division == "before":
            torch._foreach_div_([each.grad for each in parameters if each.grad is not None], number)
        optimizer.step()

    return run


def _encoder_frames(context: Context, config: NestConfig, num_cuts: int, num_frames: int) -> Tensor:
    num_encoder_frames = -(-num_frames // config.encoder.subsampling_factor)
    return torch.randn(num_cuts, num_encoder_frames, config.encoder.d_model, device=context.device)


def _dtype(context: Context) -> torch.dtype:
    return torch.bfloat16 if context.is_cuda else torch.float32


def _autocast(context: Context) -> torch.autocast:
    return torch.autocast(context.device.type, torch.bfloat16, enabled=context.is_cuda)


def _backward(output: Tensor) -> None:
    """Computes gradients of the sum, which are added to those of earlier calls."""
    output.backward(torch.ones_like(output))

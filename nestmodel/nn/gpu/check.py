"""Checks once for each GPU, with a small block, that the kernels of blocks agree with operations of torch."""

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nestmodel.config import EncoderConfig
from nestmodel.nn.attention import describe_frames
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.block import KEYS_PER_BLOCK
from nestmodel.nn.dropout import draw_keys
from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.block import AcceleratedConformerBlock
from nestmodel.nn.gpu.gated_convolution import MAX_TAPS
from nestmodel.nn.gpu.relative_attention import MAX_KEYS, describe_gpu_frames
from nestmodel.nn.precision import product_dtype


def has_block_kernels(config: EncoderConfig, x: Tensor) -> bool:
    """Returns whether the kernels of blocks accept the encoder frames `x` and work on their GPU; warns if they fail.

    A large convolution kernel, very long utterances and float64 are not accepted, which gives no warning.
    """
    dtype = product_dtype(x)
    if config.conv_kernel_size > MAX_TAPS or x.shape[1] > MAX_KEYS or dtype == torch.float64:
        return False
    # Kernels cannot be checked with tensors without values, and tests run the code for GPUs on a CPU.
    if isinstance(x, FakeTensor) or not torch.cuda.is_available():
        return True
    return _has_kernels(x.device, dtype, small_config(config))


def is_right(device: torch.device, dtype: torch.dtype, config: EncoderConfig) -> bool:
    """Returns whether a block agrees with operations of torch, for short rows of attention and for long ones."""
    return all(devices.is_right(partial(run_block, config, frames), device, dtype) for frames in (45, 600))


def small_config(config: EncoderConfig) -> EncoderConfig:
    """Returns the settings of the small block for the check; settings that select code are unchanged."""
    return replace(config, d_model=136, num_heads=4, num_layers=1, ff_expansion=1, dropout=0.1, dropout_att=0.1)


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype, config: EncoderConfig) -> bool:
    consequence = "Blocks of the encoder are slower and take more memory"
    return devices.has_kernel(lambda: is_right(device, dtype, config), consequence)


def run_block(
    config: EncoderConfig, num_frames: int, device: torch.device, dtype: torch.dtype, with_kernels: bool
) -> list[Tensor]:
    """Returns outputs, gradients and statistics of a block; see `devices.is_right`."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not the generators of GPUs, which would not be restored
        block = AcceleratedConformerBlock(config).train()
    torch.nn.init.normal_(block.self_attn.pos_bias_u, generator=generator)
    torch.nn.init.normal_(block.self_attn.pos_bias_v, generator=generator)
    # So few frames that rows of scores and parts of the convolution are not full.
    x, weights = torch.randn(2, 3, num_frames, config.d_model, generator=generator, device="cpu")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    block, x, lens = (
        block.to(device, wide),
        x.to(device, wide).requires_grad_(),
        torch.tensor([num_frames, 1, num_frames // 2]),
    )
    norm = block.conv.batch_norm
    if isinstance(norm, StepBatchNorm):
        norm.start_collecting()
    context = config.att_context_size[0] if config.is_limited else None
    describe = describe_gpu_frames if with_kernels else describe_frames
    with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        frames = describe(x, lens.to(device), context, config.att_context_style)
        out = block(x, frames, draw_keys(0, KEYS_PER_BLOCK).to(device))
    (out * weights.to(out)).sum().backward()
    statistics = [norm.pop_collected(1)] if isinstance(norm, StepBatchNorm) else []
    found = [out, x.grad, *(parameter.grad for parameter in block.parameters()), *statistics]
    return [each.detach().cpu().double() for each in found if each is not None]

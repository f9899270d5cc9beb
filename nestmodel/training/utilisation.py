"""Model FLOPs utilisation (MFU): counted operations of the encoder over what the device could compute in that time.

Source of the term: PaLM, arXiv:2204.02311, appendix B. Recomputed activations are not counted.
"""

import re
from functools import lru_cache

import torch

from nestmodel.config import EncoderConfig
from nestmodel.nn.subsampling import halve

PEAK_16_BIT_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A40": 150,
    "A10": 125,
}
"""Dense operations a second in bfloat16 or float16, in 10^12, by words of the name that torch reports; the first match
counts. Source: NVIDIA's data sheets, whose figures with sparsity are halved."""


def peak_tflops(name: str) -> int | None:
    """Returns the peak of a GPU by its name; None if it is not in the table."""
    return next((peak for part, peak in PEAK_16_BIT_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def peak_of_run(device: torch.device, precision: str) -> float | None:
    """Returns the operations a second that a device could compute in a precision of Lightning; None if unknown."""
    if device.type != "cuda" or not precision.startswith(("bf16", "16")):
        return None
    peak = peak_tflops(torch.cuda.get_device_name(device))
    return None if peak is None else peak * 1e12


@lru_cache(maxsize=1024)
def encoder_operations(config: EncoderConfig, num_mels: int, num_cuts: int, num_frames: int) -> int:
    """Returns the operations of forward and backward pass: of matrix products and convolutions, two for each product.

    Args:
        config: Settings of the encoder.
        num_mels: Number of mel bins.
        num_cuts: Number of cuts in the microbatch.
        num_frames: Number of feature frames to which each cut is padded.
    """
    channels, dim, is_causal = config.subsampling_channels, config.d_model, config.causal_downsampling
    frames, mels = (halve(size, is_causal=is_causal) for size in (num_frames, num_mels))
    first_stage = subsampling = frames * mels * channels * 9
    for _ in range(config.subsampling_factor.bit_length() - 2):
        frames, mels = (halve(size, is_causal=is_causal) for size in (frames, mels))
        subsampling += frames * mels * channels * (9 + channels)
    subsampling += frames * channels * mels * dim
    feed_forward = 4 * config.ff_expansion * dim**2
    attention = 4 * dim**2 + dim * (2 * frames + 2 * frames - 1)  # projections; content, values; scores by position
    convolution = 3 * dim**2 + config.conv_kernel_size * dim
    block = frames * (feed_forward + attention + convolution)
    positions = config.num_layers * (2 * frames - 1) * dim**2
    products = num_cuts * (subsampling + config.num_layers * block) + positions
    # The backward pass computes gradients of inputs and of weights; features and encodings of positions need none.
    return 2 * (3 * products - num_cuts * first_stage - positions)

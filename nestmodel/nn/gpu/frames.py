"""Positions and masks of the frames of a batch as the code for GPUs reads them."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from nestmodel.attention_context import Context, Style
from nestmodel.nn.frames import MASKED_SCORE, mask_keys, relative_positions
from nestmodel.nn.precision import product_dtype

KERNEL_MULTIPLE = 8
"""Fused attention and matrix products on a GPU want sizes that are multiples of this, in 16-bit types."""


class GpuFrames(NamedTuple):
    """`Frames` with masks that take one kernel to apply, in the type of the matrix products.

    The scores of attention have a multiple of 8 columns (`keys`); those past the frames are not read.
    """

    positions: Float[Tensor, "positions dim"]
    """`relative_positions` of the frames, twice as many as there are keys."""

    is_valid: Float[Tensor, "batch enc_frames 1"]
    """1 for valid frames and 0 for padded ones."""

    key_scores: Float[Tensor, "batch 1 queries keys"]
    """Added to the scores of the keys: 0 for keys that are attended to and `MASKED_SCORE` for others. With unlimited
    attention, there is one row for all queries."""


def describe_gpu_frames(
    x: Float[Tensor, "batch enc_frames dim"],
    enc_lens: Int[Tensor, " batch"],
    context: Context | None = None,
    style: Style = "regular",
) -> GpuFrames:
    """Returns what `describe_frames` returns, in the shapes and types that kernels of a GPU read."""
    (num_frames, dim), dtype = x.shape[1:], product_dtype(x)
    num_keys = round_up(num_frames)
    is_padded_key, is_masked_key = mask_keys(num_frames, num_keys, enc_lens, context, style)
    key_scores = is_masked_key.to(dtype) * MASKED_SCORE
    is_valid = (~is_padded_key[:, :num_frames]).to(dtype).unsqueeze(2)
    # More distances than needed, so that products with the encodings have a multiple of 8 columns.
    positions = relative_positions(num_frames, dim, x.device, num_distances=2 * num_keys)
    return GpuFrames(positions.to(dtype), is_valid, key_scores)


def round_up(size: int) -> int:
    """Returns the smallest multiple of 8 that is not below `size`."""
    return -(-size // KERNEL_MULTIPLE) * KERNEL_MULTIPLE

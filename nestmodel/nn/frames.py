"""What all blocks of the encoder need to know about the frames of a batch, computed once for all of them."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nestmodel.attention_context import UNLIMITED, Context, Style
from nestmodel.nn.precision import product_dtype

MASKED_SCORE = -10000.0
"""Score of a masked key. Its exponential is 0 in every floating-point format."""


class Frames(NamedTuple):
    """Positions and padding of the frames of a batch."""

    positions: Float[Tensor, "positions dim"]
    """`relative_positions` of the frames."""

    is_padding: Bool[Tensor, "batch enc_frames"]
    """True past the valid frames."""

    is_masked_key: Bool[Tensor, "batch 1 queries keys"]
    """True for keys that are not attended to. With unlimited attention, there is one row for all queries."""


def describe_frames(
    x: Float[Tensor, "batch enc_frames dim"],
    enc_lens: Int[Tensor, " batch"],
    context: Context | None = None,
    style: Style = "regular",
) -> Frames:
    """Returns positions, in the type of matrix products, and masks.

    With limited attention, the mask has batch * enc_frames * keys values. All blocks share it, and each of them has as
    many scores for every head.

    Args:
        x: Input of the first block.
        enc_lens: Number of valid frames of each utterance.
        context: Limits attention, as `visible_keys` does; None does not, with a smaller mask.
        style: How the context is counted.
    """
    num_frames, dim = x.shape[1:]
    is_padding, is_masked_key = mask_keys(num_frames, num_frames, enc_lens, context, style)
    positions = relative_positions(num_frames, dim, x.device).to(product_dtype(x))
    return Frames(positions, is_padding, is_masked_key)


def mask_keys(
    num_queries: int, num_keys: int, enc_lens: Int[Tensor, " batch"], context: Context | None, style: Style
) -> tuple[Bool[Tensor, "batch keys"], Bool[Tensor, "batch 1 queries keys"]]:
    """Returns which keys are padded, and which are not attended to, as `Frames.is_masked_key`.

    Args:
        num_queries: Number of encoder frames that attend.
        num_keys: Number of encoder frames that are attended to.
        enc_lens: Number of valid frames of each utterance.
        context: As for `describe_frames`.
        style: How the context is counted.
    """
    is_padded = torch.arange(num_keys, device=enc_lens.device) >= enc_lens.unsqueeze(1)
    is_masked = is_padded[:, None, None, :]
    if context is not None:
        is_masked = is_masked | ~visible_keys(num_queries, num_keys, context, style, enc_lens.device)
    return is_padded, is_masked


def visible_keys(
    num_queries: int, num_keys: int, context: Context, style: Style, device: torch.device | None = None
) -> Bool[Tensor, "queries keys"]:
    """Returns True where a query attends to a key, by an attention context; padding is not considered.

    Args:
        num_queries: Number of encoder frames that attend.
        num_keys: Number of encoder frames that are attended to; both are counted from the same first frame.
        context: Numbers of encoder frames to the left and to the right, `UNLIMITED` for no limit.
        style: With `regular`, query i attends to the keys i - left to i + right. With `chunked_limited`, frames are in
            chunks of right + 1, and a query attends to all keys of its own chunk and of the left / (right + 1) chunks
            before it. A context of which the right side is unlimited has no chunks.
        device: Device of the mask.

    Source: `ConformerEncoder._create_masks` of NeMo 3.0.0.
    """
    left, right = context
    queries = torch.arange(num_queries, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    if style == "chunked_limited" and right != UNLIMITED:
        chunk = right + 1
        queries, keys, right = queries // chunk, keys // chunk, 0
        left = left if left == UNLIMITED else left // chunk
    distance = queries - keys
    is_visible = torch.ones_like(distance, dtype=torch.bool)
    if left != UNLIMITED:
        is_visible &= distance <= left
    if right != UNLIMITED:
        is_visible &= distance >= -right
    return is_visible


def relative_positions(
    num_frames: int, dim: int, device: torch.device, num_distances: int | None = None
) -> Float[Tensor, "positions dim"]:
    """Returns sinusoidal encodings of the distances num_frames - 1 down to 1 - num_frames.

    Sine and cosine are interleaved. The encodings are computed for each batch: this costs less than projecting them in
    one layer, and a cache would be state that grows.

    Args:
        num_frames: Number of encoder frames.
        dim: Dimension of an encoding.
        device: Device on which the encodings are computed.
        num_distances: Number of distances, downwards from num_frames - 1; by default 2 * num_frames - 1.

    Source: Transformer-XL, arXiv:1901.02860, appendix B.
    """
    last = -num_frames if num_distances is None else num_frames - 1 - num_distances
    distances = torch.arange(num_frames - 1, last, -1, dtype=torch.float32, device=device)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) * (-math.log(10000.0) / dim)
    angles = distances.unsqueeze(1) * exponents.exp()
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

"""Block masks over feature or encoder frames, and the choice of the tokens that are scored.

This module draws masks, holds the vector that replaces a masked frame, and decides which tokens are scored. Random
numbers come only from the generator that is passed in. Padding is never masked.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nestmodel.config import MaskConfig

MAX_MASKED_SHARE = 0.8
"""An utterance is short if one block would cover at least this share of it: up to 50 frames with blocks of 40.

NEST's description says "shorter than" 50 frames; this follows NeMo's code, which includes exactly 50.
"""

SHORT_BLOCK_SIZE = 8
"""Number of feature frames masked at the start of a short utterance, independent of the draw."""


class BlockMask(nn.Module):
    """Draws block masks and replaces masked frames by one fixed random vector.

    Source: NEST, arXiv:2408.13106. Differs from NeMo 2.5, which draws a binomial number of blocks and then distinct
    starts, utterance by utterance: here starts are drawn independently for the whole batch, which gives the same
    distribution.
    """

    def __init__(self, config: MaskConfig, *, dim: int, subsampling_factor: int = 1) -> None:
        """Builds a mask for frames of `dim` values, each covering `subsampling_factor` feature frames."""
        super().__init__()
        self.prob = config.prob
        self.block_size = config.block_size // subsampling_factor
        self.short_block_size = max(1, SHORT_BLOCK_SIZE // subsampling_factor)
        self.mask_embedding = nn.Parameter(torch.empty(dim), requires_grad=False)
        nn.init.normal_(self.mask_embedding, mean=0.0, std=0.1)

    def draw(
        self, feat_lens: Int[Tensor, " batch"], num_frames: int, generator: torch.Generator
    ) -> Bool[Tensor, "batch frames"]:
        """Draws the masks of a batch.

        Each valid frame except for the last `block_size` ones starts a masked block with probability `prob`; blocks may
        overlap. In a short utterance the first 8 feature frames are masked instead.

        Args:
            feat_lens: Number of valid frames of each utterance.
            num_frames: Number of frames of the batch, including padding. The draw depends on it.
            generator: Source of random numbers, on any device: a CPU generator gives the same masks on every device.

        Returns:
            True where a frame is masked.
        """
        block_size = self.block_size
        draws = torch.rand(len(feat_lens), num_frames, generator=generator, device=generator.device)
        positions = torch.arange(num_frames, device=feat_lens.device)
        lens = feat_lens.unsqueeze(1)
        is_short = lens <= block_size / MAX_MASKED_SHARE
        is_start = (draws.to(feat_lens.device) < self.prob) & (positions < lens - block_size) & ~is_short
        # A frame is masked if a block started at it or at one of the block_size - 1 frames before it.
        num_started = is_start.cumsum(1)
        num_started_before = F.pad(num_started, (block_size, 0))[:, :num_frames]
        is_short_block = is_short & (positions < lens.clamp(max=self.short_block_size))
        return (num_started > num_started_before) | is_short_block

    def apply_mask(
        self, feats: Float[Tensor, "batch dim frames"], is_masked: Bool[Tensor, "batch frames"]
    ) -> Float[Tensor, "batch dim frames"]:
        """Returns a copy whose masked frames are replaced by `mask_embedding`."""
        embedding = self.mask_embedding.to(feats.dtype).view(1, -1, 1)
        return torch.where(is_masked.unsqueeze(1), embedding, feats)


def scored_token_mask(
    is_masked: Bool[Tensor, "batch frames"], subsampling_factor: int, threshold: float
) -> Bool[Tensor, "batch enc_frames"]:
    """Returns True for each token whose share of masked frames exceeds the threshold.

    Args:
        is_masked: True where a frame is masked; the number of frames is a multiple of the factor.
        subsampling_factor: Number of frames per token.
        threshold: Share in [0, 1) that must be exceeded.
    """
    return is_masked.reshape(is_masked.shape[0], -1, subsampling_factor).float().mean(-1) > threshold

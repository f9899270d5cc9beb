"""Block masks over feature or encoder frames, and which tokens are scored for them.

Owns the drawing of masks, the vector that stands in for a masked frame, and the rule that a token counts. Draws come
from the generator it is given and nowhere else. Guarantees that padding is never masked.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nestmodel.config import MaskConfig

MAX_MASKED_SHARE = 0.8
"""An utterance of which one block would cover this share or more is short: of up to 50 frames, for blocks of 40."""

SHORT_BLOCK_SIZE = 8
"""Feature frames at the start of a short utterance that are masked, whatever is drawn."""


class BlockMask(nn.Module):
    """Draws block masks and puts one fixed random vector in the place of each masked frame.

    Source: NEST, arXiv:2408.13106, section 3.3. Differs from NeMo 2.5, which draws a binomial number of blocks and
    then distinct starts, utterance by utterance: independent starts have the same distribution, drawn at once.
    """

    def __init__(self, config: MaskConfig, *, dim: int, subsampling_factor: int = 1) -> None:
        """Makes masks for frames of `dim` values, each of which covers `subsampling_factor` feature frames."""
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

        Each valid frame but the last `block_size` starts a masked block with probability `prob`; blocks may overlap.
        A short utterance has its first 8 feature frames masked instead.

        Args:
            feat_lens: Valid frames of each utterance.
            num_frames: Frames of the batch, padding included; the draw depends on it.
            generator: Source of the draw, on any device: a CPU generator gives the same masks on every device.

        Returns:
            True where a frame is masked.
        """
        block_size = self.block_size
        draws = torch.rand(len(feat_lens), num_frames, generator=generator, device=generator.device)
        positions = torch.arange(num_frames, device=feat_lens.device)
        lens = feat_lens.unsqueeze(1)
        is_short = lens <= block_size / MAX_MASKED_SHARE
        is_start = (draws.to(feat_lens.device) < self.prob) & (positions < lens - block_size) & ~is_short
        # A frame is masked when a block started in the last block_size frames, its own included.
        num_started = is_start.cumsum(1)
        num_started_before = F.pad(num_started, (block_size, 0))[:, :num_frames]
        is_short_block = is_short & (positions < lens.clamp(max=self.short_block_size))
        return (num_started > num_started_before) | is_short_block

    def apply_mask(
        self, feats: Float[Tensor, "batch dim frames"], is_masked: Bool[Tensor, "batch frames"]
    ) -> Float[Tensor, "batch dim frames"]:
        """Replaces the masked frames, in a new tensor."""
        stand_in = self.mask_embedding.to(feats.dtype).view(1, -1, 1)
        return torch.where(is_masked.unsqueeze(1), stand_in, feats)


def scored_token_mask(
    is_masked: Bool[Tensor, "batch frames"], subsampling_factor: int, threshold: float
) -> Bool[Tensor, "batch enc_frames"]:
    """Tells which tokens are scored: those with a masked share of their frames above the threshold.

    Args:
        is_masked: True where a frame is masked; the number of frames is a multiple of the factor.
        subsampling_factor: Frames behind a token.
        threshold: Share in [0, 1) that must be exceeded.
    """
    return is_masked.reshape(is_masked.shape[0], -1, subsampling_factor).float().mean(-1) > threshold

"""Random-projection quantizer: computes the tokens of clean speech, which are the targets of pretraining.

This module holds the frozen projection and codebooks, and searches for the nearest code. The caller chooses what is
quantized. The tokens are the same in every precision mode of a run.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestmodel.config import QuantizerConfig
from nestmodel.nn.precision import exact_dtype, exact_matmul

MAX_SCORES = 2**25
"""Maximum number of scores held at once, so that memory does not grow with the batch (256 MiB in double precision)."""

MAX_SCORES_ON_CPU = 2**22
"""The same limit on a CPU, where fewer scores stay in the cache and take half the time (16 MiB in float32)."""


class RandomProjectionQuantizer(nn.Module):
    """Returns the index of the nearest code in every codebook, for each stack of frames.

    The weights are frozen parameters instead of buffers, because data-parallel training broadcasts buffers to all
    ranks at each step.

    Source: NEST, arXiv:2408.13106, after BEST-RQ, arXiv:2202.01855. Differs from NeMo, which computes the distance to
    every code in float64: one matrix product and an argmax give the same tokens. The norms of the input are from two
    states of NeMo's pull request 15589 (docs/from-nemo.md).
    """

    def __init__(self, config: QuantizerConfig, *, dim: int, num_stacked: int) -> None:
        super().__init__()
        self.distance = config.distance
        self.num_stacked = num_stacked
        self.norm_dim = {None: None, "frames": dim, "stacked": dim * num_stacked}[config.input_norm]
        self.proj = nn.Linear(dim * num_stacked, config.num_codebooks * config.code_dim, bias=False)
        nn.init.xavier_normal_(self.proj.weight)
        codes = F.normalize(torch.randn(config.num_codebooks, config.num_classes, config.code_dim), dim=-1)
        self.codebooks = nn.Parameter(codes)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, feats: Float[Tensor, "batch dim frames"], rows: Int[Tensor, " rows"] | None = None
    ) -> Int[Tensor, "*points codebooks"]:
        """Stacks frames, projects each stack for every codebook, and finds the nearest codes, outside autocast.

        Args:
            feats: Frames of clean speech: mel frames, whose number is a multiple of `num_stacked`, or encoder frames.
            rows: Which stacks to quantize, counted over all utterances; None quantizes all.

        Returns:
            The index of the nearest code, in [0, num_classes): (batch, enc_frames, codebooks), or (rows, codebooks).
            Indices of padded stacks are meaningless.
        """
        with torch.autocast(feats.device.type, enabled=False):
            # (batch, dim, frames) -> (batch, enc_frames, num_stacked * dim), the earliest frame first
            stacks = feats.float().transpose(1, 2).reshape(feats.shape[0], -1, self.proj.in_features)
            if rows is not None:
                stacks = stacks.flatten(0, 1)[rows]
            if self.norm_dim is not None:
                stacks = F.layer_norm(stacks.unflatten(-1, (-1, self.norm_dim)), (self.norm_dim,)).flatten(-2)
            projected = exact_matmul(stacks, self.proj.weight.T).unflatten(-1, self.codebooks.shape[::2])
            points = F.normalize(projected, dim=-1, eps=1e-12)
            tokens = self._nearest(points.flatten(0, -3))
        return tokens.reshape(points.shape[:-1])

    def _nearest(self, points: Float[Tensor, "points codebooks code_dim"]) -> Int[Tensor, "points codebooks"]:
        """Returns the nearest code: the largest x·c for cosine, the largest x·c - |c|²/2 for Euclidean distance."""
        codes = self.codebooks.to(exact_dtype(points))
        # The norms of the codes are 1 up to rounding, which decides between codes where x is 0, in the padding.
        offsets = codes.square().sum(-1).unsqueeze(1) / -2 if self.distance == "l2" else codes.new_zeros(1, 1, 1)
        codes = codes.transpose(1, 2).contiguous()
        num_rows = max(1, (MAX_SCORES if points.is_cuda else MAX_SCORES_ON_CPU) // codes[:, 0].numel())
        chunks = [
            torch.baddbmm(offsets, rows, codes).max(-1).indices  # on a CPU, argmax takes twice as long
            for rows in torch.split(points.transpose(0, 1).to(codes.dtype), num_rows, dim=1)
        ]
        return torch.cat(chunks, dim=1).T

"""Self-attention with relative positions, as in Transformer-XL.

This module holds the position encodings and the attention of one layer. Valid frames attend to valid frames only.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nestmodel.nn.dropout import Dropout

MASKED_SCORE = -10000.0
"""Score of a masked key. Its exponential is 0 in every floating-point format."""


def relative_positions(num_frames: int, dim: int, device: torch.device) -> Float[Tensor, "positions dim"]:
    """Returns sinusoidal encodings of the distances num_frames - 1 down to 1 - num_frames.

    Sine and cosine are interleaved. The encodings are computed on each call: this costs less than projecting them in
    one layer, and a cache would be state that grows.

    Source: Transformer-XL, arXiv:1901.02860, appendix B.
    """
    distances = torch.arange(num_frames - 1, -num_frames, -1, dtype=torch.float32, device=device)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) * (-math.log(10000.0) / dim)
    angles = distances.unsqueeze(1) * exponents.exp()
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class RelPositionAttention(nn.Module):
    """Multi-head self-attention whose scores depend on content and on the distance between frames.

    Source: Transformer-XL, arXiv:1901.02860, section 3.3.
    """

    def __init__(self, *, dim: int, num_heads: int, dropout: float, use_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear_q = nn.Linear(dim, dim, bias=use_bias)
        self.linear_k = nn.Linear(dim, dim, bias=use_bias)
        self.linear_v = nn.Linear(dim, dim, bias=use_bias)
        self.linear_out = nn.Linear(dim, dim, bias=use_bias)
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch enc_frames dim"],
        positions: Float[Tensor, "positions dim"],
        is_padding: Bool[Tensor, "batch enc_frames"],
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Applies attention over the valid frames of each utterance.

        Args:
            x: Encoder frames.
            positions: `relative_positions` for the same number of frames.
            is_padding: True past the valid frames. Padded frames neither attend nor are attended to.

        Returns:
            The attended frames; padded ones equal the bias of the output projection.
        """
        # (batch, enc_frames, dim) -> (batch, heads, enc_frames, head_dim)
        q, k, v = (self._split_heads(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        p = self._split_heads(self.linear_pos(positions))
        # The queries are scaled instead of the scores, which are far larger tensors.
        scale = 1.0 / math.sqrt(q.shape[-1])
        content_q, position_q = ((q + bias.unsqueeze(1)) * scale for bias in (self.pos_bias_u, self.pos_bias_v))
        position = shift_to_distances(position_q @ p.transpose(-2, -1))
        is_masked_key = is_padding[:, None, None, :]
        if x.is_cuda or not (self.training or torch.is_grad_enabled()):
            # Torch's fused kernels. On a CPU they are slower when gradients are needed.
            dropout_p = self.dropout.prob if self.training else 0.0
            position = position.masked_fill(is_masked_key, MASKED_SCORE)
            mixed = F.scaled_dot_product_attention(content_q, k, v, position, dropout_p=dropout_p, scale=1.0)
        else:
            scores = (content_q @ k.transpose(-2, -1)).add_(position).masked_fill_(is_masked_key, MASKED_SCORE)
            mixed = self.dropout(scores.softmax(dim=-1)) @ v
        # Padded keys already have a weight of exactly 0. Zeroing the output of padded queries is equivalent to zeroing
        # their weights, and the tensor is smaller.
        mixed = mixed.masked_fill(is_padding[:, None, :, None], 0.0)
        out: Tensor = self.linear_out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Float[Tensor, "*batch rows dim"]) -> Float[Tensor, "*batch heads rows head_dim"]:
        return x.reshape(*x.shape[:-1], self.num_heads, -1).transpose(-3, -2)


def shift_to_distances(
    scores: Float[Tensor, "*batch enc_frames positions"],
) -> Float[Tensor, "*batch enc_frames enc_frames"]:
    """Converts scores by distance (T - 1 down to 1 - T) to scores by key: out[i, j] = scores[i, T - 1 - i + j].

    The wanted part of row i starts i columns to the left of that of row 0. Viewing the flattened matrix from column
    T - 1 of row 0 onwards, with rows of 2T - 2 instead of 2T - 1 values, aligns these parts without copying any value.
    """
    num_frames = scores.shape[-2]
    if num_frames == 1:
        return scores
    width = 2 * num_frames - 2
    aligned = scores.flatten(-2).narrow(-1, num_frames - 1, num_frames * width)
    return aligned.view(*scores.shape[:-1], width)[..., :num_frames]

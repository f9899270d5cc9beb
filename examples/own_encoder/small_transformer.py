"""A small Transformer encoder for NEST: convolutions of stride 2, positions by a convolution, blocks of torch.

nestmodel trains it as it trains FastConformer: docs/training.md has the command.
"""

import torch
from torch import Tensor, nn

from nestmodel import Encoder, EncoderOutput, HiddenStates


class SmallTransformer(Encoder):
    """Encodes log-mel frames as frames of 40 ms.

    Args:
        dim: Width of an encoder frame.
        num_blocks: Number of Transformer blocks.
        num_heads: Attention heads of a block; a divisor of `dim`.
        num_mels: As in `model.config.features`.
        dropout: Probability of dropout in the blocks.
    """

    def __init__(
        self, dim: int = 144, num_blocks: int = 4, num_heads: int = 4, num_mels: int = 80, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.dim, self.subsampling_factor, self.num_layers = dim, 4, num_blocks
        self.first = nn.Conv1d(num_mels, dim, 3, stride=2, padding=1)
        self.second = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        # The convolution over neighbouring frames tells positions apart, as in wav2vec 2.0.
        self.positions = nn.Conv1d(dim, dim, 31, padding=15, groups=dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, feats: Tensor, feat_lens: Tensor) -> EncoderOutput:
        """Returns the output of the last block, after a layer norm."""
        states, lens = self.hidden_states(feats, feat_lens)
        return EncoderOutput(states[-1], lens)

    def hidden_states(self, feats: Tensor, feat_lens: Tensor) -> HiddenStates:
        """Returns the input of the first block and the output of each block, the last one after a layer norm."""
        lens = feat_lens
        x = feats * is_valid(feats, lens)
        for convolution in (self.first, self.second):
            lens = (lens + 1) // 2
            x = nn.functional.gelu(convolution(x))
            x = x * is_valid(x, lens)  # what is past the end of an utterance does not reach its frames
        x = (x + self.positions(x)).transpose(1, 2)
        is_padding = ~is_valid(x.transpose(1, 2), lens.clamp(min=1)).squeeze(1)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], src_key_padding_mask=is_padding))
        return HiddenStates([*states[:-1], self.norm(states[-1])], lens)


def is_valid(x: Tensor, lens: Tensor) -> Tensor:
    """Returns True for the valid frames of x, which has the shape (batch, values, frames): (batch, 1, frames)."""
    return (torch.arange(x.shape[2], device=x.device) < lens[:, None]).unsqueeze(1)

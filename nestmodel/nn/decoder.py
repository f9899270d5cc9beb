"""Linear decoder from encoder frames to the classes of each codebook.

This module holds the output weights. The caller selects the frames: the loss needs the scored ones only, which avoids
most of the largest matrix product of a small model.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class MultiSoftmaxDecoder(nn.Module):
    """One softmax per codebook, computed by one linear layer whose channel is class · codebooks + codebook.

    Source: NEST, arXiv:2408.13106, section 3.4; the order of the channels is that of NeMo.
    """

    def __init__(self, *, dim: int, num_classes: int, num_codebooks: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_codebooks = num_codebooks
        # A convolution of width 1 is a linear layer. It is used here so that the weight has the shape of NeMo's.
        layer = nn.Conv1d(dim, num_classes * num_codebooks, 1)
        nn.init.xavier_uniform_(layer.weight)
        self.decoder_layers = nn.Sequential(layer)

    def logits(self, encoded: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows classes codebooks"]:
        """Returns the logits of the classes for any selection of encoder frames."""
        layer = self.decoder_layers[0]
        assert isinstance(layer, nn.Conv1d)
        scores = F.linear(encoded, layer.weight.squeeze(-1), layer.bias)
        return scores.reshape(*encoded.shape[:-1], self.num_classes, self.num_codebooks)

    def forward(
        self, encoded: Float[Tensor, "batch enc_frames dim"]
    ) -> Float[Tensor, "batch enc_frames classes codebooks"]:
        """Returns the log-probabilities of the classes at every encoder frame, in nats."""
        return self.logits(encoded).log_softmax(dim=-2)

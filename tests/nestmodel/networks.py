"""What tests of networks share: settings of live speech, and running statistics that are not the initial ones."""

from typing import Any

import torch

from nestmodel import NestNetwork

CAUSAL: dict[str, Any] = {
    "att_context_style": "chunked_limited",
    "conv_context_size": "causal",
    "causal_downsampling": True,
}
"""Settings of an encoder that reads nothing after the chunk of a frame."""


def with_statistics(network: NestNetwork) -> NestNetwork:
    """Returns the network in eval mode, after a change of its running statistics."""
    for value in network.encoder.buffers():
        if value.is_floating_point():
            value += torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
    return network.eval()

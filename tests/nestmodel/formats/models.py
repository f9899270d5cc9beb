"""A checkpoint to convert and load in tests, and a comparison of weights."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from nestmodel import NestConfig, NestNetwork
from tests.training import tiny_config

CONFIG = replace(tiny_config(), seed=5)


def checkpoint(directory: Path, config: NestConfig = CONFIG) -> tuple[NestNetwork, Path]:
    """A network whose running statistics are not the initial ones, and a checkpoint of it as `fit` writes it."""
    network = NestNetwork(config)
    for value in network.encoder.buffers():
        if value.is_floating_point():
            value += torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
    path = directory / "model.ckpt"
    torch.save({"nest_config": asdict(config), "state_dict": network.state_dict(), "optimizer_states": [{}]}, path)
    return network, path


def assert_equal_states(first: nn.Module, second: nn.Module, prefix: str = "") -> None:
    """Asserts that weights are equal bit for bit, for names with a prefix."""
    other = second.state_dict()
    assert first.state_dict().keys() == other.keys()
    for name, value in first.state_dict().items():
        if name.startswith(prefix):
            assert torch.equal(value, other[name]), name

"""A checkpoint to convert and load in tests, and a comparison of weights."""

import tarfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestmodel import FeatureConfig, NestConfig, NestNetwork
from tests.nestmodel.networks import CAUSAL, with_statistics
from tests.training import tiny_config

CONFIG = replace(tiny_config(), seed=5)


def checkpoint(directory: Path, config: NestConfig = CONFIG) -> tuple[NestNetwork, Path]:
    """A network whose running statistics are not the initial ones, and a checkpoint of it as `fit` writes it."""
    network = with_statistics(NestNetwork(config))
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


def members_of(path: Path) -> dict[str, bytes]:
    """Returns the contents of all members of a tar file."""
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]  # files


def streaming_config(**encoder: Any) -> NestConfig:
    """Returns a model whose contexts have chunks of 4, 2 and 1 frames."""
    settings = {"conv_norm": "layer_norm", "att_context_size": ((8, 3), (8, 1), (8, 0)), **CAUSAL}
    return replace(tiny_config(**{**settings, **encoder}), features=FeatureConfig(normalize="NA"))


STREAMING = streaming_config()

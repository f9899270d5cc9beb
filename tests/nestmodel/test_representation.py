from dataclasses import replace
from pathlib import Path

import torch

from nestmodel import (
    EncoderConfig,
    EncoderOutput,
    FeatureConfig,
    LossStats,
    MaskConfig,
    NestConfig,
    NestNetwork,
    OptimizerConfig,
    QuantizerConfig,
    load_network,
    save_network,
)
from tests.training import tiny_config

CONFIG = tiny_config()


def test_a_configuration_shows_what_differs_from_the_defaults_and_can_be_evaluated() -> None:
    names = {"EncoderConfig": EncoderConfig, "FeatureConfig": FeatureConfig, "MaskConfig": MaskConfig}
    names |= {"NestConfig": NestConfig, "OptimizerConfig": OptimizerConfig, "QuantizerConfig": QuantizerConfig}
    config = replace(NestConfig.preset("small"), masking=MaskConfig(prob=0.02), seed=3)
    assert eval(repr(config), names) == config
    assert repr(MaskConfig(prob=0.02)) == "MaskConfig(prob=0.02)"
    assert repr(EncoderConfig(d_model=8, num_heads=2, num_layers=1)) == (
        "EncoderConfig(d_model=8, num_heads=2, num_layers=1)"
    )


def test_a_network_shows_its_sizes_in_one_short_line(tmp_path: Path) -> None:
    network = NestNetwork(NestConfig.preset("demo"))
    shown = repr(network)
    assert len(shown.splitlines()) == 1
    assert len(shown) < 200
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    assert f"{num_parameters:,}" in shown
    assert "frames of 40 ms" in shown
    assert "ConformerBlock" in repr(network.encoder)
    assert f"weights from {tmp_path / 'a.ckpt'}" in repr(load_network(save_network(network, tmp_path / "a.ckpt")))


def test_outputs_show_shapes_instead_of_elements() -> None:
    output = EncoderOutput(torch.zeros(2, 3, 4), torch.tensor([3, 2]))
    assert repr(output) == "EncoderOutput(frames: 2 x 3 x 4 float32, lens: 2 int64)"
    stats = LossStats(torch.tensor(2.5), torch.tensor(2.0), torch.tensor(0.0), torch.ones(1, 9), torch.ones(1, 9))
    assert repr(stats).startswith("LossStats(nll_sum: 2.5, num_tokens: 2, num_correct: 0, token_counts: 1 x 9 float32")

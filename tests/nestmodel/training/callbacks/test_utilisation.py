from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.fake_gpu import FORMULAS
from nestmodel import EncoderConfig
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.training.callbacks.throughput import encoder_operations, peak_of_run

CONFIG = EncoderConfig(d_model=48, num_heads=4, num_layers=3, subsampling_channels=32)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, subsampling_factor=4, conv_kernel_size=31, ff_expansion=2),
        replace(CONFIG, causal_downsampling=True, conv_context_size="causal"),
    ],
)
@pytest.mark.parametrize(("num_cuts", "num_frames"), [(1, 1600), (3, 203)])
def test_operations_are_those_that_torch_counts(config: EncoderConfig, num_cuts: int, num_frames: int) -> None:
    encoder = ConformerEncoder(config, num_mels=80).train()
    feats, lens = torch.randn(num_cuts, 80, num_frames), torch.full((num_cuts,), num_frames)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:

        def convolutions() -> int:
            return counter.get_flop_counts()["Global"][torch.ops.aten.convolution]

        total = encoder(feats, lens, encoder.draw_keys(0)).frames.sum()
        forward = convolutions()
        total.backward()
    recomputed = convolutions() - forward
    assert encoder_operations(config, 80, num_cuts, num_frames) == counter.get_total_flops() - recomputed


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989e12),
        ("NVIDIA H100 PCIe", "16-mixed", 756e12),
        ("NVIDIA L4", "bf16-mixed", 121e12),
        ("NVIDIA L40", "bf16-mixed", None),
        ("NVIDIA L4", "32-true", None),
        ("", "bf16-mixed", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name_or_not_at_all(name: str, precision: str, peak: float | None) -> None:
    assert peak_of_run(name, precision) == peak

"""The estimate of memory without a GPU, which docs/gpu.md and the presets are based on."""

import warnings

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import count_memory
from nestmodel import EncoderConfig, MaskConfig, NestConfig, preset_path
from tests.fakes import needs_fake_gpu

SIZES = EncoderConfig(d_model=64, num_heads=4, num_layers=1, subsampling_channels=16, use_bias=False)
CONFIG = NestConfig(encoder=SIZES, masking=MaskConfig(prob=0.05))


def kept_by_a_block(device: str, num_cuts: int, num_frames: int) -> int:
    """Returns the bytes that are alive after the forward pass of one block on fake tensors."""
    encoder = count_memory.make_encoder(CONFIG, 1)
    x = torch.empty(num_cuts, num_frames, SIZES.d_model, dtype=torch.bfloat16, requires_grad=True)
    lens = torch.empty(num_cuts, dtype=torch.int64)
    with count_memory.LiveBytes() as live, torch.autocast(device, torch.bfloat16):
        out = encoder.encode(x, lens)
        assert out.device.type == device
        return int(live.now)


def kept_on_fake_cuda(num_cuts: int, num_frames: int) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True), count_memory.CudaKernels(on_cpu=False), torch.device("cuda"):
        return kept_by_a_block("cuda", num_cuts, num_frames)


def kept_on_fake_cpu(num_cuts: int, num_frames: int) -> int:
    with count_memory.fake_cuda_step():
        return kept_by_a_block("cpu", num_cuts, num_frames)


@needs_fake_gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the check whether there is a GPU")
def test_the_forward_pass_keeps_as_much_as_on_fake_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_, **__: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kept_on_fake_cpu(4, 64) == kept_on_fake_cuda(4, 64)


def test_bytes_of_dropped_tensors_are_no_longer_counted() -> None:
    with count_memory.LiveBytes() as live:
        first = torch.zeros(1000)
        view = first[1:]
        second = torch.ones(10)
        assert live.now == 4096 + 512
        del first, second
        assert live.now == 4096
        del view
    assert (live.now, live.peak) == (0, 4096 + 512)


def test_the_budget_is_what_the_states_leave_for_the_most_demanding_length() -> None:
    activations = {1.0: count_memory.Activations(10e6, 1e6), 60.0: count_memory.Activations(20e6, 2e6)}
    demand = count_memory.Demand("large", 2_000_000_000, 1_000_000_000, activations)
    assert demand.budget(24, 60.0, 0.25, checkpointed=False) == 740  # 15 GB at 20 MB a second, rounded down
    assert demand.budget(24, 1.0, 0.25, checkpointed=False) == 1500
    assert demand.budget(24, 60.0, 0.25, checkpointed=True) == 7500
    assert demand.budget(3, 60.0, 0.25, checkpointed=False) == 0


@pytest.mark.parametrize("preset", ["medium", "large", "xlarge"])
def test_the_budget_of_a_preset_fits_80_gb(preset: str) -> None:
    stated = yaml.safe_load(preset_path(preset).read_text(encoding="utf-8"))["data"]["plan"]["max_batch_seconds"]
    demand = count_memory.count(preset, lengths=(1.0, 240.0))
    fitting = demand.budget(80, 240.0, 0.2, checkpointed=False)
    assert 0.4 * fitting < stated <= fitting

"""The estimate of memory without a GPU, which docs/gpu.md and the presets are based on."""

import pytest
import torch
import yaml

from benchmarks.counts import count_memory
from benchmarks.counts.fake_gpu import OperationLog
from nestmodel import preset_path
from tests.fakes import needs_fake_gpu

pytestmark = pytest.mark.slow


def test_bytes_of_dropped_tensors_are_no_longer_counted() -> None:
    with OperationLog(rounding=512) as log:
        first = torch.zeros(1000)
        view = first[1:]
        second = torch.ones(10)
        assert log.live_bytes == 4096 + 512
        del first, second
        assert log.live_bytes == 4096
        del view
    assert (log.live_bytes, log.kept_bytes, log.peak_bytes) == (0, 0, 4096 + 512)


def test_the_budget_is_what_the_states_leave_for_the_most_demanding_length() -> None:
    activations = {1.0: count_memory.Activations(10e6, 1e6), 60.0: count_memory.Activations(20e6, 2e6)}
    demand = count_memory.Demand("large", 2_000_000_000, 1_000_000_000, activations)
    assert demand.budget(24, 60.0, 0.25, checkpointed=False) == 740  # 15 GB at 20 MB a second, rounded down
    assert demand.budget(24, 1.0, 0.25, checkpointed=False) == 1500
    assert demand.budget(24, 60.0, 0.25, checkpointed=True) == 7500
    assert demand.budget(3, 60.0, 0.25, checkpointed=False) == 0


@needs_fake_gpu
@pytest.mark.parametrize("preset", ["medium", "large", "xlarge"])
def test_the_budget_of_a_preset_fits_80_gb(preset: str) -> None:
    stated = yaml.safe_load(preset_path(preset).read_text(encoding="utf-8"))["data"]["plan"]["max_batch_seconds"]
    demand = count_memory.count(preset, lengths=(1.0, 240.0))
    fitting = demand.budget(80, 240.0, 0.2, checkpointed=False)
    assert 0.4 * fitting < stated <= fitting

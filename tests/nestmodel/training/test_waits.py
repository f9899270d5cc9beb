"""Counts the waits of the CPU for the GPU in training steps, without a GPU and, where there is one, on it.

A change that adds a wait fails here, and the functions that wait are named.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nestmodel import NestModel, Throughput
from nestmodel.training import module
from tests.conftest import MessyCorpora
from tests.fake_gpu import needs_fake_gpu
from tests.nestmodel.networks import CAUSAL
from tests.training import messy_data, tiny_config, trainer
from tests.waits import Wait, count_waits

SUMS = Wait("copy to the CPU", "step_stats.py:fetch")


@needs_fake_gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"num_steps": 2, "seconds_between_lines": 0.0},  # the second step is logged, with lines of progress
        {"config": tiny_config(num_layers=1, att_context_size=((-1, -1), (6, 2)), **CAUSAL)},
        {"gradient_clip_val": 1.0},
    ],
    ids=["logged", "for live speech", "clipped"],
)
def test_the_cpu_waits_once_in_a_step_for_the_sums_of_the_step(settings: dict[str, Any]) -> None:
    assert count_waits(**settings) == [[], [SUMS]] * settings.get("num_steps", 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_steps_on_a_gpu_wait_only_where_their_sums_are_read(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA raises an error at every other wait, from the second step on."""
    fetch, num_fetched, num_steps = module.fetch, 0, 6

    def allowed_fetch(scalars):  # type: ignore[no-untyped-def]
        nonlocal num_fetched
        torch.cuda.set_sync_debug_mode("default")
        values = fetch(scalars)
        num_fetched += 1
        # After the last step, Lightning copies the model to the CPU.
        torch.cuda.set_sync_debug_mode("default" if num_fetched == num_steps else "error")
        return values

    monkeypatch.setattr(module, "fetch", allowed_fetch)
    settings = {"max_steps": num_steps, "log_every_n_steps": 2, "gradient_clip_val": 1.0}
    runner = trainer(tmp_path, [Throughput()], accelerator="gpu", **settings)
    try:
        runner.fit(NestModel(tiny_config()), datamodule=messy_data(messy_corpora))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert num_fetched == num_steps

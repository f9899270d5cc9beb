"""Counts the waits of the CPU for the GPU in training steps, without a GPU and, where there is one, on it.

A change that adds a wait fails here, and the functions that wait are named.
"""

from pathlib import Path

import pytest
import torch

from nestmodel import NestConfig, NestModel, Throughput
from nestmodel.training import module
from tests.conftest import MessyCorpora
from tests.fake_gpu import needs_fake_gpu
from tests.training import messy_data, tiny_config, trainer
from tests.waits import MB, Count, Wait, count_waits, dense_batch


@pytest.fixture(scope="module")
def counts() -> list[Count]:
    """Counts of two steps of two microbatches, of which the second step is logged, with lines of progress."""
    return count_waits(dense_batch(), num_steps=2, microbatches=2, seconds_between_lines=0.0)


@needs_fake_gpu
def test_the_cpu_waits_once_in_a_step_for_the_sums_of_the_step(counts: list[Count]) -> None:
    sums = Wait("copy to the CPU", "step_stats.py:fetch")
    assert [(count.step, count.microbatch, count.is_logged, count.waits) for count in counts] == [
        (0, 0, False, []),
        (0, 1, False, [sums]),
        (1, 0, True, []),
        (1, 1, True, [sums]),
    ]


@needs_fake_gpu
def test_a_batch_of_240_s_sends_clean_and_noisy_audio_only(counts: list[Count]) -> None:
    audio_bytes = 2 * 4 * 240 * 16000
    assert audio_bytes < counts[1].bytes_sent < 31 * MB


@needs_fake_gpu
def test_batches_are_copied_one_ahead_on_a_stream_of_their_own(counts: list[Count]) -> None:
    sizes = [count.bytes_sent for count in counts]
    assert sizes == [2 * sizes[1], sizes[1], sizes[1], 0]
    assert [count.bytes_sent_on_compute_stream for count in counts] == [0, 0, 0, 0]


@needs_fake_gpu
def test_encoders_for_live_speech_add_no_wait() -> None:
    first, second = count_waits(dense_batch(), num_steps=1, microbatches=2, config=NestConfig.preset("demo", "unified"))
    assert first.waits == []
    assert second.waits == [Wait("copy to the CPU", "step_stats.py:fetch")]


@needs_fake_gpu
def test_clipping_adds_no_wait() -> None:
    first, second = count_waits(dense_batch(), num_steps=1, microbatches=2, max_norm=1.0)
    assert first.waits == []
    assert second.waits == [Wait("copy to the CPU", "step_stats.py:fetch")]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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

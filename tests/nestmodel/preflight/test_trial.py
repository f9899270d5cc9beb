from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from nestdata import AudioNoiseBatch, BatchPlan, PlanConfig
from nestmodel import ConfigError, NestModel
from nestmodel.preflight.config import parse_bytes
from nestmodel.preflight.trial import Shape, TrialResult, TrialStep, largest_shapes, noise_batch, run_shapes
from tests.training import tiny_config, trainer

RATE = 16000
SHAPES: list[Shape] = [(2, 800), (1, 1600)]
Usage = namedtuple("Usage", "ru_maxrss")


def test_the_largest_shapes_have_most_samples_the_longest_and_the_most_cuts() -> None:
    lengths = [RATE] * 60 + [4 * RATE] * 14 + [5 * RATE] * 2
    plan = BatchPlan(lengths, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert largest_shapes(plan) == [(2, 5 * RATE), (10, RATE)]
    longer = [RATE] * 64 + [99_000] * 8
    plan = BatchPlan(longer, RATE, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert largest_shapes(plan) == [(10, RATE), (1, 99_000)]


def test_a_batch_of_noise_has_interference_everywhere_and_no_padding() -> None:
    batch = noise_batch((3, 16000))
    assert batch.audio.shape == (3, 16000)
    assert batch.audio_len.tolist() == batch.noise_len.tolist() == batch.noisy_audio_len.tolist() == [16000] * 3
    assert torch.equal(batch.noisy_audio, batch.audio + batch.noise)
    for row in batch.noise:
        assert 0.04 < row.std().item() < 0.06


def test_a_trial_step_makes_the_same_change_each_time(tmp_path: Path) -> None:
    batch, changes = noise_batch((2, 16000)), []
    for _ in range(2):
        torch.manual_seed(0)
        step = TrialStep(tiny_config(), trainer(tmp_path))
        before = _weights(step._model)
        assert step(batch) > 0
        changes.append(_weights(step._model) - before)
    assert torch.equal(*changes)
    assert changes[0].abs().sum() > 0


def _weights(model: NestModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters() if parameter.requires_grad])


class FakeStep:
    """Takes as many seconds as steps were made, and fails at a shape."""

    num_trained = 3

    def __init__(self, too_large: Shape | None = None) -> None:
        self.too_large = too_large
        self.shapes: list[Shape] = []

    def __call__(self, batch: AudioNoiseBatch) -> float:
        self.shapes.append((batch.audio.shape[0], batch.audio.shape[1]))
        if self.shapes[-1] == self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory.\nIn two lines.")
        return float(len(self.shapes))


def run(step: Any, **options: Any) -> TrialResult:
    given: dict[str, Any] = {"allowed_bytes": 0, "with_ddp": True, **options}
    return run_shapes(lambda: step, SHAPES, device=torch.device("cpu"), **given)


def test_each_shape_runs_twice_so_that_moments_and_graphs_are_in_memory_and_the_second_step_is_timed() -> None:
    step = FakeStep()
    steps: list[int] = []
    result = run(step, on_step=lambda: steps.append(len(step.shapes)))
    assert step.shapes == [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[1]]
    assert steps == [1, 2, 3, 4]
    assert result.too_large is None
    assert result.peak_bytes > 0
    assert result.seconds == (2.0, 4.0)


def test_a_failed_allocation_names_its_shape_and_any_other_error_is_raised() -> None:
    result = run(FakeStep(too_large=SHAPES[1]))
    assert (result.too_large, result.peak_bytes, len(result.seconds)) == (SHAPES[1], 0, 1)
    assert result.error == "CUDA out of memory.\nIn two lines."
    with pytest.raises(AttributeError, match="num_trained"):
        run(object())


def test_the_first_shape_above_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = FakeStep()
    monkeypatch.setattr("nestmodel.preflight.trial.PeakMemory.peak_bytes", lambda _: 100 * len(step.shapes))
    assert run(step, allowed_bytes=200).too_large == SHAPES[1]
    assert run(FakeStep(), allowed_bytes=2000).too_large is None


@pytest.mark.parametrize(("text", "number"), [("8GiB", 8 * 2**30), ("750 MB", 750_000_000), ("1.5TB", 1.5e12)])
def test_sizes_are_read_with_their_unit(text: str, number: int) -> None:
    assert parse_bytes(text, "memory_limit") == number


@pytest.mark.parametrize("text", ["8", "8G", "-1GB"])
def test_a_size_without_unit_or_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"memory_limit is '{text}': give a size with one of the units KB, MB"):
        parse_bytes(text, "memory_limit")

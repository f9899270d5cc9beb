from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from nestmodel import PlainProgress


class StubTrainer(pl.Trainer):
    """Has a step and metrics, and cannot train."""

    is_global_zero: Any = True
    sanity_checking: Any = False
    global_step: Any = 0
    callback_metrics: Any = None

    def __init__(self, step: int, **metrics: float) -> None:
        self.global_step = step
        self.callback_metrics = {name: torch.tensor(value) for name, value in metrics.items()}


def test_a_line_has_the_step_and_the_metrics_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress(seconds_between=-1.0).on_train_batch_end(StubTrainer(3))
    metrics = {"train_loss": 2.0, "train_token_entropy": 3.0, "train_accuracy": 0.25, "steps_skipped": 1.0}
    rates = {"audio_s_per_s": 80.0, "data_wait": 0.5}
    PlainProgress(seconds_between=-1.0).on_train_batch_end(StubTrainer(4, **metrics, **rates))
    assert capsys.readouterr().err.splitlines() == [
        "step 3",
        "step 4, 1 steps skipped, loss 2.000, entropy 3.000, masked accuracy 25.0 %, 80 s of audio/s, 50 % waiting",
    ]


def test_lines_keep_their_interval(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress(seconds_between=3600.0)
    progress._last_s = -7200.0  # the monotonic clock may start at zero
    for step in (1, 2):
        progress.on_train_batch_end(StubTrainer(step))
    assert capsys.readouterr().err == "step 1\n"


def test_a_validation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress().on_validation_end(StubTrainer(5, val_loss=2.0, val_token_entropy=3.0, val_accuracy=0.25))
    assert capsys.readouterr().err == "step 5: validation loss 2.000, token entropy 3.000, masked accuracy 25.0 %\n"

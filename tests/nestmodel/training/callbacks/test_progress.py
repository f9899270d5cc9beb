from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl

from nestmodel import Progress
from nestmodel.training.callbacks.progress import PlainLines
from nestmodel.training.run_state import RunState, Scores
from tests.training import StubTrainer

STATE = RunState(step=1300, num_steps=80_000, activity="training")


class Module(pl.LightningModule):
    config = SimpleNamespace(features=SimpleNamespace(sampling_rate=16000))


MODULE = Module()
BATCH: Any = SimpleNamespace(num_samples=8000)


class Recorder:
    """Keeps what it is to show."""

    seconds_between = 3600.0

    def __init__(self) -> None:
        self.shown: list[RunState] = []
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def show(self, state: RunState) -> None:
        self.shown.append(state)

    def stop(self) -> None:
        self.calls.append("stop")


def test_plain_lines_show_each_step_and_each_validation_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    validated = replace(STATE, validation=Scores(2.0, 3.0, 0.25), validated_step=1300)
    for state in (
        replace(STATE, activity="starting"),
        replace(STATE, step=1299),
        replace(STATE, activity="validating"),
        replace(validated, activity="training"),
        replace(validated, activity="writing a checkpoint"),
        replace(validated, step=1301),
        replace(validated, step=1301, activity="finished"),
    ):
        lines.show(state)
    assert capsys.readouterr().err.splitlines() == [
        "step 1,299 of 80,000",
        "step 1,300: validation loss 2.000 (entropy 3.000), masked accuracy 25.0 %",
        "step 1,301 of 80,000",
    ]


def test_steps_are_shown_at_intervals_and_changes_of_activity_at_once() -> None:
    recorder = Recorder()
    progress = Progress(recorder)
    trainer = StubTrainer(10)
    progress.on_train_start(trainer, MODULE)
    for step in (11, 12):
        trainer.global_step = step
        progress.on_train_batch_end(trainer, MODULE, None, BATCH, 0)  # not the end of a step
        progress.on_train_batch_end(trainer, MODULE, None, BATCH, 1)
    progress.on_validation_start(trainer, MODULE)
    progress.on_validation_batch_end(trainer)
    progress.on_validation_end(trainer, MODULE)
    progress.on_train_end(trainer, MODULE)
    progress.on_exception(trainer, MODULE, ValueError())
    assert recorder.calls == ["start", "stop"]
    assert [(state.step, state.activity, state.validated_step) for state in recorder.shown] == [
        (10, "starting", None),
        (11, "training", None),
        (12, "validating", None),
        (12, "training", 12),
        (12, "finished", 12),
    ]


def test_only_rank_0_shows_progress() -> None:
    recorder = Recorder()
    progress = Progress(recorder)
    trainer = StubTrainer(is_global_zero=False)
    progress.on_train_start(trainer, MODULE)
    progress.on_train_batch_end(trainer, MODULE, None, BATCH, 1)
    progress.on_train_end(trainer, MODULE)
    assert not recorder.calls
    assert not recorder.shown

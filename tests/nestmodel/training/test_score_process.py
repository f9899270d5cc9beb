"""Scores of a checkpoint from a process of its own."""

import os
import signal
from pathlib import Path

import pytest

from nestmodel import FeatureScoreConfig, TrainingError
from nestmodel.training.score_process import ScoreJob, ScoreProcess


def start(directory: Path) -> ScoreProcess:
    return ScoreProcess(
        ScoreJob(
            checkpoint=str(directory / "none.ckpt"),
            corpus=str(directory / "none.corpus"),
            noise=None,
            num_threads=1,
            config=FeatureScoreConfig(),
        )
    )


def test_a_process_that_was_killed_is_reported_by_its_signal_and_not_by_its_last_warning(tmp_path: Path) -> None:
    process = start(tmp_path)
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"^the process was killed by SIGKILL$"):
        process.scores()


def test_a_process_that_failed_is_reported_by_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none\.corpus"):
        start(tmp_path).scores()

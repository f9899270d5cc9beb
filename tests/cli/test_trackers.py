import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, Logger

from nestmodel import ConfigError, TrainingError
from nestmodel.training import trackers
from nestmodel.training.trackers import open_trackers, tracker_names
from tests.extras import needs


class FailingLogger(CSVLogger):
    """Fails as a client of a server that is gone."""

    calls = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # noqa: ARG002
        self.calls += 1
        raise ConnectionError("refused by http://user:secret@host/")


class UnreachableLogger(FailingLogger):
    """Fails at once."""

    @property
    def experiment(self) -> Any:
        raise ConnectionError("refused by http://user:secret@host/")


def opened(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: type[FailingLogger], *, must_open: bool = True
) -> list[Logger]:
    folder.mkdir()
    monkeypatch.setattr(trackers, "_LOGGERS", {"mlflow": lambda folder, _run: kind(folder)})
    return open_trackers(["mlflow"], folder, {"seed": 3}, None, must_open=must_open)


def test_a_tracker_that_fails_is_one_warning_and_gets_a_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr("nestmodel.training.trackers.time.monotonic", lambda: now[0])
    (tracker,) = opened(monkeypatch, tmp_path / "version_0", FailingLogger)
    assert isinstance(tracker, FailingLogger)
    with pytest.warns(
        UserWarning, match=r"mlflow does not take the metrics of this run \(refused by http://\*\*\*@host/"
    ):
        tracker.log_metrics({"train_loss": 1.0}, step=1)
    for now[0] in (1.0, 2.0, 400.0, 401.0):  # any further warning would be an error
        tracker.log_metrics({"train_loss": 1.0}, step=1)
    assert tracker.calls == 2


def test_a_tracker_that_cannot_be_reached_at_the_start_is_an_error_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        TrainingError, match=r"--log mlflow: the run cannot be logged there \(refused by http://\*\*\*@"
    ):
        opened(monkeypatch, tmp_path / "version_0", UnreachableLogger)
    assert [*tmp_path.iterdir()] == []


def test_a_tracker_that_cannot_be_reached_when_a_run_resumes_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="mlflow does not take the metrics of this run"):
        assert opened(monkeypatch, tmp_path / "version_0", UnreachableLogger, must_open=False) == []


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert tracker_names(["csv"]) == []
    with pytest.raises(ConfigError, match=r"--log wandb needs a package: pip install 'nest-pretrain\[wandb\]'"):
        tracker_names(["csv", "wandb"])


def test_tensorboard_is_taken_by_default_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, names in ((object(), ["tensorboard"]), (None, [])):
        monkeypatch.setattr("importlib.util.find_spec", lambda _name, found=found: found)
        assert tracker_names([]) == names


SETTINGS = {"trainer": {"max_steps": 2}, "data": {"noise": "s3://***@bucket/noise", "weights": [0.7, 0.3]}}


def started(name: Any, root: Path, start: int) -> Logger:
    """Opens a tracker for the first start of a run, or for a second one that resumes from a checkpoint of the first."""
    folder = root / f"version_{start}"
    folder.mkdir(parents=True)
    checkpoint = root / "version_0" / "checkpoints" / "last.ckpt"
    (tracker,) = open_trackers([name], folder, SETTINGS, checkpoint if start else None, must_open=True)
    return tracker


@pytest.mark.slow
@needs("mlflow", "mlflow", "sqlalchemy", "alembic")
@pytest.mark.filterwarnings("ignore")  # MLflow uses what SQLAlchemy deprecates
def test_mlflow_gets_metrics_and_settings_in_one_run_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for start in (0, 1):
        tracker = started("mlflow", tmp_path / "run", start)
        tracker.log_metrics({"train_loss": 1.5}, step=start)
        tracker.finalize("success")
    with sqlite3.connect(tmp_path / "run" / "mlflow.db") as database:
        assert database.execute("select key, value, step from metrics").fetchall() == [
            ("train_loss", 1.5, 0),
            ("train_loss", 1.5, 1),
        ]
        params = dict(database.execute("select key, value from params").fetchall())
        assert database.execute("select name, status from runs").fetchall() == [("run/version_0", "FINISHED")]
    assert params == {"trainer/max_steps": "2", "data/noise": "s3://***@bucket/noise", "data/weights": "[0.7, 0.3]"}


@pytest.mark.slow
@needs("wandb", "wandb")
def test_wandb_gets_metrics_and_settings_in_one_run_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for start in (0, 1):
        tracker = started("wandb", tmp_path / "run", start)
        tracker.log_metrics({"train_loss": 1.5}, step=start)
        assert wandb.run is not None
        assert wandb.run.summary["train_loss"] == 1.5
        assert wandb.run.config.as_dict() == ({} if start else SETTINGS)
        wandb.finish()
    folders = [tmp_path / "run" / f"version_{start}" for start in (0, 1)]
    ids = {json.loads((folder / "trackers.json").read_text())["wandb"] for folder in folders}
    assert len(ids) == 1
    for folder in folders:
        (run,) = (folder / "wandb").glob("offline-run-*")
        assert run.name.endswith(ids.copy().pop())


@pytest.mark.slow
@needs("tensorboard", "tensorboard")
def test_tensorboard_gets_metrics_and_settings(tmp_path: Path) -> None:
    tracker = started("tensorboard", tmp_path / "run", 0)
    tracker.log_metrics({"train_loss": 1.5}, step=0)
    tracker.finalize("success")
    assert [*(tmp_path / "run" / "version_0" / "tensorboard").glob("events.out.tfevents.*")]

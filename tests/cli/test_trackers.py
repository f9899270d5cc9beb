import json
import sqlite3
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from nestmodel import ConfigError, TrainingError
from nestmodel.training.trackers import Tracker, check_trackers, open_loggers, start_trackers
from tests.extras import needs


class FailingLogger:
    """Fails as a client of a server that is gone."""

    version = "1"

    def __init__(self) -> None:
        self.calls = 0

    @property
    def experiment(self) -> Any:
        raise ConnectionError("refused by http://user:secret@host/")

    def log_metrics(self, _metrics: dict[str, float], step: int) -> None:  # noqa: ARG002
        self.calls += 1
        raise ConnectionError("refused by http://user:secret@host/")


def test_a_tracker_that_fails_is_one_warning_and_gets_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("nestmodel.training.trackers.time.monotonic", lambda: now[0])
    inner = FailingLogger()
    tracker = Tracker("mlflow", lambda: inner)
    monkeypatch.setattr(FailingLogger, "experiment", None)
    tracker.open(must_open=True)
    with pytest.warns(
        UserWarning, match=r"mlflow does not take the metrics of this run \(refused by http://\*\*\*@host/"
    ):
        tracker.log_metrics({"train_loss": 1.0}, step=1)
    for now[0] in (1.0, 2.0, 400.0, 401.0):  # any further warning would be an error
        tracker.log_metrics({"train_loss": 1.0}, step=1)
    assert inner.calls == 2


def test_a_tracker_that_cannot_be_reached_at_the_start_is_an_error() -> None:
    with pytest.raises(TrainingError, match=r"--log wandb: the run cannot be logged there \(refused"):
        Tracker("wandb", FailingLogger).open(must_open=True)


def test_a_start_that_cannot_be_logged_leaves_no_folder(tmp_path: Path) -> None:
    csv, *_ = open_loggers(["csv"], tmp_path, None)
    with pytest.raises(TrainingError):
        start_trackers([csv, Tracker("wandb", FailingLogger)], {}, must_open=True)
    assert [*tmp_path.iterdir()] == []


def test_a_tracker_that_cannot_be_reached_when_a_run_resumes_is_a_warning() -> None:
    tracker = Tracker("wandb", FailingLogger)
    with pytest.warns(UserWarning, match="wandb does not take the metrics of this run"):
        tracker.open(must_open=False)
    tracker.log_metrics({"train_loss": 1.0}, step=1)  # a call of the logger would be another warning


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    check_trackers(["csv"])
    with pytest.raises(ConfigError, match=r"--log wandb needs a package: pip install 'nest-pretrain\[wandb\]'"):
        check_trackers(["csv", "wandb"])


def test_tensorboard_is_left_out_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert len(open_loggers(None, tmp_path, None)) == 1


@pytest.mark.slow
@needs("mlflow", "mlflow", "sqlalchemy", "alembic")
@pytest.mark.filterwarnings("ignore")  # MLflow uses what SQLAlchemy deprecates
def test_mlflow_gets_metrics_and_settings_in_one_run_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checkpoint = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt"
    for start, ckpt_path in enumerate((None, str(checkpoint))):
        csv, tracker = open_loggers(["mlflow", "csv"], tmp_path / "run", ckpt_path)
        assert isinstance(tracker, Tracker)
        settings = {"trainer": {"max_steps": 2 + start}, "data": {"noise": "s3://user:secret@bucket/noise"}}
        start_trackers([csv, tracker], settings, must_open=True)
        tracker.log_metrics({"train_loss": 1.5}, step=start)
        tracker.finalize("success")
    with sqlite3.connect(tmp_path / "run" / "mlflow.db") as database:
        assert database.execute("select key, value, step from metrics").fetchall() == [
            ("train_loss", 1.5, 0),
            ("train_loss", 1.5, 1),
        ]
        params = dict(database.execute("select key, value from params").fetchall())
        assert database.execute("select name, status from runs").fetchall() == [("run/version_0", "FINISHED")]
    assert params == {"trainer.max_steps": "2", "data.noise": "s3://***@bucket/noise"}


@pytest.mark.slow
@needs("wandb", "wandb")
def test_wandb_gets_metrics_and_settings_in_one_run_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    checkpoint = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt"
    for start, ckpt_path in enumerate((None, str(checkpoint))):
        csv, tracker = open_loggers(["wandb"], tmp_path / "run", ckpt_path)
        assert isinstance(tracker, Tracker)
        start_trackers([csv, tracker], {"data": {"noise": "s3://user:secret@bucket/noise"}}, must_open=True)
        tracker.log_metrics({"train_loss": 1.5}, step=start)
        assert wandb.run is not None
        assert wandb.run.summary["train_loss"] == 1.5
        assert wandb.run.config.as_dict() == ({} if start else {"data.noise": "s3://***@bucket/noise"})
        wandb.finish()
    folders = [tmp_path / "run" / f"version_{start}" for start in (0, 1)]
    ids = {json.loads((folder / "trackers.json").read_text())["wandb"] for folder in folders}
    assert len(ids) == 1
    for folder in folders:
        (run,) = (folder / "wandb").glob("offline-run-*")
        assert run.name.endswith(ids.copy().pop())


def test_ids_of_runs_are_checked(tmp_path: Path) -> None:
    from nestmodel.training.trackers import _read_ids

    for content in ("", "[]", '{"mlflow": 3}', '{"mlflow": "../../x"}', "\x00"):
        (tmp_path / "trackers.json").write_text(content)
        is_damaged = content not in ('{"mlflow": 3}', '{"mlflow": "../../x"}')
        with pytest.warns(UserWarning, match="cannot be read") if is_damaged else nullcontext():
            assert _read_ids(tmp_path / "trackers.json") == {}
    assert _read_ids(tmp_path / "gone.json") == {}

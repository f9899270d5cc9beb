"""Where `fit` logs: `metrics.csv` always, and TensorBoard, Weights & Biases and MLflow.

A tracker that fails does not end the run, and does not stall it for long: the failure is one warning, and the tracker
gets nothing until a pause is over. `metrics.csv` has every metric in any case.
"""

import importlib.util
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn

from nestdata import last_error_line, redacted
from nestdata.output import replace_file
from nestmodel.config import TrackerName
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.training.metrics_file import MetricsFile

_PROJECT = "nest-pretrain"
_IDS = "trackers.json"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PAUSE_S = 300.0
"""Seconds after a failure in which a tracker gets nothing."""

_MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""MLflow waits for its server in the training thread: by default up to 120 s, eight times."""


class Tracker(Logger):
    """A logger of Lightning whose errors are warnings.

    Args:
        name: One of `TrackerName`.
        make: Returns the logger. Called by `open`, on rank 0: it may write files.
        is_new: Whether its run begins with this start.
    """

    def __init__(self, name: TrackerName, make: Callable[[], Any], *, is_new: bool = True) -> None:
        super().__init__()
        self.tracker = name
        self.is_new = is_new
        self._make = make
        self._inner: Any = None
        self._paused_until_s = 0.0

    @property
    def name(self) -> str:
        """Name of the tracker."""
        return self.tracker

    @property
    def version(self) -> str:
        """Name of the run in the tracker; empty before it is open."""
        return "" if self._inner is None else str(self._inner.version)

    def open(self, *, must_open: bool) -> None:
        """Starts the run in the tracker, or continues it.

        Args:
            must_open: Whether the run may not start without it. Otherwise, a failure is a warning.

        Raises:
            TrainingError: The tracker cannot be reached, and `must_open` is set.
        """
        try:
            inner = self._make()
            _ = inner.experiment
            self._inner = inner
        except Exception as error:  # of any library
            if not must_open:
                self._warn(error)
                return
            raise TrainingError(
                f"--log {self.tracker}: the run cannot be logged there ({last_error_line(error)}). Check its address "
                "and your login, or leave the tracker out."
            ) from error

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs metrics of a step."""
        self._try(lambda: self._inner.log_metrics(metrics, step=step))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Logs settings."""
        self._try(lambda: self._inner.log_hyperparams(params))

    def save(self) -> None:
        """Writes what is buffered."""
        self._try(lambda: self._inner.save())

    def finalize(self, status: str) -> None:
        """Ends the run in the tracker."""
        self._try(lambda: self._inner.finalize(status))

    def _try(self, call: Callable[[], object]) -> None:
        if self._inner is None or time.monotonic() < self._paused_until_s:
            return
        try:
            call()
        except Exception as error:  # of any library
            if not self._paused_until_s:
                self._warn(error)
            self._paused_until_s = time.monotonic() + _PAUSE_S

    def _warn(self, error: Exception) -> None:
        rank_zero_warn(
            f"{self.tracker} does not take the metrics of this run ({redacted(last_error_line(error))}). "
            "Training continues, and metrics.csv has all of them."
        )


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Checks that the packages of trackers are installed.

    Raises:
        ConfigError: One is not.
    """
    for name in names:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {name} needs a package: pip install 'nest-pretrain[{name}]'.")


def open_loggers(names: Sequence[TrackerName] | None, root: Path, ckpt_path: str | None) -> list[Logger]:
    """Returns the loggers of a run; nothing is written before `Tracker.open`.

    Args:
        names: Given by `--log`; None takes TensorBoard if it is installed.
        root: Output folder of all starts.
        ckpt_path: Checkpoint to resume from. The run in a tracker continues as well if the folder of the checkpoint
            names it.
    """
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    check_trackers(names)
    metrics = MetricsFile(root)
    ids = _read_ids(Path(ckpt_path).resolve().parent.parent / _IDS) if ckpt_path else {}
    # Each name once, in the order of the documentation.
    chosen = [name for name in get_args(TrackerName) if name in names and name != "csv"]
    return [
        metrics,
        *(
            Tracker(name, lambda name=name: _OPEN[name](root, metrics.claim(), ids.get(name)), is_new=name not in ids)  # type: ignore[misc]
            for name in chosen
        ),
    ]


def start_trackers(loggers: Sequence[Logger], settings: Mapping[str, Any], *, must_open: bool) -> None:
    """Starts the run in the trackers, and logs its settings.

    Args:
        loggers: Those of `open_loggers`, on rank 0.
        settings: Configuration of the run.
        must_open: Whether a tracker that cannot be reached is an error. It should be none where other ranks would wait,
            and where a scheduler has started a run again.

    Raises:
        TrainingError: A tracker cannot be reached.
    """
    trackers = [logger for logger in loggers if isinstance(logger, Tracker)]
    if not trackers:
        return
    directory = next(logger for logger in loggers if isinstance(logger, MetricsFile)).claim()
    params = {name: redacted(str(value)) for name, value in _flat(settings).items()}
    for tracker in trackers:
        try:
            tracker.open(must_open=must_open)
        except TrainingError:
            shutil.rmtree(directory, ignore_errors=True)  # this start has made it, and does not begin
            raise
        if tracker.is_new:  # MLflow refuses other values of the same settings
            tracker.log_hyperparams(params)
    if ids := {
        tracker.tracker: tracker.version
        for tracker in trackers
        if tracker.tracker in ("wandb", "mlflow") and tracker.version
    }:
        replace_file(directory / _IDS, (json.dumps(ids) + "\n").encode())


def _flat(value: object, name: str = "") -> dict[str, object]:
    """Returns the values of nested mappings by their dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}" if name else key).items()}


def _read_ids(path: Path) -> dict[str, str]:
    """Returns the names of the runs in trackers, which an earlier start has written."""
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        stored = None
    if not isinstance(stored, dict):
        rank_zero_warn(f"{path}: cannot be read, so that the trackers of this start get new runs.")
        return {}
    return {name: value for name, value in stored.items() if isinstance(value, str) and _ID.fullmatch(value)}


def _tensorboard(root: Path, directory: Path, _run: str | None) -> Any:
    return TensorBoardLogger(root, name="", version=directory.name, sub_dir="tensorboard")


def _wandb(_root: Path, directory: Path, run: str | None) -> Any:
    import wandb
    from pytorch_lightning.loggers import WandbLogger

    # It would record every state of the panel, and wait at the end without a limit for a server that is gone.
    settings = wandb.Settings(console="off", finish_timeout=60.0)
    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    return WandbLogger(project=project, name=_run_name(directory), save_dir=directory, id=run, settings=settings)


def _mlflow(root: Path, directory: Path, run: str | None) -> Any:
    for name, value in _MLFLOW_LIMITS.items():
        os.environ.setdefault(name, value)
    from pytorch_lightning.loggers import MLFlowLogger

    uri = os.environ.get("MLFLOW_TRACKING_URI")
    root = root.resolve()
    if not uri:
        root.mkdir(parents=True, exist_ok=True)
    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT),
        run_name=_run_name(directory),
        tracking_uri=uri or f"sqlite:///{root / 'mlflow.db'}",
        artifact_location=None if uri else (root / "mlflow").as_uri(),
        run_id=run,
    )


def _run_name(directory: Path) -> str:
    """Returns a name that people recognise: the two last parts of the output folder."""
    return "/".join(directory.resolve().parts[-2:])


_OPEN: Mapping[str, Callable[[Path, Path, str | None], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}

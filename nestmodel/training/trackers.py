"""Where `fit` logs besides `metrics.csv`: TensorBoard, Weights & Biases and MLflow, by the loggers of Lightning.

A tracker that fails in a run does not end it, and does not stall it for long: the failure is one warning, and the
tracker gets nothing until a pause is over. `metrics.csv` has every metric in any case.
"""

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn

from nestdata import last_error_line, redacted
from nestdata.output import replace_file
from nestmodel.config import TrackerName
from nestmodel.errors import ConfigError, TrainingError

_PROJECT = "nest-pretrain"
_IDS = "trackers.json"
_PAUSE_S = 300.0
"""Seconds after a failure in which a tracker gets nothing."""

_MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""MLflow waits for its server in the training thread: by default up to 120 s, eight times."""


def tracker_names(given: Sequence[TrackerName]) -> list[TrackerName]:
    """Returns the trackers of a run: the names of `--log` except `csv`; without `--log`, TensorBoard if installed.

    Raises:
        ConfigError: The package of one is not installed.
    """
    if not given:
        return ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    names: list[TrackerName] = [name for name in dict.fromkeys(given) if name != "csv"]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {name} needs a package: pip install 'nest-pretrain[{name}]'.")
    return names


def open_trackers(
    names: Sequence[TrackerName],
    folder: Path,
    settings: Mapping[str, Any],
    ckpt_path: Path | None,
    *,
    must_open: bool,
) -> list[Logger]:
    """Starts the run in each tracker, or continues it, and logs its settings. For rank 0.

    Args:
        names: Result of `tracker_names`.
        folder: Folder of this start, which is removed if the run does not begin.
        settings: Settings of the run, without secrets.
        ckpt_path: Checkpoint to resume from. The run in a tracker continues if the folder of its start names it.
        must_open: Whether a tracker that cannot be reached is an error. Use False where other ranks would wait, and
            where a scheduler has started a run again.

    Raises:
        TrainingError: A tracker cannot be reached.
    """
    before = {} if ckpt_path is None else _read_ids(ckpt_path.resolve().parent.parent / _IDS)
    loggers: list[Logger] = []
    ids: dict[str, str] = {}
    for name in names:
        try:
            logger = _LOGGERS[name](folder, before.get(name))
            _ = logger.experiment
        except Exception as error:  # of any library
            if must_open:
                shutil.rmtree(folder, ignore_errors=True)
                raise TrainingError(
                    f"--log {name}: the run cannot be logged there ({redacted(last_error_line(error))}). Check its "
                    "address and your login, or leave the tracker out."
                ) from error
            _warn(name, error)
            continue
        if name != "tensorboard":
            ids[name] = logger.version
        loggers.append(warns_of_errors(logger, name))
        if name not in before:  # MLflow refuses other values of the same settings
            loggers[-1].log_hyperparams(dict(settings))
    if ids:
        replace_file(folder / _IDS, (json.dumps(ids) + "\n").encode())
    return loggers


def warns_of_errors(logger: Logger, name: str) -> Logger:
    """Turns a logger's errors into one warning; after each error, it gets nothing for a while. Returns the logger."""
    paused_until_s = 0.0

    def guarded(call: Callable[..., object]) -> Callable[..., None]:
        def call_unless_paused(*args: Any, **kwargs: Any) -> None:
            nonlocal paused_until_s
            if time.monotonic() < paused_until_s:
                return
            try:
                call(*args, **kwargs)
            except Exception as error:  # of any library
                if not paused_until_s:
                    _warn(name, error)
                paused_until_s = time.monotonic() + _PAUSE_S

        return call_unless_paused

    for method in ("log_hyperparams", "log_metrics", "save", "finalize"):
        setattr(logger, method, guarded(getattr(logger, method)))
    return logger


def _warn(name: str, error: Exception) -> None:
    rank_zero_warn(
        f"{name} does not take the metrics of this run ({redacted(last_error_line(error))}). "
        "Training continues, and metrics.csv has all of them."
    )


def _read_ids(path: Path) -> dict[str, str]:
    """Returns the names that the run has in trackers, as an earlier start has written them."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _tensorboard(folder: Path, _run: str | None) -> Logger:
    return TensorBoardLogger(folder.parent, name="", version=folder.name, sub_dir="tensorboard")


def _wandb(folder: Path, run: str | None) -> Logger:
    import wandb
    from pytorch_lightning.loggers import WandbLogger

    # It would record every state of the panel, and wait at the end without a limit for a server that is gone.
    settings = wandb.Settings(console="off", finish_timeout=60.0)
    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    return WandbLogger(project=project, name=_run_name(folder), save_dir=folder, id=run, settings=settings)


def _mlflow(folder: Path, run: str | None) -> Logger:
    for name, value in _MLFLOW_LIMITS.items():
        os.environ.setdefault(name, value)
    from pytorch_lightning.loggers import MLFlowLogger

    uri, root = os.environ.get("MLFLOW_TRACKING_URI"), folder.resolve().parent
    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT),
        run_name=_run_name(folder),
        tracking_uri=uri or f"sqlite:///{root / 'mlflow.db'}",
        artifact_location=None if uri else (root / "mlflow").as_uri(),
        run_id=run,
    )


def _run_name(folder: Path) -> str:
    """Returns a name that people recognise: the two last parts of the output folder."""
    return "/".join(folder.resolve().parts[-2:])


_LOGGERS: Mapping[TrackerName, Callable[[Path, str | None], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}

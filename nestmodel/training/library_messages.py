"""Warnings and log records of libraries that a user can do nothing about."""

import logging
import os
import warnings

import nestmodel

_PACKAGE = os.path.join(os.path.dirname(nestmodel.__file__), "")

_NOT_SHOWN = (
    # Lightning causes this one; users cannot avoid it.
    ".*LeafSpec.*is deprecated",
    "Be aware that when using .*ckpt_path",
    # SLURM is installed, and this run is outside it; `check_start` finds a job whose tasks do not fit.
    "The `srun` command is available on your system but is not used",
    # The interval counts steps of the run; Lightning compares it with the steps of an epoch.
    "The number of training batches .* is smaller than the logging interval",
    # metrics.csv needs no other logger.
    ".*tensorboard.*has been removed as a dependency",
)


def silence_libraries() -> None:
    """Filters Lightning's warnings that a user can do nothing about, and its log records below WARNING.

    Log records of `nestmodel`, which uses the same loggers, are shown.
    """
    for message in _NOT_SHOWN:
        warnings.filterwarnings("ignore", message=message)
    for name in ("pytorch_lightning", "lightning_fabric"):
        for handler in logging.getLogger(name).handlers:
            if _is_shown not in handler.filters:
                handler.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.pathname.startswith(_PACKAGE)

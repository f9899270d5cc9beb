"""Names of checkpoints on disk, and how the newest one is found."""

import re
from pathlib import Path
from typing import NamedTuple
from zipfile import is_zipfile

from pytorch_lightning.utilities import rank_zero_warn

LAST = "last.ckpt"
_NAME = re.compile(r"step_(\d+)\.ckpt")


class FoundCheckpoint(NamedTuple):
    """A checkpoint on disk."""

    step: int
    path: Path


def find_checkpoints(directory: Path) -> list[FoundCheckpoint]:
    """Returns the checkpoints in a directory, newest step first."""
    found = [
        FoundCheckpoint(step, path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (step := step_in_name(path)) is not None
    ]
    return sorted(found, reverse=True)


def checkpoint_name(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"step_{step:08d}.ckpt"


def step_in_name(path: Path) -> int | None:
    """Returns the optimizer steps of a checkpoint by its name, or None if the name is not one of `Checkpoints`."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def newest_checkpoint(root: Path) -> Path | None:
    """Returns the most recently written undamaged checkpoint below a directory, or None.

    This is the checkpoint of the latest run that `last.ckpt` links to. It need not be the one with the highest step,
    since a run may be resumed from an earlier step. Damaged checkpoints are skipped with a warning.

    Args:
        root: `trainer.default_root_dir`, which holds `version_N/checkpoints`.
    """
    versions = sorted(root.glob("version_*/checkpoints"), key=_version, reverse=True)
    for directory in [root / "checkpoints", *versions]:
        last = (directory / LAST).resolve().name
        for _, path in sorted(find_checkpoints(directory), key=lambda found: found.path.name != last):
            if is_zipfile(path):
                return path
            rank_zero_warn(f"{path} is damaged and is skipped; the previous checkpoint is used.")
    return None


def _version(directory: Path) -> int:
    number = directory.parent.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1

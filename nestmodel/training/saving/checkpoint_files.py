"""Checkpoints on disk: their names, how one is written, and how the newest one is found."""

import io
import re
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast
from zipfile import is_zipfile

import torch
from pytorch_lightning.utilities import rank_zero_warn

from nestdata.output import replaced_file, unfinished_name

LAST = "last.ckpt"
NAMES = re.compile(r"(?:step_\d+|last|best)\.ckpt|best\.json")
"""Matches the names of the files in a directory of checkpoints."""

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


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint atomically: at any moment the file is either complete or absent.

    Raises:
        OSError: The file could not be written; the partial file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    errors: list[OSError] = []
    try:
        with replaced_file(path) as file:
            torch.save(checkpoint, cast(IO[bytes], _ErrorRecordingFile(file, errors)))
    except RuntimeError as error:
        if errors:  # torch's writer raises it instead of the file's error
            raise errors[0] from error
        raise


def link_last(path: Path) -> None:
    """Links `last.ckpt` beside a checkpoint to it."""
    link = unfinished_name(path.with_name(LAST))
    link.symlink_to(path.name)
    link.replace(path.with_name(LAST))


def newest_checkpoint(root: Path, directory: Path | None = None) -> Path | None:
    """Returns the most recently written undamaged checkpoint below a directory, or None.

    This is the checkpoint of the latest run that `last.ckpt` links to. It need not be the one with the highest step,
    since a run may be resumed from an earlier step. Damaged checkpoints are skipped with a warning.

    Args:
        root: Output folder of the run, which holds `version_N/checkpoints`.
        directory: `checkpoints.directory`, which holds the checkpoints instead.
    """
    versions = sorted(root.glob("version_*/checkpoints"), key=_version, reverse=True)
    for folder in [directory] if directory else [root / "checkpoints", *versions]:
        last = (folder / LAST).resolve().name
        for _, path in sorted(find_checkpoints(folder), key=lambda found: found.path.name != last):
            if is_zipfile(path):
                return path
            rank_zero_warn(f"{path} is damaged and is skipped; the previous checkpoint is used.")
    return None


def _version(directory: Path) -> int:
    number = directory.parent.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


class _ErrorRecordingFile(io.RawIOBase):
    """A writable file that writes all of its data, and appends the errors of its writes to a list."""

    def __init__(self, file: BinaryIO, errors: list[OSError]) -> None:
        self._file = file
        self._errors = errors

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._errors.append(error)
            raise
        return len(data)

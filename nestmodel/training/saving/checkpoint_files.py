"""Checkpoints on disk: their names, how one is written, and how the newest one is found."""

import io
import re
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from pytorch_lightning.utilities import rank_zero_warn

from nestdata.output import replaced_file, unfinished_name, write_all
from nestmodel.errors import WeightsError
from nestmodel.formats.model_file import open_model_file

LAST = "last.ckpt"
UNSOUND = "unsound.json"
"""File with the steps whose weights may be damaged."""

NAMES = re.compile(r"(?:step_\d+|last|best)\.ckpt|best\.json|unsound\.json")
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


def list_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints in a directory: the one that `last.ckpt` links to, then the others, newest step first.

    Where `last.ckpt` was copied as a file, it is a checkpoint like the others, unless it is damaged.
    """
    found, last = find_checkpoints(directory), directory / LAST
    if last.is_symlink():
        target = directory / last.readlink().name
        found.sort(key=lambda each: each.path != target)
    elif last.is_file():
        with suppress(WeightsError), open_model_file(last) as file:
            step = file.entry("global_step")
            newer = sum(each.step >= step for each in found) if isinstance(step, int) else len(found)
            found.insert(newer, FoundCheckpoint(step, last))
    return [path for _, path in found]


def link_last(path: Path) -> None:
    """Links `last.ckpt` beside a checkpoint to it."""
    link = unfinished_name(path.with_name(LAST))
    link.symlink_to(path.name)
    link.replace(path.with_name(LAST))


def checkpoint_folders(root: Path, directory: Path | None = None) -> list[Path]:
    """Returns the folders that may hold checkpoints of a run, the latest start first.

    Args:
        root: Output folder of the run, which holds `version_N/checkpoints`.
        directory: `checkpoints.directory`, which holds the checkpoints instead.
    """
    versions = sorted(root.glob("version_*/checkpoints"), key=_version, reverse=True)
    return [directory] if directory else [root / "checkpoints", *versions, root]


def newest_checkpoint(root: Path, directory: Path | None = None) -> Path | None:
    """Returns the most recently written whole checkpoint of a run, or None if there is no checkpoint.

    This is the checkpoint of the latest start that `last.ckpt` links to. It need not be the one with the highest step,
    since a run may be resumed from an earlier step. All bytes of a checkpoint are checked; damaged ones are skipped
    with a warning.

    Args:
        root: Output folder of the run, which holds `version_N/checkpoints`.
        directory: `checkpoints.directory`, which holds the checkpoints instead.

    Raises:
        WeightsError: There are checkpoints, and all of them are damaged.
    """
    damage = None
    for folder in checkpoint_folders(root, directory):
        for path in list_checkpoints(folder):
            try:
                check_checkpoint(path)
            except WeightsError as error:
                rank_zero_warn(f"{error} It is skipped, and the checkpoint before it is used.")
                damage = damage or error
            else:
                return path
    if damage is not None:
        raise WeightsError(f"{directory or root}: no checkpoint is whole. The newest: {damage}")
    return None


def check_checkpoint(path: Path) -> None:
    """Checks all bytes of a checkpoint, and that a run can be resumed from it.

    Raises:
        WeightsError: The file does not exist, is damaged, is not a checkpoint of `nestmodel fit`, or holds objects that
            could run code.
    """
    with open_model_file(path) as file:
        if file.kind != "checkpoint":
            what = "of nestmodel but one of NeMo" if file.kind == "nemo-checkpoint" else f"but a {file.kind} file"
            raise WeightsError(
                f"{path}: not a checkpoint {what}, from which no run can be resumed. Start a new run "
                "with its weights: --init-from."
            )
        file.read_config()


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
        try:
            write_all(self._file, data)
        except OSError as error:
            self._errors.append(error)
            raise
        return len(data)

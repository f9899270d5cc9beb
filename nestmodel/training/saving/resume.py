"""The checkpoint from which a run resumes: how it is found, what it says about its run, and whether they agree."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nestmodel.errors import ConfigError, WeightsError
from nestmodel.formats.hub import is_on_hub
from nestmodel.formats.model_file import open_model_file
from nestmodel.formats.safetensors import SETTINGS_KEY
from nestmodel.run_config import LAST
from nestmodel.training.ranks import is_first_rank
from nestmodel.training.resume_checks import Settings, check_unchanged
from nestmodel.training.saving.checkpoint_files import (
    check_checkpoint,
    checkpoint_folders,
    list_checkpoints,
    newest_checkpoint,
)


def find_resumed(given: str, root: Path, *, must_exist: bool, directory: Path | None = None) -> Path | None:
    """Returns the checkpoint that `--ckpt-path` names, after a check that a run can be resumed from it.

    Args:
        given: A path; or `LAST` for the newest checkpoint below `root`.
        root: Output folder of the run.
        must_exist: Whether it is an error if there is no newest checkpoint yet. If not, the result is None, so that the
            same command starts and resumes a run.
        directory: `checkpoints.directory`; if given, the checkpoints are there and not below `root`.

    Raises:
        ConfigError: There is no checkpoint, or a run cannot be resumed from it.
        WeightsError: All checkpoints are damaged.
    """
    if is_on_hub(given):
        raise ConfigError(
            f"--ckpt-path {given}: a run resumes from a file. Start a new run with weights of the hub by --init-from."
        )
    path = newest_checkpoint(root, directory) if given == LAST else Path(given)
    others = [other for folder in checkpoint_folders(root, directory) for other in folder.glob("*.ckpt")]
    if path is None and others:
        raise ConfigError(
            f"there is no checkpoint of a run in {directory or root}, but {others[0]} is there. To go on from that "
            "file, give it by --ckpt-path."
        )
    if path is None:
        if not must_exist:
            if is_first_rank():
                print(f"no checkpoint in {directory or root}: starting at step 0", file=sys.stderr)  # noqa: T201
            return None
        setting = "checkpoints.directory" if directory else "--output"
        raise ConfigError(
            f"there is no checkpoint in {directory or root}. Check {setting}, or give a file by --ckpt-path; a new run "
            "needs neither --resume nor --ckpt-path."
        )
    try:
        check_checkpoint(path)
    except WeightsError as error:
        raise ConfigError(f"--ckpt-path {error}") from error
    return path


class StoredRun(NamedTuple):
    """What a checkpoint says about its run."""

    step: int
    """Optimizer steps that it has made."""

    settings: Settings | None
    """None for the checkpoint of a network that was saved without a run."""


def read_run(path: Path) -> StoredRun:
    """Returns what a checkpoint says about its run.

    Raises:
        WeightsError: The file cannot be read, or its step or settings are damaged.
    """
    with open_model_file(path) as file:
        step, settings = file.entry("global_step"), file.entry(SETTINGS_KEY)
    is_text = settings is None or (
        isinstance(settings, dict) and all(isinstance(text, str) for item in settings.items() for text in item)
    )
    if not isinstance(step, int) or step < 0 or not is_text:
        raise WeightsError(f"{path}: its global_step or {SETTINGS_KEY} is damaged. Use another checkpoint.")
    return StoredRun(step, settings)


def check_resumes(path: Path, settings: Settings, folders: Sequence[Path]) -> None:
    """Checks that a run has the settings of the checkpoint that it is resumed from.

    Args:
        path: The checkpoint.
        settings: Settings of the run.
        folders: Folders with other checkpoints of the run.

    Raises:
        ConfigError: Some settings differ; the message also names the newest checkpoint in `folders` with the settings
            of the run.
        WeightsError: The checkpoint cannot be read.
    """
    stored = read_run(path)
    if stored.settings is None:
        return
    try:
        check_unchanged(stored.settings, settings, step=stored.step, path=path)
    except ConfigError as error:
        if (other := _with_settings(settings, folders)) is None:
            raise
        raise ConfigError(
            f"{error} The run of {other} had the settings of this one: to go on from there, add --ckpt-path {other}"
        ) from error


def _with_settings(settings: Settings, folders: Sequence[Path]) -> Path | None:
    """Returns the newest checkpoint in some folders whose run had given settings. Only the first rank looks for it."""
    for path in (path for folder in folders if is_first_rank() for path in list_checkpoints(folder)[:1]):
        with suppress(WeightsError):
            if read_run(path).settings == settings:
                return path
    return None

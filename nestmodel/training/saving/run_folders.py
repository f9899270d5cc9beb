"""The folders of a start: `version_N` belongs to one start, and a folder of checkpoints to one run.

`--resume` makes a new `version_N` beside the previous one. A folder of checkpoints that several starts share
(`checkpoints.directory`) is used by one of them at a time, and by no other run.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import yaml
from pytorch_lightning.utilities import rank_zero_info

from nestdata import OutputError
from nestdata.output import check_writable, locked_file
from nestmodel.config_files import read_yaml
from nestmodel.errors import ConfigError
from nestmodel.training.ranks import is_first_rank, is_started_by_lightning, launch_id
from nestmodel.training.saving.checkpoint_files import NAMES, checkpoint_folders, list_checkpoints, step_in_name

LOCK = ".lock"
_WAIT_S = 120.0
"""Seconds to wait for the lock of an earlier start: its job may be ending, or a file server may still hold the lock of
a node that has failed."""

_POLL_S = 1.0


def check_checkpoint_folder(directory: Path | None, ckpt_path: Path | None) -> None:
    """Checks that a folder of checkpoints belongs to this run.

    Args:
        directory: `checkpoints.directory`. Without one, each start has a folder of its own.
        ckpt_path: Checkpoint that the run resumes from.

    Raises:
        ConfigError: It has checkpoints of another run, which this one would replace.
    """
    folder = directory.iterdir() if directory is not None and directory.is_dir() else ()
    found = sorted(path for path in folder if NAMES.fullmatch(path.name))
    is_own = ckpt_path is not None and directory is not None and ckpt_path.resolve().parent == directory.resolve()
    if found and not is_own:
        raise ConfigError(
            f"checkpoints.directory {directory}: has checkpoints of another run, such as {found[0].name}, which this "
            "run would replace. Go on from them by --resume, or give another directory."
        )


@contextmanager
def only_start(directory: Path | None) -> Iterator[None]:
    """Locks a folder of checkpoints against other starts during the block; waits a while for one that is using it.

    The first rank holds the lock. The others wait until it does, so that all of them find the same checkpoint.

    Args:
        directory: `checkpoints.directory`. Without one, each start has a folder of its own.

    Raises:
        OutputError: Another start still uses it, or it cannot be written.
    """
    with ExitStack() as stack:
        if directory is not None and not is_first_rank():
            if not is_started_by_lightning():  # by the first rank, which has the lock
                _wait_for_first_rank(directory / LOCK)
        elif directory is not None:
            check_writable(directory)
            end, has_said = time.monotonic() + _WAIT_S, False
            while True:
                try:
                    stack.enter_context(locked_file(directory / LOCK, directory))
                    break
                except OutputError:
                    if time.monotonic() > end:
                        raise
                if not has_said:
                    rank_zero_info(f"another run is writing to {directory}: waiting for up to {_WAIT_S:.0f} s")
                    has_said = True
                time.sleep(_POLL_S)
            (directory / LOCK).write_text(launch_id(), encoding="utf-8")
        yield


def _wait_for_first_rank(lock: Path) -> None:
    end = time.monotonic() + _WAIT_S + 2 * _POLL_S
    while time.monotonic() < end:
        with suppress(OSError, UnicodeError):
            if lock.read_text(encoding="utf-8") == launch_id():
                return
        time.sleep(_POLL_S)


def unfinished_run(root: Path) -> str | None:
    """Returns where the latest start in an output folder has stopped, as text; None if no start stopped early."""
    for folder in checkpoint_folders(root):
        for path in list_checkpoints(folder):
            step, num_steps = step_in_name(path), _num_steps(folder.parent / "config.yaml")
            return f"{folder.parent} stopped at step {step:,} of {num_steps:,}" if step and step < num_steps else None
    return None


def _num_steps(path: Path) -> int:
    """Returns `trainer.max_steps` of a `config.yaml`; 0 if it cannot be read."""
    try:
        return int(read_yaml(path.read_text(encoding="utf-8"))["trainer"]["max_steps"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return 0

"""`best.ckpt`: the checkpoint with the best value of a metric so far, over all starts of a run.

`best.json` beside it holds metric, step and value, from which a resumed run goes on. It is written first, and then
`best.ckpt`: a start that finds them apart, after a kill in between, repeats the second.
"""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.utilities import rank_zero_warn

from nestdata.output import flush_to_disk, output_file
from nestmodel.training.saving.checkpoint_files import checkpoint_name

BEST = "best.ckpt"
_RECORD = "best.json"

Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Best:
    """Content of `best.json`."""

    monitor: str
    mode: Mode
    step: int
    value: float


class BestCheckpoint:
    """Keeps the best of the checkpoints that are offered to it; of equal ones, the first. Used on rank 0 only.

    Args:
        monitor: Name of the metric.
        mode: Whether small or large values are better.
    """

    def __init__(self, monitor: str, mode: Mode) -> None:
        self._monitor = monitor
        self._mode: Mode = mode
        self._best: _Best | None = None

    def resume(self, before: Path, directory: Path, step: int) -> None:
        """Goes on from the best checkpoint of an earlier start, and makes it that of this start.

        Nothing is taken from a record of another metric, or of a step after the one that is resumed: it belongs to
        steps that are made again.

        Args:
            before: Directory of the checkpoint from which the run resumes.
            directory: Directory of this start.
            step: First optimizer step of this start.

        Raises:
            OSError: The files cannot be written.
        """
        best = self._read(before / _RECORD)
        if best is None or best.step > step:
            return
        sources = [before / checkpoint_name(best.step), before / BEST]
        source = next((path for path in sources if path.exists()), None)
        if source is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._keep(source, directory, best)

    def offer(self, path: Path, directory: Path, step: int, value: float) -> None:
        """Keeps the checkpoint of a step if its value is better than all before.

        Args:
            path: The checkpoint.
            directory: Directory of this start.
            step: Its step.
            value: Its value of the metric; one that is not finite is never better.

        Raises:
            OSError: The files cannot be written.
        """
        if not math.isfinite(value) or (self._best is not None and not self._is_better(value, self._best.value)):
            return
        self._keep(path, directory, _Best(monitor=self._monitor, mode=self._mode, step=step, value=value))

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self._mode == "min" else value > other

    def _keep(self, source: Path, directory: Path, best: _Best) -> None:
        self._write(directory, best)
        try:
            _link(source, directory / BEST)
        except OSError:
            if self._best is not None:
                self._write(directory, self._best)
            raise
        self._best = best

    def _write(self, directory: Path, best: _Best) -> None:
        with output_file(directory / _RECORD, overwrite=True) as partial:
            partial.write_text(json.dumps(asdict(best)) + "\n")

    def _read(self, path: Path) -> _Best | None:
        try:
            stored: Any = json.loads(path.read_text(encoding="utf-8"))
            best = _Best(**{**stored, "step": int(stored["step"]), "value": float(stored["value"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            rank_zero_warn(f"{path}: cannot be read, so that the best checkpoint is sought anew from here.")
            return None
        is_same = (best.monitor, best.mode) == (self._monitor, self._mode)
        return best if is_same and math.isfinite(best.value) else None


def _link(source: Path, target: Path) -> None:
    """Makes a file available under a second name; removing the first one does not remove the second."""
    if target.exists() and target.samefile(source):
        return
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # some file systems have no hard links
        try:
            shutil.copyfile(source, partial)
            flush_to_disk(partial)
        except OSError:
            partial.unlink(missing_ok=True)  # it would fill the disk
            raise
    partial.replace(target)
    flush_to_disk(target.parent)

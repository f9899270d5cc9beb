"""`best.ckpt`: the checkpoint with the lowest validation loss so far, over all starts of a run.

`best.json` beside it holds step and loss, from which a resumed run goes on. It is written before `best.ckpt`. If a
kill in between leaves only the first of them new, the next start writes `best.ckpt` again.
"""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from nestdata.output import flush_to_disk, replace_file, unfinished_name
from nestmodel.training.saving.checkpoint_files import checkpoint_name

BEST = "best.ckpt"
_RECORD = "best.json"


class BestCheckpoint:
    """Keeps the best of the checkpoints that are offered to it; of equal ones, the first. Used on rank 0 only."""

    def __init__(self) -> None:
        self._step, self._loss = 0, math.inf

    def resume(self, before: Path, directory: Path, step: int) -> None:
        """Takes the best checkpoint of an earlier start as the best checkpoint of this start so far.

        A record of a step after the resumed one is ignored, because that step will be made again.

        Args:
            before: Directory of the checkpoint from which the run resumes.
            directory: Directory of this start.
            step: First optimizer step of this start.

        Raises:
            OSError: The files cannot be written.
        """
        try:
            stored: Any = json.loads((before / _RECORD).read_text(encoding="utf-8"))
            best_step, loss = int(stored["step"]), float(stored["val_loss"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError):
            rank_zero_warn(f"{before / _RECORD}: cannot be read, so that the best checkpoint is sought anew from here.")
            return
        sources = [before / checkpoint_name(best_step), before / BEST]
        source = next((path for path in sources if path.exists()), None)
        if source is not None and best_step <= step:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                self.offer(source, directory, best_step, loss)
            finally:
                self._step, self._loss = best_step, loss  # a worse one must not replace it, whatever has failed here

    def offer(self, path: Path, directory: Path, step: int, loss: float) -> None:
        """Keeps the checkpoint of a step if its loss is lower than all before.

        Args:
            path: The checkpoint.
            directory: Directory of this start.
            step: Its step.
            loss: Its validation loss; one that is not finite is never kept.

        Raises:
            OSError: The files cannot be written.
        """
        if math.isfinite(loss) and loss < self._loss:
            _record(directory, step, loss)
            try:
                _link(path, directory / BEST)
            except OSError:
                if self._step:
                    _record(directory, self._step, self._loss)
                raise
            self._step, self._loss = step, loss


def _record(directory: Path, step: int, loss: float) -> None:
    replace_file(directory / _RECORD, (json.dumps({"step": step, "val_loss": loss}) + "\n").encode())


def _link(source: Path, target: Path) -> None:
    """Makes a file available under a second name; removing the first one does not remove the second."""
    if target.exists() and target.samefile(source):
        return
    partial = unfinished_name(target)
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

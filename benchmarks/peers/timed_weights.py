"""A callback for both sides of time_to_loss.py: saves weights at fixed intervals of time, with the time of each.

Needs torch and one of the two names of Lightning.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch

try:  # NeMo 3.0.0 trains with this name, and accepts only its callbacks
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class TimedWeights(Callback):  # type: ignore[misc]  # one of two classes
    """Writes `step_N.pt` with the weights every `interval_s` seconds, and one line per file to `saved.jsonl`.

    A line contains the number of optimizer steps, the Unix time when the step ended, the seconds of audio that rank 0
    has trained on, the seconds of audio that it has encoded, the seconds that all files so far took to write, and the
    CPU time of rank 0 without its loader processes, which helps on a busy machine. The first line is for the first
    step.

    Args:
        directory: Where files are written.
        interval_s: Seconds between two files.
    """

    def __init__(self, directory: str, interval_s: float) -> None:
        super().__init__()
        self.directory = Path(directory)
        self.interval_s = interval_s
        self._saved_at = 0.0
        self._saved_step = 0
        self._audio_s = 0.0
        self._encoded_s = 0.0
        self._saving_s = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Writes the weights if a step has ended and the interval has passed."""
        self._audio_s += float(batch.audio_len.sum()) / 16000
        # NeMo's noisy audio, which is encoded, may be shorter.
        self._encoded_s += float(getattr(batch, "noisy_audio_len", batch.audio_len).sum()) / 16000
        is_new = trainer.global_step > self._saved_step
        if trainer.global_rank == 0 and is_new and time.time() - self._saved_at >= self.interval_s:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes the last weights."""
        if trainer.global_rank == 0 and trainer.global_step > self._saved_step:
            self._save(trainer, pl_module)

    def _save(self, trainer: Any, module: Any) -> None:
        started = time.time()
        line = {"step": trainer.global_step, "time": started, "audio_s": self._audio_s}
        line |= {"encoded_s": self._encoded_s, "saving_s": self._saving_s, "cpu_s": time.process_time()}
        self.directory.mkdir(parents=True, exist_ok=True)
        torch.save(module.state_dict(), self.directory / f"step_{trainer.global_step}.pt")
        with (self.directory / "saved.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._saved_at, self._saved_step = time.time(), trainer.global_step
        self._saving_s += self._saved_at - started

"""Scores a checkpoint without labels in a process of its own, while the run goes on.

A process keeps the random state, the threads and the memory of training as they are. It yields the CPU to
training, never touches a GPU, and does not receive Ctrl-C.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import nestguard
from nestdata import Corpus, NestError, last_error_line
from nestmodel.attention_context import context_name
from nestmodel.errors import TrainingError
from nestmodel.evaluate.feature_scores import FeatureScoreConfig, score_features
from nestmodel.formats.weights import load_network

_NICE = 10
_ORPHAN_POLL_S = 1.0
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreJob:
    """What is scored, and on which audio."""

    checkpoint: str
    corpus: str
    noise: str | None
    """None takes white noise."""

    num_threads: int
    config: FeatureScoreConfig


class ScoreProcess:
    """Starts a process that scores a checkpoint.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, job: ScoreJob) -> None:
        # The rank may have found this package in the folder of its script, which is not on the sys.path of the process.
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": str(job.num_threads),
            "CUDA_VISIBLE_DEVICES": "",
        }
        # Files, since nobody reads a pipe while the process runs.
        self._output = tempfile.TemporaryFile("w+")
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(asdict(job)), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
            env=environment,
        )

    def has_ended(self) -> bool:
        """Returns whether the scores are there, or the process has failed."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Waits until the process has ended, for a number of seconds at most; returns whether it has."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def scores(self) -> dict[str, float]:
        """Waits for the process and returns its scores by name.

        Raises:
            TrainingError: The process has failed.
        """
        code = self._process.wait()
        self._output.seek(0)
        self._errors.seek(0)
        output, errors = self._output.read(), self._errors.read()
        self._close()
        lines = errors.strip().splitlines()
        if code < 0 or (code and not lines):  # the last line of a process that was killed is a warning, if anything
            raise TrainingError(f"the process {nestguard.describe_exit(code)}")
        if code:
            raise TrainingError(lines[-1])
        found: dict[str, float] = json.loads(output)
        return found

    def kill(self) -> None:
        """Ends the process at once, and the commands that it runs for a corpus."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process that reads from a server that is gone ends only when the server is back.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)
        self._close()

    def _close(self) -> None:
        self._output.close()
        self._errors.close()


def _end_with(parent: int) -> None:
    """Ends this process soon after the one that started it, however that one ended."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL_S)
    os._exit(1)


def score_checkpoint(job: ScoreJob) -> dict[str, float]:
    """Returns the scores of a checkpoint by name, in each of its attention contexts; see `score_names`."""
    corpus = Corpus.open(job.corpus)
    noise = None if job.noise is None else Corpus.open(job.noise)
    network = load_network(job.checkpoint)
    scores = score_features(network, corpus, noise, job.config)
    for context in network.config.encoder.att_context_size[1:]:
        of_context = score_features(network, corpus, noise, job.config, context)
        scores |= {f"{name}_{context_name(context)}": score for name, score in of_context.items()}
    return scores


def main() -> int:
    """Scores a checkpoint and prints the scores as JSON. Arguments: a `ScoreJob` as JSON, and the pid of the parent."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    job = ScoreJob(**{**fields, "config": FeatureScoreConfig(**fields["config"])})
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    os.nice(_NICE)
    torch.set_num_threads(job.num_threads)
    try:
        scores = score_checkpoint(job)
    except NestError as error:
        sys.stderr.write(f"{last_error_line(error)}\n")
        return 1
    sys.stdout.write(json.dumps(scores) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Part `nemo`: NeMo's training step beside ours, on the same device and audio, in the order A B B A.

NeMo runs in a process of its own, with packages that this one does not have. Both processes hold their model on the
device, and take turns through a pipe.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import Results
from benchmarks.gpu.trial import KERNELS, Trial, batch_of, config_of, cuts_of, free
from benchmarks.gpu.wheels import install_wheels
from benchmarks.peers.nemo_model import PRESETS

PEER = Path(__file__).parents[1] / "peers" / "nemo_steps.py"
TINY = {"d_model": 16, "n_heads": 2, "n_layers": 2, "channels": 8, "num_classes": 32}


def measure_nemo(results: Results, device: torch.device, preset: str, wheels: Path) -> None:
    """Adds a row: our fastest backend beside NeMo with fused attention, which is not its default, but its fastest."""
    where = {"part": "nemo", "preset": preset}
    backend = fastest_backend(results, preset)
    with tempfile.TemporaryDirectory() as folder, results.attempt(**where):
        install_wheels(wheels, folder)
        with _nemo(device, Path(folder)) as ask:
            results.put(**where, backend=backend, **_in_turns(ask, device, preset, backend))


def fastest_backend(results: Results, preset: str) -> str:
    """Returns the fastest backend that was timed and is not wrong; by default that of kernels."""
    rows = [row for row in results.rows() if row.get("preset") == preset]
    wrong = {row["backend"] for row in rows if row.get("is_right") is False}
    times = {row["backend"]: row["ms"] for row in rows if row.get("part") == "steps" and "ms" in row}
    right = [backend for backend in times if backend not in wrong]
    return min(right, key=lambda backend: times[backend], default=KERNELS)


@contextmanager
def _nemo(device: torch.device, packages: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts NeMo's process, with a folder of packages first in its path, and yields a function that sends requests."""
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [sys.executable, str(PEER), device.type], {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(**request: Any) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"NeMo's process ended with exit code {process.wait()}; its errors are in the log")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("out_of_memory"):
            raise MemoryError("NeMo's model does not fit beside ours")
        return answer

    with process:
        try:
            yield ask
        finally:
            process.kill()


def _in_turns(ask: Callable[..., dict[str, Any]], device: torch.device, preset: str, backend: str) -> dict[str, Any]:
    """Returns our times, with NeMo's from the same minute."""
    is_cuda, num_cuts = device.type == "cuda", cuts_of(preset, device)
    number = 4 if is_cuda else 1
    trial, batch = Trial(config_of(preset, device), device), batch_of(num_cuts, device)
    with tempfile.TemporaryDirectory() as folder:
        audio = Path(folder) / "audio.pt"
        inputs = trial.model.training_input(batch)
        torch.save([inputs.audio.cpu(), inputs.noisy_audio.cpu(), inputs.audio_len.cpu()], audio)
        del inputs
        encoder = {"use_pytorch_sdpa": True}
        ask(do="build", section=PRESETS[preset] if is_cuda else TINY, encoder=encoder, audio=str(audio))
    ours = _times(trial, backend, batch, number)
    theirs = [ask(do="steps", warm_up=1, number=number) for _ in range(2)]
    ours += _times(trial, backend, batch, number)
    nemo_ms = [each for answer in theirs for each in answer["step_ms"]]
    return {
        "cuts": num_cuts,
        "ms": statistics.median(ours),
        "nemo_ms": statistics.median(nemo_ms),
        "nemo_over_ours": statistics.median(nemo_ms) / statistics.median(ours),
        "spread": max(max(each) / min(each) - 1 for each in (ours, nemo_ms)),
    }


def _times(trial: Trial, backend: str, batch: Any, number: int) -> list[float]:
    """Returns the milliseconds of steps of one microbatch, after one that warms up."""
    trial.use(backend)
    found = []
    for _ in range(1 + number):
        trial.wait()
        started = time.perf_counter()
        trial.step(batch)
        trial.wait()
        found.append(1000 * (time.perf_counter() - started))
    trial.reset()
    free(trial.device)
    return found[1:]

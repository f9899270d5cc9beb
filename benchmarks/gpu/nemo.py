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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.forms import PLAIN
from benchmarks.gpu.results import Results
from benchmarks.gpu.trial import RATE, Trial, batch_of, config_of, cuts_of, free
from benchmarks.peers.nemo_model import PRESETS

PEER = Path(__file__).parents[1] / "peers" / "nemo_steps.py"
ATTENTION: dict[str, dict[str, Any]] = {"fused": {"use_pytorch_sdpa": True}, "default": {}}
"""Settings of NeMo's encoder by the kind of its attention."""

TINY = {"d_model": 16, "n_heads": 2, "n_layers": 2, "channels": 8, "num_classes": 32}


class NemoProcess:
    """Asks the process of `benchmarks/peers/nemo_steps.py`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
            MemoryError: The GPU has too little memory for NeMo.
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"NeMo's process ended with exit code {code}; its errors are in the log")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("out_of_memory"):
            raise MemoryError("NeMo's model does not fit beside ours")
        return answer


def measure_nemo(results: Results, device: torch.device, preset: str, wheels: Path) -> None:
    """Adds a row for each kind of NeMo's attention and form of ours: plain, and the fastest one."""
    kinds = [kind for kind in ATTENTION if not results.has(part="nemo", preset=preset, attention=kind)]
    forms = list(dict.fromkeys((PLAIN, fastest_form(results, preset))))
    with tempfile.TemporaryDirectory() as folder:
        install_wheels(wheels, Path(folder))
        for kind in kinds:
            where = {"part": "nemo", "preset": preset, "attention": kind}
            with results.attempt(**where), _nemo(device, Path(folder)) as nemo:
                for row in _halved_until_it_fits(nemo, device, preset, kind, forms):
                    results.put(**where, **row)


def install_wheels(wheels: Path, target: Path) -> None:
    """Installs all wheels of a folder into another folder, without their dependencies and without a network.

    Raises:
        RuntimeError: The wheels are not for this version of Python or this machine.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*command, "--target", str(target), *map(str, sorted(wheels.glob("*.whl")))], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{wheels}: cannot be installed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")


def fastest_form(results: Results, preset: str) -> str:
    """Returns the fastest form that was timed and is not wrong; by default the plain one."""
    wrong = {row["form"] for row in results.rows() if row.get("preset") == preset and row.get("is_right") is False}
    times = {
        row["form"]: row["ms"]
        for row in results.rows()
        if row.get("part") == "steps" and row["preset"] == preset and "ms" in row
    }
    return min((form for form in times if form not in wrong), key=lambda form: times[form], default=PLAIN)


@contextmanager
def _nemo(device: torch.device, packages: Path) -> Iterator[NemoProcess]:
    """Starts NeMo's process with a folder of packages before those of this machine."""
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, PEER, device.type],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield NemoProcess(process)
        finally:
            process.kill()


def _halved_until_it_fits(
    nemo: NemoProcess, device: torch.device, preset: str, kind: str, forms: list[str]
) -> list[dict[str, Any]]:
    num_cuts = cuts_of(preset, device)
    while True:
        try:
            return _in_turns(nemo, device, preset, kind, forms, num_cuts)
        except (MemoryError, torch.OutOfMemoryError):
            if num_cuts == 1:
                raise
        # After the handler, which keeps the tensors of its frames alive.
        free(device)
        num_cuts //= 2


def _in_turns(
    nemo: NemoProcess, device: torch.device, preset: str, kind: str, forms: list[str], num_cuts: int
) -> list[dict[str, Any]]:
    """Returns a row for each of our forms, with NeMo's times from the same minute."""
    is_cuda = device.type == "cuda"
    number = 4 if is_cuda else 1
    trial, batch = Trial(config_of(preset, device), device), batch_of(num_cuts, device)
    with tempfile.TemporaryDirectory() as folder:
        audio = Path(folder) / "audio.pt"
        inputs = trial.model.training_input(batch)
        torch.save([inputs.audio.cpu(), inputs.noisy_audio.cpu(), inputs.audio_len.cpu()], audio)
        del inputs
        nemo.ask(do="build", section=PRESETS[preset] if is_cuda else TINY, encoder=ATTENTION[kind], audio=str(audio))
    ours: dict[str, list[float]] = {form: [] for form in forms}
    theirs: list[dict[str, Any]] = []
    for turn in [*forms, None, None, *reversed(forms)]:
        if turn is None:
            theirs.append(nemo.ask(do="steps", warm_up=1, number=number))
        else:
            ours[turn] += _times(trial, turn, batch, number)
    nemo_ms = [each for answer in theirs for each in answer["step_ms"]]
    seconds = num_cuts * batch.audio.shape[1] / RATE
    return [
        {
            "form": form,
            "cuts": num_cuts,
            "ms": statistics.median(ms),
            "nemo_ms": statistics.median(nemo_ms),
            "nemo_over_ours": statistics.median(nemo_ms) / statistics.median(ms),
            "spread": max(max(each) / min(each) - 1 for each in (ms, nemo_ms)),
            "audio_s_per_s": 1000 * seconds / statistics.median(ms),
            "nemo_audio_s_per_s": 1000 * seconds / statistics.median(nemo_ms),
            "nemo_gb": max(answer["peak_gb"] for answer in theirs),
            "nemo_loss": theirs[-1]["loss"],
        }
        for form, ms in ours.items()
    ]


def _times(trial: Trial, form: str, batch: Any, number: int) -> list[float]:
    """Returns the milliseconds of steps of one microbatch, after one that warms up."""
    trial.use(form)
    trial.step(batch)
    found = []
    for _ in range(number):
        trial.wait()
        started = time.perf_counter()
        trial.step(batch)
        trial.wait()
        found.append(1000 * (time.perf_counter() - started))
    trial.reset()
    free(trial.device)
    return found

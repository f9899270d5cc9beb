"""Section `nemo`: NeMo's training step beside ours, on the same device and audio, in the order A B B A.

NeMo runs in a process of its own, with packages that this one does not have. Both processes hold their model on the
device, and take turns through a pipe.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.forms import FORMS, Case, Trial, best_form, case_of, fitting
from benchmarks.gpu.measuring import median, spread
from benchmarks.gpu.report import Row, Section
from nestmodel.preflight.measure.memory import PeakMemory
from nestmodel.preflight.measure.trial_step import noise_batch

_ANSWER_S = 300.0
"""Seconds after which NeMo's process is ended if it has not answered."""

PEER = Path(__file__).parents[1] / "peers" / "nemo_turns.py"
ATTENTION: dict[str, dict[str, Any]] = {"default attention": {}, "fused attention": {"use_pytorch_sdpa": True}}
"""Settings of NeMo's encoder, by the names in the rows."""


class Compared(NamedTuple):
    """A model beside NeMo's with one of its settings."""

    case: Case
    attention: str

    @property
    def row(self) -> str:
        """Name of the row."""
        return f"{self.case.model}, {self.case.audio}, NeMo with {self.attention}"


class NemoProcess:
    """Asks the process of `benchmarks/peers/nemo_turns.py`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process, self._errors = process, [""]
        Thread(target=self._read_errors, daemon=True).start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
            MemoryError: The GPU has too little memory for NeMo.
            RuntimeError: The process has ended, or was ended because it did not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            timer = Timer(_ANSWER_S, self._process.kill)
            timer.start()
            line = self._process.stdout.readline()
            timer.cancel()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"NeMo's process ended with exit code {code}: {self._errors[0]}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("out_of_memory"):
            raise MemoryError("NeMo's model does not fit beside ours")
        return answer

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors[0] = line.strip() or self._errors[0]


def measure_nemo(context: Context, section: Section) -> None:
    """Adds a row for each compared model and setting of NeMo's attention."""
    if context.nemo_wheels is None or context.world_size > 1:
        section.notes.append(
            "Not measured: give --nemo-wheels, a folder made by benchmarks/nemo_wheels.py."
            if context.nemo_wheels is None
            else "Not measured: start without torchrun, because one process of NeMo takes turns with one rank."
        )
        section.is_cut = True
        return
    seconds = context.extent.cut_seconds[0]
    forms = {model: best_form(context, model) for model in context.extent.compared}
    cases = [
        Compared(case_of(context, model, seconds, forms[model]), attention)
        for attention in ATTENTION
        for model in reversed(context.extent.compared)
    ]
    section.notes.append(
        "Both sides: fused AdamW, bf16-mixed on a GPU, audio from page-locked memory. `spread` is the larger one of "
        "both sides. NeMo draws masks on the device, and starts each step without gradients; this project adds to them."
    )
    if all(section.has(each.row) for each in cases):
        return
    with nemo_process(context, install(context.nemo_wheels, context.directory / "nemo")) as nemo:
        for each in context.pending(section, cases, lambda each: each.row):
            section.add(*fitting(context, each.case, partial(_in_turns, nemo=nemo, attention=each.attention)))


def install(wheels: Path, target: Path) -> Path:
    """Installs all wheels of a folder into another folder, without their dependencies and without a network.

    Raises:
        RuntimeError: The wheels are not for this version of Python or this machine.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--target", str(target), *map(str, sorted(wheels.glob("*.whl")))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{wheels}: cannot be installed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return target


@contextmanager
def nemo_process(context: Context, packages: Path) -> Iterator[NemoProcess]:
    """Starts NeMo's process with a folder of packages before those of this machine."""
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, PEER, context.device.type],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    with process:
        try:
            yield NemoProcess(process)
        finally:
            process.kill()


def _in_turns(context: Context, case: Case, *, nemo: NemoProcess, attention: str) -> Row:
    batch, number = noise_batch(case.shape), max(1, context.extent.num_steps // 2)
    audio = context.directory / "audio.pt"
    torch.save([batch.audio, batch.noisy_audio, batch.audio_len], audio)
    memory = PeakMemory(context.device)
    trial = Trial(context, context.extent.models[case.model], FORMS[case.form])
    trial.warm_up(batch)
    size = context.extent.compared[case.model]
    context.free_memory()
    nemo.ask(do="build", section=size, encoder=ATTENTION[attention], audio=str(audio))
    nemo.ask(do="steps", warm_up=1, number=1)
    ours, theirs = [], []
    for is_ours in (True, False, False, True):
        if is_ours:
            trial(batch)
            ours += [trial(batch) for _ in range(number)]
            context.free_memory()
        else:
            theirs.append(nemo.ask(do="steps", warm_up=1, number=number))
    nemo_ms = [each for answer in theirs for each in answer["step_ms"]]
    our_ms = [sample.step_ms for sample in ours]
    return {
        "row": f"{case.model}, {case.audio}, NeMo with {attention}",
        "result": "measured",
        "form": case.form,
        "ours, ms": median(our_ms),
        "NeMo, ms": median(nemo_ms),
        "NeMo / ours": median(nemo_ms) / median(our_ms),
        "spread": max(spread(our_ms), spread(nemo_ms)),
        "ours, audio-s/s": 1000 * case.audio_seconds / median(our_ms),
        "NeMo, audio-s/s": 1000 * case.audio_seconds / median(nemo_ms),
        "host of ours, ms": median(sample.host_ms for sample in ours),
        "host of NeMo, ms": median(each for answer in theirs for each in answer["host_ms"]),
        "ours, GB": memory.peak_bytes() / 1e9,
        "NeMo, GB": max(answer["peak_gb"] for answer in theirs),
        "loss of NeMo": theirs[-1]["loss"],
    }

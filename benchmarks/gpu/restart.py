"""Part `restart`: seconds from SIGKILL of `nestmodel fit` to its next step, with and without code compiled before.

By default, nothing is compiled for a CPU. There, this module runs as a program: `nestmodel` with compiled code.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.results import Results
from benchmarks.harness.repository import REPOSITORY
from cli import nestdata, nestmodel
from nestmodel.nn.backend import Backend
from nestmodel.training import module

NUM_STEPS = 5
"""Steps of the first start, which writes compiled code after steps 1, 2 and 4, and a checkpoint after step 4."""


def measure_restart(results: Results, device: torch.device, preset: str) -> None:
    """Adds a row for each cache that a killed run may find; on a CPU, the preset is `demo`."""
    preset = preset if device.type == "cuda" else "demo"
    folder = results.folder / "restart"
    shutil.rmtree(folder, ignore_errors=True)
    nestdata.main(["prepare", str(REPOSITORY / "manifests/demo/speech.json"), "-o", str(folder / "speech.corpus")])
    process, path = _start(folder, preset, "first", 0)
    _wait(process, path, NUM_STEPS)
    caches = {"code of the run": "second", "caches of the machine": "first", "none": "third"}
    for number, (name, machine) in enumerate(caches.items(), 1):
        if name == "none":
            shutil.rmtree(folder / "run" / "compiled")
        killed_s = time.perf_counter()
        os.killpg(process.pid, signal.SIGKILL)
        process, path = _start(folder, preset, machine, number)
        _wait(process, path, 1)
        results.put(part="restart", preset=preset, caches=name, seconds=time.perf_counter() - killed_s)
    os.killpg(process.pid, signal.SIGKILL)


def _start(folder: Path, preset: str, machine: str, number: int) -> tuple["subprocess.Popen[bytes]", Path]:
    """Starts the run or resumes it, with the caches of a machine; returns its process and its `metrics.csv`."""
    caches = {f"{name}_CACHE_DIR": str(folder / machine / name) for name in ("TORCHINDUCTOR", "TRITON")}
    options = "--log-every-n-steps 1 --checkpoints.every-n-steps 4 --max-batch-seconds 40 --microbatches-per-step 1"
    fit = f"fit {folder}/speech.corpus --config {preset} -o {folder}/run --ckpt-path last {options}"
    command = [sys.executable, "-m", "benchmarks.gpu.restart", *fit.split()]
    process = subprocess.Popen(command, env=os.environ | caches, start_new_session=True)
    return process, folder / "run" / f"version_{number}" / "metrics.csv"


def _wait(process: "subprocess.Popen[bytes]", path: Path, num_steps: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") <= num_steps:  # the first line names the columns
        if process.poll() is not None:
            raise RuntimeError(f"nestmodel fit has ended with exit code {process.returncode}")
        time.sleep(0.05)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        vars(module)["choose_backend"] = lambda *_: Backend(kernels=False, compiled=True)
    sys.exit(nestmodel.main())

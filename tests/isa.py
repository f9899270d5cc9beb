"""Runs the tests marked `numerics` under each instruction set that this CPU has, besides its own: `make test` does.

    python -m tests.isa [arguments of pytest]

A lane is a set of environment variables that limit the instruction set of torch (ATen), oneDNN, MKL, numpy and
OpenBLAS. It does not reproduce the results of a CPU of another vendor, because MKL also chooses its kernels by vendor.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).parents[1]
NUMPY_FEATURES: list[str] = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
"""Instruction sets beyond numpy's baseline that this CPU has and numpy would use."""

LANES: Mapping[str, Mapping[str, str]] = {
    "lowest": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": " ".join(NUMPY_FEATURES),
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in NUMPY_FEATURES if name.startswith(("AVX512", "X86_V4"))),
    },
}


def lanes_of_this_cpu() -> list[str]:
    """Returns the lanes that are a limit on this CPU: without AVX-512, AVX2 is none, or not available."""
    return [lane for lane in LANES if lane != "AVX2" or torch.backends.cpu.get_cpu_capability() == "AVX512"]


def environment_of(lane: str) -> dict[str, str]:
    """Returns the environment of this process with the limits of a lane."""
    return {**os.environ, **LANES[lane]}


def main(arguments: list[str]) -> int:
    codes = []
    for lane in lanes_of_this_cpu():
        environment = environment_of(lane)
        report = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
        capability = subprocess.run(report, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(f"== lane {lane}: torch reports {capability.strip()}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "--numprocesses", "auto", "--maxprocesses", "8", "--quiet"]
        command += ["-m", "numerics and not faults", *arguments]
        codes.append(subprocess.run(command, cwd=REPOSITORY, env=environment).returncode)
        result = "passed" if codes[-1] == 0 else "failed"
        print(f"== lane {lane}: {result} in {time.monotonic() - began:.0f} s", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

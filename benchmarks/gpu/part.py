"""Measures one part of the plan in this process: `python -m benchmarks.gpu.part PART [--preset PRESET] ...`."""

import argparse
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.gpu.check import check_backends
from benchmarks.gpu.machine import measure_machine
from benchmarks.gpu.nemo import measure_nemo
from benchmarks.gpu.restart import measure_restart
from benchmarks.gpu.results import Results
from benchmarks.gpu.steps import measure_steps
from benchmarks.gpu.trial import BACKENDS


def main() -> int:
    """Measures, and adds rows to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("machine", "check", "steps", "nemo", "restart"))
    parser.add_argument("--preset")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--device", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nemo-wheels", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results, device = Results(arguments.output), torch.device(arguments.device)
    if arguments.part == "machine":
        measure_machine(results, device)
    elif arguments.part == "check":
        check_backends(results, device, arguments.preset, arguments.backends)
    elif arguments.part == "steps":
        measure_steps(results, device, arguments.preset, arguments.backends)
    elif arguments.part == "restart":
        measure_restart(results, device, arguments.preset)
    else:
        measure_nemo(results, device, arguments.preset, arguments.nemo_wheels)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures in eight minutes of a GPU what cannot be decided without one, and writes one folder of results.

    python -m benchmarks.gpu [-o FOLDER] [--limit 480] [--parts check steps] [--presets large] [--backends compiled]

Each part is a process with a limit of its own; each number is in FOLDER/results.jsonl as soon as it is known, so that a
part that fails or hangs loses only its later numbers. A second call with the same folder does the rest. `--device cpu`
tries the program with a tiny model. docs/gpu.md says how to read the results.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.results import Results
from benchmarks.gpu.table import report
from benchmarks.gpu.wheels import NEMO, OURS, install_wheels
from benchmarks.harness.children import search_path
from benchmarks.harness.repository import REPOSITORY

QUICK = None
PRESETS = ("large", "xlarge", "medium", "small")
"""The presets, the most important ones first."""

COMPARED = ("large", "xlarge")
"""Presets that are measured beside NeMo."""

PARTS = ("machine", "check", "steps", "nemo", "restart", "tests")

_MIN_S = 8.0
"""A part is not begun if less time is left."""


class Part(NamedTuple):
    """A process of the plan."""

    name: str
    limit_s: float
    arguments: list[str]
    """Arguments of Python."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that are missing, and writes and prints the report; 1 if something failed or is wrong."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_results"), help="folder [%(default)s]")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which the program ends [%(default)g]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--backends", nargs="+", help="names of benchmarks/gpu/trial.py; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, default=OURS, help="wheels that this Python lacks [%(default)s]")
    parser.add_argument("--nemo-wheels", type=Path, default=NEMO, help="wheels that NeMo needs [%(default)s]")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.output)
    end_s, steps = started_s + arguments.limit, plan(arguments)
    with tempfile.TemporaryDirectory() as packages:
        if importlib.util.find_spec("lhotse") is None and any(arguments.wheels.glob("*.whl")):
            install_wheels(arguments.wheels, packages)
        for parts in steps:
            missing = [part for part in parts if not results.has(ended=part.name, code=0)]
            run_beside(results, missing, end_s, packages)
    names = [part.name for parts in steps for part in parts]
    text, is_good = report(results.rows(), names, failed_tests(arguments.output))
    (arguments.output / "results.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if is_good else 1


def failed_tests(folder: Path) -> list[str]:
    """Returns the lines of pytest's summary that name failed tests."""
    log = folder / "log-tests.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [line for line in lines if line.startswith(("FAILED", "ERROR"))]


def plan(arguments: argparse.Namespace) -> list[list[Part]]:
    """Returns the parts in the order in which they run; the parts of an inner list run at the same time."""
    given = ["--device", arguments.device, "--output", str(arguments.output.resolve())]
    of_backends = ["--backends", *arguments.backends] if arguments.backends else []

    def part(name: str, limit_s: float, *more: str) -> Part:
        # The limits are chosen for a GPU.
        limit_s = limit_s if arguments.device == "cuda" else arguments.limit
        return Part(name, limit_s, ["-m", "benchmarks.gpu.part", name.split()[0], *given, *more])

    def of_preset(kind: str, limit_s: float, preset: str) -> Part:
        return part(" ".join([kind, preset, *of_backends[1:]]), limit_s, "--preset", preset, *of_backends)

    steps = [[of_preset("steps", 120, preset)] for preset in arguments.presets]
    of_nemo = ["--nemo-wheels", str(arguments.nemo_wheels.resolve())]
    has_nemo = any(arguments.nemo_wheels.glob("*.whl"))
    compared = [preset for preset in COMPARED if preset in arguments.presets and has_nemo]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu", "--timeout", "60"]
    test = ["-m", "pytest", *options, *_test_files()]
    in_order = [
        ("machine", [[part("machine", 45)]]),
        ("check", [[of_preset("check", 140, preset) for preset in arguments.presets]]),
        ("steps", steps[:2]),
        ("nemo", [[part(f"nemo {preset}", 60, "--preset", preset, *of_nemo)] for preset in compared]),
        ("steps", steps[2:]),
        ("restart", [[part("restart", 240, "--preset", arguments.presets[0])]]),
        ("tests", [[Part("tests", 120, test)]]),
    ]
    return [parts for kind, groups in in_order if kind in arguments.parts for parts in groups]


def _test_files() -> list[str]:
    """Returns the files with tests for a GPU; others may import what the machine lacks."""
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(REPOSITORY)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8"))


def run_beside(results: Results, parts: list[Part], end_s: float, packages: str) -> None:
    """Runs parts at the same time, each until its limit or the end of the program's time; a row says how each ended."""
    threads = str(max(1, (os.cpu_count() or 1) // max(2, len(parts))))
    path = os.pathsep.join([packages, search_path()])
    limits = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **limits}
    started_s = time.monotonic()
    if end_s - started_s < _MIN_S:
        return
    with ExitStack() as stack:
        running = []
        for part in parts:
            log = stack.enter_context((results.folder / f"log-{part.name.replace(' ', '-')}.txt").open("ab"))
            command = [sys.executable, *part.arguments]
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_end_group, process)
            running.append((part, process))
        for part, process in running:
            code: int | str
            try:
                code = process.wait(max(0.0, min(started_s + part.limit_s, end_s) - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = "limit"
                _end_group(process)
            results.put(ended=part.name, code=code, seconds=round(time.monotonic() - started_s, 1))


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process with all that it has started, such as NeMo and the workers of the compiler."""
    for number, grace_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(grace_s)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the parts
    sys.exit(main())

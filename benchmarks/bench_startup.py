"""Time and memory of starting the commands, as separate processes, beside `import torch` in the same run.

    python benchmarks/bench_startup.py [--checkout ../before] [--rounds 7] [--lines 200000] [--quick]

Prints Markdown. Each time is the median over rounds; a round runs every program of every checkout once, so that all run
under the same load. A first round fills the caches and is not counted. Memory is the peak resident memory of the
process. `nestdata prepare` trusts the durations of a NeMo manifest (`--probe missing`). "Its work" is the same call of
`prepare_corpus` without start-up, in a process that has made the call before. A checkout may be older than this script:
a program that it lacks is shown as failed.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

# Import nothing heavy here: until its exec, a child process is charged with the memory of its parent.

_TORCH = 'python -c "import torch"'
_PREPARE = "nestdata prepare"
_WORK = "its work, in a warm process"
_COMMAND = "import sys; from nestcli.{program} import main; sys.exit(main({arguments}))"
_WARM_PROCESS = """
import json, sys, time
from pathlib import Path
import nestdata
prepare_corpus = getattr(nestdata, "prepare_corpus", None) or nestdata.prepare  # its name until November 2026
for line in sys.stdin:
    started = time.perf_counter()
    prepare_corpus([Path(sys.argv[1])], Path(sys.argv[2]), nestdata.PrepareConfig(probe="missing"), overwrite=True)
    print(time.perf_counter() - started, flush=True)
"""


@dataclass
class Figures:
    """Measurements of one program, one per round."""

    seconds: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    has_failed: bool = False


class Checkout:
    """A source tree whose programs are measured.

    Args:
        root: The tree.
        work: An empty directory.
        manifest: NeMo manifest with durations.
    """

    def __init__(self, root: Path, work: Path, manifest: Path) -> None:
        commands = work / "commands"
        commands.mkdir(parents=True)
        (commands / "nestcli").symlink_to(root / "cli")
        paths = os.pathsep.join([str(root), str(commands)])
        self._environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._work = work
        prepare = ["prepare", str(manifest), "-o", str(work / "out.corpus"), "--probe", "missing", "--overwrite"]
        self._programs = {
            "python -c pass": "pass",
            _TORCH: "import torch",
            "nestdata --help": _COMMAND.format(program="nestdata", arguments=["--help"]),
            "nestdata --version": _COMMAND.format(program="nestdata", arguments=["--version"]),
            "nestmodel --help": _COMMAND.format(program="nestmodel", arguments=["--help"]),
            "nestmodel --version": _COMMAND.format(program="nestmodel", arguments=["--version"]),
            "import nestdata": "import nestdata",
            "import nestmodel": "import nestmodel",
            _PREPARE: _COMMAND.format(program="nestdata", arguments=prepare),
        }
        self._warm = subprocess.Popen(
            [sys.executable, "-c", _WARM_PROCESS, str(manifest), str(work / "warm.corpus")],
            cwd=work,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.figures = {name: Figures() for name in (*self._programs, _WORK)}

    def run_round(self, *, is_counted: bool) -> None:
        """Runs every program once."""
        for name, source in self._programs.items():
            seconds, peak_mb, code = self._run(source)
            figures = self.figures[name]
            figures.has_failed |= code != 0
            if is_counted:
                figures.seconds.append(seconds)
                figures.peak_mb.append(peak_mb)
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        try:
            self._warm.stdin.write("once\n")
            self._warm.stdin.flush()
            seconds = float(self._warm.stdout.readline())
        except (BrokenPipeError, ValueError):
            sys.exit("the warm process has failed; its error is above")
        if is_counted:
            self.figures[_WORK].seconds.append(seconds)

    def close(self) -> None:
        """Ends the warm process."""
        self._warm.communicate()

    def _run(self, source: str) -> tuple[float, float, int]:
        """Runs a program; returns its time in seconds, its peak memory in MB, and its exit code."""
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            cwd=self._work,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        return seconds, usage.ru_maxrss / 1024, process.returncode


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="another checkout, shown in the columns `before`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="one round, few lines")
    arguments = parser.parse_args()
    num_rounds, num_lines = (1, 2_000) if arguments.quick else (arguments.rounds, arguments.lines)
    roots = {"before": arguments.checkout, "now": Path(__file__).parents[1]}
    with tempfile.TemporaryDirectory() as name:
        manifest = _write_manifest(Path(name) / "speech.json", num_lines)
        checkouts = {
            label: Checkout(root.resolve(), Path(name) / label, manifest) for label, root in roots.items() if root
        }
        for number in range(num_rounds + 1):
            for checkout in checkouts.values():
                checkout.run_round(is_counted=number > 0)
        for checkout in checkouts.values():
            checkout.close()
    _print_table({label: checkout.figures for label, checkout in checkouts.items()}, num_rounds, num_lines)
    return 0


def _print_table(measured: dict[str, dict[str, Figures]], num_rounds: int, num_lines: int) -> None:
    print("# Start-up\n")
    print(
        f"Made by `benchmarks/bench_startup.py`, Python {platform.python_version()}, {platform.machine()}. Medians of "
        f"{num_rounds} rounds; ratios are to `import torch` of the same checkout. `nestdata prepare` reads "
        f"{num_lines:,} NeMo lines with durations, with `--probe missing`.\n"
    )
    print("| what |" + "".join(f" {label}, s | ratio | peak, MB |" for label in measured))
    print("|---|" + "---|---|---|" * len(measured))
    for name in next(iter(measured.values())):
        print(f"| {name} |" + "".join(f" {_cells(figures, name)} |" for figures in measured.values()))
    extra = [figures[_PREPARE] for figures in measured.values()]
    work = [figures[_WORK] for figures in measured.values()]
    cells = (
        f" {statistics.median(a - b for a, b in zip(one.seconds, other.seconds, strict=True)):.2f} | | |"
        for one, other in zip(extra, work, strict=True)
    )
    print("| prepare less its work |" + "".join(cells))
    print("\n```json")
    print(json.dumps({label: {n: f.seconds for n, f in found.items()} for label, found in measured.items()}))
    print("```")


def _cells(figures: dict[str, Figures], name: str) -> str:
    found = figures[name]
    if found.has_failed:
        return "failed | | "
    seconds = statistics.median(found.seconds)
    ratio = seconds / statistics.median(figures[_TORCH].seconds)
    memory = f"{max(found.peak_mb):.0f}" if found.peak_mb else ""
    return f"{seconds:.2f} | {ratio:.3f} | {memory}"


def _write_manifest(path: Path, num_lines: int) -> Path:
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_lines):
            duration = min(40.0, max(1.0, generator.lognormvariate(2.2, 0.6)))
            name = f"speaker-{number // 1000:05d}/{number:08d}.flac"
            file.write(json.dumps({"audio_filepath": name, "duration": round(duration, 3), "lang": "en"}) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())

"""CPU time of `nestdata prepare` in this checkout and in another one, such as the commit before.

    python -m benchmarks run cost --other ../old --results FILE

Both prepare the inputs one after the other in each round: a manifest of 100,000 lines with durations, folders of WAV,
FLAC and MP3, whose headers are read, and a WebDataset of tars. The two corpora of a round have to be equal.
"""

import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import soundfile

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine
from benchmarks.harness.repository import REPOSITORY
from benchmarks.harness.rounds import ratios, run_rounds, spread

QUICK = ("--quick", "--other", ".")
_COMMAND = "import sys; sys.path.insert(0, sys.argv.pop(1)); from nestcli.nestdata import main; sys.exit(main())"


def write_lines(folder: Path, num_lines: int) -> tuple[Path, list[str]]:
    """Writes a manifest of files that do not exist, and returns it with the options that leave them unread."""
    rng = np.random.default_rng(1)
    manifest = folder / "lines.jsonl"
    with manifest.open("wb") as file:
        for number, seconds in enumerate(rng.uniform(1, 20, num_lines).round(2).tolist()):
            row = {"audio_filepath": f"audio/{number:06d}.wav", "duration": seconds, "text": f"text {number}"}
            file.write(orjson.dumps(row) + b"\n")
    return manifest, ["--probe", "missing"]


def write_files(folder: Path, suffix: str, num_files: int) -> tuple[Path, list[str]]:
    """Writes files of one second, and returns their folder."""
    rng = np.random.default_rng(2)
    files = folder / suffix
    files.mkdir()
    for number in range(num_files):
        soundfile.write(files / f"{number:05d}.{suffix}", 0.1 * rng.standard_normal(16000), 16000)
    return files, []


def write_tars(folder: Path, files: Path) -> tuple[Path, list[str]]:
    """Writes a WebDataset of the files of a folder, and returns the pattern of its tars."""
    paths = sorted(files.iterdir())
    (folder / "tars").mkdir()
    for shard in range(4):
        with tarfile.open(folder / "tars" / f"{shard}.tar", "w") as tar:
            for path in paths[shard::4]:
                tar.add(path, path.name)
    return folder / "tars" / "{0..3}.tar", []


def cpu_seconds(checkout: Path, given: Path, options: list[str], output: Path) -> float:
    """Prepares an input in a new process, and returns the CPU time of it and its workers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", _COMMAND, str(checkout), "prepare", str(given), "-o", str(output), "--overwrite"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [*command, *options], cwd=output.parent, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{checkout}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints the result."""
    parser = benchmark_parser(__doc__, rounds=7, quick={"rounds": 1, "lines": 1000, "files": 20})
    parser.add_argument("--other", type=Path, required=True, metavar="CHECKOUT", help="root of the other checkout")
    parser.add_argument("--lines", type=int, default=100_000, help="lines of the manifest [%(default)s]")
    parser.add_argument("--files", type=int, default=4000, help="files of each folder [%(default)s]")
    given = parser.parse_args()
    checkouts = {"this": REPOSITORY, "other": given.other.resolve()}
    report = Report(
        "CPU time of prepare",
        __file__,
        f"{given.rounds} rounds on {machine()}, each input by both checkouts in each. Medians, with the least and the "
        "most; ratios are taken within a round.",
        results=given.results,
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        inputs = {f"{given.lines:,} lines": write_lines(root, given.lines)}
        for suffix in ("wav", "flac", "mp3"):
            inputs[f"{given.files:,} files of {suffix.upper()}"] = write_files(root, suffix, given.files)
        inputs["the FLAC files in tars"] = write_tars(root, root / "flac")
        rows = []
        for name, (path, options) in inputs.items():
            contestants: dict[str, Callable[[], float]] = {
                checkout: partial(cpu_seconds, where, path, options, root / f"{checkout}.corpus")
                for checkout, where in checkouts.items()
            }
            rounds = run_rounds(contestants, given.rounds, warm_up=0 if given.quick else 1)
            contents = [(root / f"{checkout}.corpus" / "cuts.jsonl").read_bytes() for checkout in checkouts]
            seconds = [spread([measured[checkout] for measured in rounds]) for checkout in checkouts]
            is_equal = "equal" if contents[0] == contents[1] else "different"
            rows.append([name, *seconds, spread(ratios(rounds, "this", "other"), 3), is_equal])
        report.table(["input", "this, s", "other, s", "this over other", "cuts"], rows)


if __name__ == "__main__":
    main()

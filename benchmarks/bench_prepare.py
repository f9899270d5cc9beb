"""Measures the speed and memory of preparing NeMo lines with trusted durations, and the headers of real files.

    python benchmarks/bench_prepare.py SPEECH.json [--lines 1000000] [--rounds 5] [--quick]

Prints Markdown. Each run is a separate process that measures its own time and peak memory.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
from peer import run_peer

from nestdata import PrepareConfig, prepare_corpus


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, nargs="?")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, few lines")
    parser.add_argument("--child", choices=["missing", "all", "import"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return _child(arguments.child, arguments.speech)
    num_lines, num_rounds = (20_000, 1) if arguments.quick else (arguments.lines, arguments.rounds)
    print(f"# Preparing\n\nMade by `benchmarks/bench_prepare.py`, numpy {np.__version__}, {platform.machine()}.\n")
    with tempfile.TemporaryDirectory() as directory:
        manifest = _manifest(Path(directory), num_lines)
        runs = [_run("missing", manifest) for _ in range(num_rounds)]
    rate = statistics.median(num_lines / run["seconds"] for run in runs)
    imported_mb = _run("import", manifest)["peak_mb"]
    peak_mb = max(run["peak_mb"] for run in runs)
    print("| what | figure |\n|---|---|")
    print(f"| {num_lines:,} NeMo lines with durations, `--probe missing`, one process | {rate:,.0f} lines/s |")
    print(f"| peak resident memory | {peak_mb:.0f} MB, including {imported_mb:.0f} MB for importing the package |")
    if arguments.speech:
        _compare_headers(arguments.speech, num_rounds)
    return 0


def _compare_headers(speech: Path, num_rounds: int) -> None:
    paths = [str(speech.parent / json.loads(line)["audio_filepath"]) for line in speech.open()]
    ratios, rates = [], []
    for _ in range(num_rounds + 1):
        started = time.perf_counter()
        for path in paths:
            soundfile.info(path)
        loop_s = time.perf_counter() - started
        ours_s = _run("all", speech)["seconds"]
        ratios.append(loop_s / ours_s)
        rates.append(len(paths) / ours_s)
    ratio, rate = statistics.median(ratios[1:]), statistics.median(rates[1:])  # the first round fills caches
    print(f"| `--probe all`, {len(paths):,} real files, one process, report included | {rate:,.0f} files/s |")
    print(f"| speed relative to a plain loop of `soundfile.info` over the same files | {ratio:.2f} |")


def _run(what: str, manifest: Path) -> dict[str, float]:
    measured: dict[str, float] = json.loads(run_peer([sys.executable, __file__, str(manifest), "--child", what]))
    return measured


def _child(what: str, manifest: Path) -> int:
    started = time.perf_counter()
    if what != "import":
        with tempfile.TemporaryDirectory() as directory:
            config = PrepareConfig(probe="missing" if what == "missing" else "all")
            prepare_corpus([manifest], Path(directory) / "out.corpus", config)
            took = time.perf_counter() - started
    else:
        took = 0.0
    print(json.dumps({"seconds": took, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
    return 0


def _manifest(directory: Path, num_lines: int) -> Path:
    path = directory / "speech.json"
    durations = np.random.default_rng(0).lognormal(np.log(9), 0.6, num_lines).clip(1, 40)
    with path.open("w") as file:
        for number, duration in enumerate(durations):
            name = f"speaker-{number // 1000:05d}/{number:08d}.flac"
            label = f'"text": "", "lang": "en", "speaker": "speaker-{number // 1000:05d}"'
            file.write(f'{{"audio_filepath": "{name}", "duration": {duration:.3f}, {label}}}\n')
    return path


if __name__ == "__main__":
    sys.exit(main())

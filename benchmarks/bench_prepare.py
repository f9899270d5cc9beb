"""Measures the speed and memory of preparing: NeMo lines with trusted durations, and headers of files and of tars.

    python benchmarks/bench_prepare.py [SPEECH.json] [--lines 1000000] [--rounds 5] [--before CHECKOUT] [--quick]

Prints Markdown. Each run is a separate process that measures its own time, CPU time and peak memory. With `--before`,
the package of another checkout is measured beside this one in every round. Checkouts that do not read tars have no
figures for them. CPU time is the more reliable figure on a machine that others use.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from peer import run_peer

_MEMBERS_PER_TAR = 500
_Run = dict[str, float]


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "speech", type=Path, nargs="?", help="a NeMo manifest of audio files, which are also put in tars"
    )
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout of the repository")
    parser.add_argument("--quick", action="store_true", help="one round, few lines")
    parser.add_argument("--child", choices=["missing", "all", "loop", "import"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_measured(_CHILDREN[arguments.child], arguments.speech)))
        return 0
    num_lines, num_rounds = (20_000, 1) if arguments.quick else (arguments.lines, arguments.rounds)
    here = Path(__file__).resolve().parents[1]
    checkouts = {"ours": here} | ({"before": arguments.before.resolve()} if arguments.before else {})
    print(
        f"# Preparing\n\nMade by `benchmarks/bench_prepare.py`, numpy {np.__version__}, {platform.machine()}, ", end=""
    )
    print(f"{num_rounds} rounds, one process. Medians; the first round of headers fills caches and is not counted.\n")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        manifest = _manifest(folder, num_lines)
        rounds = [
            {name: _run("missing", manifest, root) for name, root in checkouts.items()} for _ in range(num_rounds)
        ]
        print("| what | items/s | CPU, µs per item | peak, MB |\n|---|---|---|---|")
        for name in checkouts:
            _print_row(f"{num_lines:,} lines, `--probe missing`, {name}", num_lines, [one[name] for one in rounds])
        if arguments.speech:
            _compare_headers(arguments.speech, folder, checkouts, num_rounds)
        print(f"| importing all modules | | | {_run('import', manifest, here)['peak_mb']:.0f} |")
        if arguments.before:
            _print_ratio("trusted durations, CPU", [one["ours"]["cpu_s"] / one["before"]["cpu_s"] for one in rounds])
    return 0


def _compare_headers(speech: Path, folder: Path, checkouts: dict[str, Path], num_rounds: int) -> None:
    """Prints rows for the headers of the same audio as files and in tars, and for a loop of `soundfile.info`."""
    files, tarred = _copies(speech, folder)
    num_files = sum(1 for _ in files.open())
    rounds: list[dict[str, _Run]] = []
    for _ in range(num_rounds + 1):
        one = {"a plain loop of `soundfile.info`": _run("loop", files, checkouts["ours"])}
        for name, root in checkouts.items():
            one[f"files, `--probe all`, {name}"] = _run("all", files, root)
            if name == "ours" or (root / "nestdata/prepare/inputs/tar.py").exists():
                one[f"tars, `--probe all`, {name}"] = _run("all", tarred, root)
        rounds.append(one)
    for what in rounds[0]:
        _print_row(f"{num_files:,} {what}", num_files, [one[what] for one in rounds[1:]])


def _print_row(what: str, num_items: int, runs: list[_Run]) -> None:
    rate = statistics.median(num_items / run["seconds"] for run in runs)
    cpu_us = statistics.median(1e6 * run["cpu_s"] / num_items for run in runs)
    print(f"| {what} | {rate:,.0f} | {cpu_us:.1f} | {max(run['peak_mb'] for run in runs):.0f} |")


def _print_ratio(what: str, ratios: list[float]) -> None:
    print(f"\n{what}, ours / before: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def _run(what: str, manifest: Path, root: Path) -> _Run:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    measured: _Run = json.loads(run_peer([sys.executable, __file__, str(manifest), "--child", what], env=environment))
    return measured


def _measured(action: Callable[[Path], Any], manifest: Path) -> _Run:
    """Returns time, CPU time and peak memory of an action, after all modules have been imported."""
    _warm_up()
    started, cpu_started = time.perf_counter(), time.process_time()
    action(manifest)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu_started,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _warm_up() -> None:
    with tempfile.TemporaryDirectory() as directory:
        soundfile.write(Path(directory) / "a.flac", np.zeros(16000, np.float32), 16000)
        (Path(directory) / "a.json").write_text('{"audio_filepath": "a.flac"}\n')
        _prepare(Path(directory) / "a.json", "all")


def _prepare(manifest: Path, probe: Any) -> None:
    from nestdata import PrepareConfig, prepare_corpus

    # The samples of the report take the same time for every size of a corpus; an earlier commit has none.
    options: dict[str, Any] = {"report_samples": 0} if hasattr(PrepareConfig, "report_samples") else {}
    with tempfile.TemporaryDirectory() as directory:
        prepare_corpus([manifest], Path(directory) / "out.corpus", PrepareConfig(probe=probe, **options))


def _loop(manifest: Path) -> None:
    for line in manifest.open():
        soundfile.info(str(manifest.parent / json.loads(line)["audio_filepath"]))


_CHILDREN: dict[str, Callable[[Path], Any]] = {
    "missing": lambda manifest: _prepare(manifest, "missing"),
    "all": lambda manifest: _prepare(manifest, "all"),
    "loop": _loop,
    "import": lambda _: None,
}


def _copies(speech: Path, folder: Path) -> tuple[Path, Path]:
    """Copies audio to a folder and to NeMo tars in random order, and returns the two manifests."""
    rows = [json.loads(line) for line in speech.open()]
    (folder / "files").mkdir()
    (folder / "tars").mkdir()
    for number, row in enumerate(rows):
        path = speech.parent / row["audio_filepath"]
        row["audio_filepath"] = f"{number:06d}{path.suffix}"
        shutil.copyfile(path, folder / "files" / row["audio_filepath"])
    files = _write_lines(folder / "files" / "speech.json", rows)
    random.Random(0).shuffle(rows)
    for first in range(0, len(rows), _MEMBERS_PER_TAR):
        number = first // _MEMBERS_PER_TAR
        with tarfile.open(folder / "tars" / f"audio_{number}.tar", "w") as tar:
            for row in rows[first : first + _MEMBERS_PER_TAR]:
                tar.add(folder / "files" / row["audio_filepath"], arcname=row["audio_filepath"])
                row["shard_id"] = number
    return files, _write_lines(folder / "tars" / "tarred_audio_manifest.json", rows)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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

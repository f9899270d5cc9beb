"""Compares reading members of a local tar in random order with reading the same audio as small files.

    python -m benchmarks run tar_members [--files 1000] [--rounds 5] [--quick]

Prints Markdown. Each round reads all cuts once from every corpus, in one random order, and alternates between them
every few cuts, so that load of the machine meets all. `checked` compares the checksum of every member. Cold means that
the pages of the audio were dropped from the page cache before the round (posix_fadvise). CPU is the time of the
processor that this process takes, in the kernel included; it depends little on the load of the machine.
"""

import os
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import spread
from nestdata import Corpus, PrepareConfig, prepare_corpus

QUICK = ["--quick", "--rounds", "1"]
CUTS_IN_A_ROW = 20
RATE = 16000
SECONDS = (4.0, 16.0)


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"files": 100})
    parser.add_argument("--files", type=int, default=1000)
    arguments = parser.parse_args()
    report = Report(
        "Members of a local tar against small files",
        __file__,
        f"{versions('numpy')}, {arguments.files} files of {SECONDS[0]:g} to {SECONDS[1]:g} s, {arguments.rounds} "
        f"rounds, one process, {machine()}.",
        results=arguments.results,
    )
    columns = ["format", "page cache", "files, CPU µs a cut"]
    columns += ["members: speed", "members: CPU", "checked: speed", "checked: CPU"]
    with tempfile.TemporaryDirectory() as temporary:
        corpora = {suffix: _corpora(Path(temporary) / suffix, suffix, arguments.files) for suffix in ("flac", "wav")}
        cases = product(corpora, (False, True))
        report.table(columns, (_row(corpora[suffix], suffix, cold, arguments.rounds) for suffix, cold in cases))
    return 0


def _row(corpora: dict[str, Corpus], suffix: str, is_cold: bool, num_rounds: int) -> list[str]:
    order = np.random.default_rng(0)
    num_cuts = len(corpora["files"])
    rounds = [_seconds(corpora, order.permutation(num_cuts).tolist(), is_cold) for _ in range(num_rounds + 1)][1:]
    files_us = 1e6 * statistics.median(times["files"][1] for times in rounds) / num_cuts
    cells = [suffix, "cold" if is_cold else "warm", f"{files_us:,.0f}"]
    for name in ("members", "checked"):
        cells.append(spread([times["files"][0] / times[name][0] for times in rounds]))
        cells.append(spread([times[name][1] / times["files"][1] for times in rounds], 3))
    return cells


def _seconds(corpora: dict[str, Corpus], indices: list[int], is_cold: bool) -> dict[str, NDArray[np.float64]]:
    """Returns elapsed time and CPU time for reading all cuts, by corpus."""
    for corpus in corpora.values() if is_cold else ():
        _drop_pages(corpus)
    seconds = {name: np.zeros(2) for name in corpora}
    for first in range(0, len(indices), CUTS_IN_A_ROW):
        for name, corpus in corpora.items():
            before = np.array([time.perf_counter(), time.process_time()])
            for index in indices[first : first + CUTS_IN_A_ROW]:
                corpus.load(index)
            seconds[name] += np.array([time.perf_counter(), time.process_time()]) - before
    return seconds


def _drop_pages(corpus: Corpus) -> None:
    paths = {shard.info.location for shard in corpus.shards()}
    paths |= {corpus.line(index)["recording"]["sources"][0]["source"] for index in range(len(corpus)) if not paths}
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not on disk yet stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _corpora(directory: Path, suffix: str, num_files: int) -> dict[str, Corpus]:
    """Writes the same audio as files and as a tar, and prepares it: as files, as members, and with their checksums."""
    folder = directory / "speech"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    with tarfile.open(directory / "speech.tar", "w") as tar:
        for number in range(num_files):
            noise = random.standard_normal(round(random.uniform(*SECONDS) * RATE)).cumsum()
            path = folder / f"{number:06d}.{suffix}"
            soundfile.write(path, 0.5 * noise / np.abs(noise).max(), RATE)
            tar.add(path, path.name)
    shutil.copy(directory / "speech.tar", directory / "copy.tar")  # has pages of its own
    inputs = {
        "files": (folder, "all"),
        "members": (directory / "speech.tar", "all"),
        "checked": (directory / "copy.tar", "decode"),
    }
    for name, (path, probe) in inputs.items():
        prepare_corpus([path], directory / f"{name}.corpus", PrepareConfig(probe=probe))  # type: ignore[arg-type]
    return {name: Corpus.open(directory / f"{name}.corpus") for name in inputs}


if __name__ == "__main__":
    sys.exit(main())

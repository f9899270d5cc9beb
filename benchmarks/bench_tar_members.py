"""Compares reading members of a local tar in random order with reading the same audio as small files.

    python benchmarks/bench_tar_members.py [--files 1000] [--rounds 5] [--quick]

Prints Markdown. Each round reads all cuts once from every corpus, in one random order, and alternates between them, so
that load of the machine meets all. `members, checked` compares the checksum of every member. Cold means that the pages
of the audio were dropped from the page cache before the round (posix_fadvise).
"""

import argparse
import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile

from nestdata import Corpus, PrepareConfig, prepare_corpus

RATE = 16000
SECONDS = (4.0, 16.0)


def main() -> int:
    """Runs the measurements and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="100 files")
    arguments = parser.parse_args()
    num_files = 100 if arguments.quick else arguments.files
    print("# Members of a local tar against small files\n")
    print(f"Made by `benchmarks/bench_tar_members.py`, numpy {np.__version__}, ", end="")
    print(
        f"{platform.machine()}, {num_files} files of {SECONDS[0]:g} to {SECONDS[1]:g} s, {arguments.rounds} rounds.\n"
    )
    print("| format | page cache | files, cuts/s | members / files | members, checked / files | range of the ratios |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for suffix in ("flac", "wav"):
            corpora = _corpora(Path(temporary) / suffix, suffix, num_files)
            for is_cold in (False, True):
                print(_row(corpora, suffix, is_cold, arguments.rounds), flush=True)
    return 0


def _row(corpora: dict[str, Corpus], suffix: str, is_cold: bool, num_rounds: int) -> str:
    order = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in corpora}
    for _ in range(num_rounds + 1):
        indices = order.permutation(len(corpora["files"])).tolist()
        for name, corpus in corpora.items():
            rates[name].append(_cuts_per_second(corpus, indices, is_cold))
    files = rates["files"][1:]  # the first round warms up
    ratios = {name: [one / other for one, other in zip(rates[name][1:], files, strict=True)] for name in rates}
    both = ratios["members"] + ratios["checked"]
    return (
        f"| {suffix} | {'cold' if is_cold else 'warm'} | {statistics.median(files):,.0f} "
        f"| {statistics.median(ratios['members']):.2f} | {statistics.median(ratios['checked']):.2f} "
        f"| {min(both):.2f} to {max(both):.2f} |"
    )


def _cuts_per_second(corpus: Corpus, indices: list[int], is_cold: bool) -> float:
    if is_cold:
        _drop_pages(corpus)
    started = time.perf_counter()
    for index in indices:
        corpus.load(index)
    return len(indices) / (time.perf_counter() - started)


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
    inputs = {
        "files": (folder, "all"),
        "members": (directory / "speech.tar", "all"),
        "checked": (directory / "speech.tar", "decode"),
    }
    for name, (path, probe) in inputs.items():
        prepare_corpus([path], directory / f"{name}.corpus", PrepareConfig(probe=probe))  # type: ignore[arg-type]
    return {name: Corpus.open(directory / f"{name}.corpus") for name in inputs}


if __name__ == "__main__":
    sys.exit(main())

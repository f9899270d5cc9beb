"""Checks that the audio of a corpus is complete and unchanged: `verify_corpus`."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nestdata.audio.decode import load_samples
from nestdata.audio.file_kind import special_file_kind
from nestdata.audio.lhotse_audio import file_rate
from nestdata.corpus.addresses import NO_SHARD
from nestdata.corpus.corpus import Corpus
from nestdata.corpus.file_version import path_of
from nestdata.corpus.members import MemberBytes, fetch
from nestdata.errors import AudioError, ConfigError, StorageError
from nestdata.prepare.inputs.entry import File, Unusable
from nestdata.prepare.pool import Pool
from nestdata.prepare.read import read_header
from nestdata.storage import FileVersion, ObjectInfo, is_url, location_of, storage

# Cuts with files of their own that are checked by one thread at a time.
_CUTS_PER_TASK = 200
# Tolerance for the length of a changed file, as in loading.
_TOLERANCE_S = 0.01


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """A difference between audio and what its corpus says."""

    location: str
    """The file or object."""

    kind: str
    """Category, such as missing, changed, corrupt or unreadable."""

    detail: str
    """An explanation that gives the values found."""

    def __str__(self) -> str:
        return f"{self.location}: {self.kind}: {self.detail}"


@dataclass(kw_only=True)
class VerifyReport:
    """The result of `verify_corpus`."""

    location: str
    """The corpus."""

    num_cuts: int
    num_shards: int
    """Number of shards, whose sizes were compared. Local files that are not in tars do not count."""

    num_decoded: int = 0
    """Number of cuts whose audio was read; 0 without `decode`."""

    problems: list[VerifyProblem] = field(default_factory=list)

    num_accepted: int = 0
    """Number of cuts whose files have changed and were accepted."""

    new_root: str | None = None
    """The root that was written to `meta.json`; None if it stays as it was."""

    def summary(self) -> str:
        """Returns one line with the counts."""
        decoded = f", audio of {self.num_decoded} read" if self.num_decoded else ""
        accepted = f", changed files of {self.num_accepted} accepted" if self.num_accepted else ""
        found = f"{len(self.problems)} problems" if self.problems else "no problems"
        if not (self.problems or self.num_decoded):
            found += " in sizes and times; no audio was read, which --decode does"
        return f"{self.location}: {self.num_cuts} cuts{decoded}{accepted}, {self.num_shards} shards: {found}"


class _Checked(NamedTuple):
    """The result of one task."""

    num_decoded: int
    problems: list[VerifyProblem]
    accepted: Sequence[tuple[int, FileVersion]] = ()
    """Indices of cuts whose files have changed and can be used, with the new versions of the files."""


def verify_corpus(
    path: str | Path,
    *,
    decode: bool = False,
    root: str | None = None,
    set_root: bool = False,
    accept_changed: bool = False,
    jobs: int = 8,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> VerifyReport:
    """Compares a corpus with the audio that it names.

    The size of every shard is compared, and its ETag if the store gives one. Files of cuts that are not in a shard must
    exist and not be empty, and must have the size and the modification time that the corpus has recorded, if any. A
    corpus with a sample bank needs no other audio, and none is checked.

    Args:
        path: A corpus directory.
        decode: Whether all audio is read as well: compared with its checksums, if the corpus has them, and decoded.
        root: Where the folder or bucket of the audio is now, if it was moved: a path or a URL. By default, the root in
            `meta.json`.
        set_root: Whether `root` is written to `meta.json` if no problem was found, so that the corpus is used with it.
        accept_changed: Whether changed files, which have another size or time, are accepted, so that the corpus is used
            with them. Their headers must give the length, the sampling rate and the number of channels in the corpus.
        jobs: Number of threads, each of which checks one shard at a time.
        on_progress: Called with the number of shards and groups of files that were checked, and their total.

    Returns:
        The problems found, in the order of the shards.

    Raises:
        CorpusError: The corpus is damaged.
        StorageError: The store does not answer or refuses its credentials, which says nothing about the corpus; or the
            root is not a location, or cannot be written.
        ConfigError: `jobs` is below 1, or a root is given for a corpus that has none.
    """
    if set_root and root is None:
        raise ConfigError("set_root needs a root: give the folder or bucket where the audio is now.")
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give at least 1.")
    corpus = Corpus.open(Path(path).resolve(), root=None if root is None else location_of(root))
    if root is not None and (corpus.has_bank or not corpus.root):
        raise ConfigError(f"{corpus.path}: its audio is in its sample bank, or not relative to a root; omit the root.")
    tasks = [] if corpus.has_bank else list(_tasks(corpus, decode, accept_changed))
    num_shards = 0 if corpus.has_bank else corpus.num_shards
    report = VerifyReport(location=str(corpus.path), num_cuts=len(corpus), num_shards=num_shards)
    accepted: list[tuple[int, FileVersion]] = []
    for done, checked in enumerate(_run_all(tasks, jobs), start=1):
        report.num_decoded += checked.num_decoded
        report.problems += checked.problems
        accepted += checked.accepted
        if on_progress:
            on_progress(done, len(tasks))
    if accepted:
        corpus.write_file_versions(accepted)
        report.num_accepted = len(accepted)
    if set_root and not report.problems:
        corpus.write_root()
        report.new_root = corpus.root
    return report


def _run_all(tasks: Iterable[Callable[[], _Checked]], jobs: int) -> Iterator[_Checked]:
    """Runs tasks in threads, and yields their results in order; takes tasks only as fast as they are done."""
    with ThreadPoolExecutor(jobs) as threads:
        try:
            yield from Pool(threads, 2 * jobs).map(lambda task: task(), tasks)
        finally:
            threads.shutdown(cancel_futures=True)


def _tasks(corpus: Corpus, decode: bool, accept_changed: bool) -> Iterator[Callable[[], _Checked]]:
    """Yields the checks of the shards, then of the cuts that are read from files of their own."""
    shards = corpus.shard_numbers()
    by_shard = np.argsort(shards, kind="stable")
    ends = np.searchsorted(shards[by_shard], np.arange(corpus.num_shards + 1))
    for number, shard in enumerate(corpus.shards()):
        own = by_shard[ends[number] : ends[number + 1]] if decode else by_shard[:0]
        yield partial(_check_shard, corpus, shard.info, own)
    without_shard = np.flatnonzero(shards == NO_SHARD)
    for first in range(0, len(without_shard), _CUTS_PER_TASK):
        indices = without_shard[first : first + _CUTS_PER_TASK].tolist()
        yield partial(_check_files, corpus, indices, decode, accept_changed)


def _check_shard(corpus: Corpus, info: ObjectInfo, indices: Any) -> _Checked:
    """Compares the size of a shard, and loads the given cuts from it."""
    if problems := _compare_size(info):
        return _Checked(0, problems)
    addressed = sorted((corpus.address(index), index) for index in indices.tolist())
    for address, group in groupby(addressed, itemgetter(0)):
        content = None  # windows of one file share its bytes
        for _, index in group:
            try:
                content = content or fetch(address, corpus.line(index)["id"])
                corpus.load(index, given=MemberBytes(content, is_checked=True))
            except AudioError as error:
                problems.append(VerifyProblem(info.location, error.reason, str(error)))
                break
    return _Checked(len(indices), problems)


def _compare_size(expected: ObjectInfo) -> list[VerifyProblem]:
    """Compares a file or object with the size and ETag that it should have.

    Raises:
        StorageError: The store does not answer or refuses its credentials, which says nothing about the audio.
    """
    try:
        found = storage().info(expected.location)
    except StorageError as error:
        if error.kind != "missing" and (is_url(expected.location) or error.kind == "unavailable"):
            raise
        detail = str(error).removeprefix(f"{expected.location}: ")
        return [VerifyProblem(expected.location, error.kind, detail)]
    if found.size != expected.size:
        detail = f"it has {found.size} bytes, and should have {expected.size}"
    elif None not in (expected.etag, found.etag) and found.etag != expected.etag:
        detail = f"its ETag is {found.etag}, and was {expected.etag}"
    else:
        return []
    return [VerifyProblem(expected.location, "changed", detail)]


def _check_files(corpus: Corpus, indices: list[int], decode: bool, accept_changed: bool) -> _Checked:
    """Checks cuts that are read by the path in their line; returns the first problem of each file."""
    problems: dict[str, VerifyProblem] = {}
    accepted: list[tuple[int, FileVersion]] = []
    for index in indices:
        line = corpus.line(index)
        paths = sorted(source["source"] for source in line["recording"]["sources"] if source["type"] == "file")
        bad = [problem for path in paths if (problem := _why_unusable(path))]
        if not bad:
            try:
                try:
                    corpus.check_file(index, line)
                except AudioError:
                    if not accept_changed:
                        raise
                    accepted.append((index, _accepted_version(line)))
                if decode:
                    load_samples(line)
            except AudioError as error:
                bad = [VerifyProblem(min(paths, default=str(corpus.path)), error.reason, str(error))]
        for problem in bad:
            problems.setdefault(problem.location, problem)
    return _Checked(len(indices) if decode else 0, list(problems.values()), accepted)


def _why_unusable(path: str) -> VerifyProblem | None:
    if kind := special_file_kind(path):
        return VerifyProblem(path, "not_a_file", f"it is {kind}")
    try:
        return None if os.stat(path).st_size else VerifyProblem(path, "empty", "it has no bytes")
    except FileNotFoundError:
        return VerifyProblem(path, "missing", "it does not exist")
    except OSError as error:
        return VerifyProblem(path, "unreadable", str(error.strerror))


def _accepted_version(line: dict[str, Any]) -> FileVersion:
    """Returns the version of the file of a cut as it is now, if its header agrees with the corpus.

    Raises:
        AudioError: "changed": it has another length, sampling rate or number of channels, or no audio.
    """
    recording, path = line["recording"], path_of(line)
    found = read_header(File(path))
    if isinstance(found, Unusable):
        difference = f"{path}: {found.reason}, {found.detail}"
    else:
        channels = next(len(source["channels"]) for source in recording["sources"] if source["source"] == path)
        before = (file_rate(recording), channels, recording["duration"])
        now = (found.rate, found.num_channels, found.num_frames / found.rate)
        if now[:2] == before[:2] and abs(now[2] - before[2]) <= _TOLERANCE_S:
            assert found.version is not None
            return found.version
        difference = "{} has {} Hz, {} channels and {:.3f} s, and had {} Hz, {} channels and {:.3f} s".format(
            path, *now, *before
        )
    raise AudioError.because(
        "changed",
        f"cut {line['id']!r}: {difference}, so it cannot be accepted. Restore it, or prepare the corpus again.",
    )

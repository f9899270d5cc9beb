"""The checks of `verify_corpus` for the audio that a corpus names."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import load_samples
from nestdata.audio.file_kind import special_file_kind
from nestdata.corpus.addresses import NO_SHARD, Address
from nestdata.corpus.corpus import Corpus
from nestdata.corpus.members import is_intact
from nestdata.errors import AudioError, StorageError
from nestdata.pack.accept import accepted_version
from nestdata.pack.verify_report import Checked, VerifyProblem, VerifyReport, compare_size, problem_of
from nestdata.storage import FileVersion, storage

# Cuts without an address that are checked by one thread at a time.
_CUTS_PER_TASK = 200


def corpus_tasks(
    corpus: Corpus, checksums: bool, accept_changed: bool
) -> tuple[VerifyReport, int, Iterator[Callable[[], Checked]]]:
    """Returns an empty report of a corpus, the number of its checks, and the checks."""
    report = VerifyReport(location=str(corpus.path), num_cuts=len(corpus), num_shards=0)
    if corpus.has_bank:
        return report, 0, iter(())
    report.num_shards = corpus.num_shards
    shards = corpus.shard_numbers()
    without_shard = np.flatnonzero(shards == NO_SHARD)
    num_tasks = corpus.num_shards + -(-len(without_shard) // _CUTS_PER_TASK)
    return report, num_tasks, _checks_of(corpus, shards, without_shard, checksums, accept_changed)


def _checks_of(
    corpus: Corpus,
    shards: NDArray[np.int64],
    without_shard: NDArray[np.int64],
    checksums: bool,
    accept_changed: bool,
) -> Iterator[Callable[[], Checked]]:
    """Yields the checks of the shards, then those of the cuts that are read from files of their own."""
    by_shard = np.argsort(shards, kind="stable") if checksums else None
    ends = None if by_shard is None else np.searchsorted(shards[by_shard], np.arange(corpus.num_shards + 1))
    for number, shard in enumerate(corpus.shards()):
        own = None if by_shard is None or ends is None else by_shard[ends[number] : ends[number + 1]].tolist()
        yield partial(_check_shard, corpus, shard.info, own)
    for first in range(0, len(without_shard), _CUTS_PER_TASK):
        indices = without_shard[first : first + _CUTS_PER_TASK].tolist()
        yield partial(_check_files, corpus, indices, checksums, accept_changed)


def _check_shard(corpus: Corpus, info: Any, indices: list[int] | None) -> Checked:
    """Checks a shard of a corpus and, if indices are given, the audio of these cuts in it."""
    problems = compare_size(info.location, info.size, info.etag)
    if problems or indices is None:
        return Checked(0, problems)
    found = ((corpus.address(index), index) for index in indices)
    addressed = sorted((address, index) for address, index in found if address is not None)
    try:
        with MemberStream(info.location) as stream:
            # Windows of one file share its bytes, which are read once and compared once.
            for address, group in groupby(addressed, itemgetter(0)):
                content = stream.read(address.offset, address.length)
                for _, index in islice(group, 1 if address.crc32 is not None else None):
                    problems += _check_member(corpus, index, address, content)
    except (OSError, StorageError) as error:
        problems.append(problem_of(error, info.location))
    return Checked(len(indices), problems)


def _check_member(corpus: Corpus, index: int, address: Address, content: bytes) -> list[VerifyProblem]:

    if address.crc32 is None:
        try:
            corpus.load(index, content=content)
        except AudioError as error:
            return [VerifyProblem(address.location, error.reason, str(error))]
    elif not is_intact(address, content) and not is_intact(address, _read_again(address)):
        span = f"bytes {address.offset} to {address.offset + address.length}"
        detail = f"{span} do not have the checksum of the audio of cut {corpus.line(index)['id']!r}"
        return [VerifyProblem(address.location, "corrupt", detail)]
    return []


def _read_again(address: Address) -> bytes:
    """Reads a member once more, because its bytes may have been damaged on their way."""
    with MemberStream(address.location) as stream:
        return stream.read(address.offset, address.length)


def _check_files(corpus: Corpus, indices: list[int], decode: bool, accept_changed: bool) -> Checked:
    """Checks cuts that are read by the path in their line."""
    problems: list[VerifyProblem] = []
    accepted: list[tuple[int, FileVersion]] = []
    seen: set[str] = set()
    for index in indices:
        line = corpus.line(index)
        paths = {source["source"] for source in line["recording"]["sources"] if source["type"] == "file"}
        bad = [
            VerifyProblem(path, *found)
            for path in sorted(paths)
            if (found := _why_unusable(path, special_file_kind(path))) is not None
        ]
        problems += [problem for problem in bad if problem.location not in seen]
        seen.update(problem.location for problem in bad)
        if bad:
            continue
        try:
            try:
                corpus.check_file(index, line)
            except AudioError:
                if not accept_changed:
                    raise
                accepted.append((index, accepted_version(line)))
            if decode:
                load_samples(line)
        except AudioError as error:
            problem = VerifyProblem(min(paths, default=str(corpus.path)), error.reason, str(error))
            problems += [] if error.reason == "changed" and problem.location in seen else [problem]
            seen.add(problem.location)
    return Checked(len(indices) if decode else 0, problems, accepted)


def _why_unusable(path: str, special_kind: str | None) -> tuple[str, str] | None:
    if special_kind is not None:
        return "not_a_file", f"it is {special_kind}"
    try:
        return None if os.stat(path).st_size else ("empty", "it has no bytes")
    except FileNotFoundError:
        return "missing", "it does not exist"
    except OSError as error:
        return "unreadable", str(error.strerror)


class MemberStream:
    """Reads ascending ranges of a shard from one stream; a long gap between them is not read."""

    _LONGEST_GAP = 1 << 20

    def __init__(self, location: str) -> None:
        self._location = location
        self._stream: Any = None
        self._position = 0

    def __enter__(self) -> "MemberStream":
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def read(self, offset: int, length: int) -> bytes:
        """Returns the bytes of a range, fewer if the shard ends within it."""
        if not 0 <= offset - self._position <= self._LONGEST_GAP or self._stream is None:
            if self._stream is not None:
                self._stream.close()
            self._stream = storage().open_stream(self._location, offset=offset)
        else:
            self._stream.read(offset - self._position)
        content: bytes = self._stream.read(length)
        self._position = offset + len(content)
        return content

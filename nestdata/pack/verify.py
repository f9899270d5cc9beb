"""Checks that the audio of a corpus or a packed set is complete and unchanged: `verify_corpus`."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nestdata.errors import ConfigError, StorageError
from nestdata.storage import FileVersion, is_url, storage
from nestdata.storage.location import parse_url

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nestdata.corpus.addresses import Address
    from nestdata.corpus.corpus import Corpus

# Cuts without an address that are checked by one thread at a time.
_CUTS_PER_TASK = 200


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """A difference between audio and what its corpus or packed set says."""

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
    """The corpus or packed set."""

    num_cuts: int
    num_shards: int
    """Number of shards, whose sizes were compared. Local files that are not in tars do not count."""

    num_checked: int = 0
    """Number of cuts whose bytes or samples were read; 0 without checksums."""

    problems: list[VerifyProblem] = field(default_factory=list)

    num_accepted: int = 0
    """Number of cuts whose files have changed, and are used as they are from now on."""

    new_root: str | None = None
    """The root that was written to `meta.json`; None if it stays as it was."""

    def summary(self) -> str:
        """Returns one line with the counts."""
        checked = f", audio of {self.num_checked} read" if self.num_checked else ""
        accepted = f", changed files of {self.num_accepted} accepted" if self.num_accepted else ""
        found = f"{len(self.problems)} problems" if self.problems else "no problems"
        return f"{self.location}: {self.num_cuts} cuts{checked}{accepted}, {self.num_shards} shards: {found}"


class Checked(NamedTuple):
    """The result of one task."""

    num_checked: int
    """Number of cuts whose bytes or samples were read."""

    problems: list[VerifyProblem]
    accepted: Sequence[tuple[int, FileVersion]] = ()
    """Cuts whose files have changed and can be used, by their indices, with the new versions of the files."""


def verify_corpus(
    path: str | Path,
    *,
    checksums: bool = False,
    root: str | None = None,
    set_root: bool = False,
    accept_changed: bool = False,
    jobs: int = 8,
    allow_commands: bool = False,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> VerifyReport:
    """Compares a corpus, or a packed set, with the audio that it names.

    The size of every shard is compared, and its ETag if the store gives one. Of cuts that are read from files of their
    own, the files must exist, not be empty, and have the size and the modification time that they had when the corpus
    was prepared, if it knows them. A corpus with a sample bank needs no other audio, and none is checked.

    Args:
        path: A corpus directory, or the folder or URL of a packed set.
        checksums: Whether all audio is read as well. Its bytes are compared with their checksums; the cuts of a corpus
            without checksums are decoded.
        root: Where the folder or bucket of the audio of a corpus is now, if it was moved: a path or a URL. By default,
            the root in its `meta.json`.
        set_root: Whether `root` is written to `meta.json` if no problem was found, so that the corpus is used with it.
        accept_changed: Whether files of cuts that have another size or time are used as they are from now on, if their
            headers give the length, the sampling rate and the number of channels that the corpus has.
        jobs: Number of threads, each of which checks one shard at a time.
        allow_commands: Whether to run the shell commands that cuts of a corpus give instead of files, to decode their
            output; only with `checksums`.
        on_progress: Called with the number of shards and groups of files that were checked, and their total.

    Returns:
        The problems found, in the order of the shards.

    Raises:
        CorpusError: The corpus is damaged, or the packed set is incomplete.
        StorageError: The store does not answer or refuses its credentials, which says nothing about the corpus; or the
            root is not a location, or cannot be written.
        ConfigError: `jobs` is below 1, or a root is given for a corpus that has none, or a cut to decode is the output
            of a command and commands are not allowed.
    """
    from nestdata.corpus.packed_set import FOLDER

    if set_root and root is None:
        raise ConfigError("set_root needs a root: give the folder or bucket where the audio is now.")
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give at least 1.")
    location = str(path).rstrip("/") if is_url(str(path)) else str(Path(path).resolve())
    if is_url(location) or Path(location, FOLDER).is_dir():
        from nestdata.pack.verify_packed import packed_tasks

        if root is not None:
            raise ConfigError(f"{location}: is a packed set, which holds its audio. Give the root of a corpus only.")
        report, num_tasks, tasks = packed_tasks(location, checksums)
    else:
        from nestdata.corpus.corpus import Corpus

        corpus = Corpus.open(location, root=_checked_root(root), allow_commands=allow_commands)
        if root is not None:
            _check_root_matters(corpus)
        report, num_tasks, tasks = _corpus_tasks(corpus, checksums, accept_changed)
    accepted: list[tuple[int, FileVersion]] = []
    for done, checked in enumerate(_run_all(tasks, jobs), start=1):
        report.num_checked += checked.num_checked
        report.problems += checked.problems
        accepted += checked.accepted
        if on_progress:
            on_progress(done, num_tasks)
    if accepted:
        corpus.write_file_versions(accepted)
        report.num_accepted = len(accepted)
    if set_root and not report.problems:
        corpus.write_root()
        report.new_root = corpus.root
    return report


def _checked_root(root: str | None) -> str | None:
    """Returns a root as an absolute path or a URL.

    Raises:
        StorageError: "invalid": the root is not a URL of an object store, or holds credentials.
    """
    if root is None:
        return None
    if not is_url(root):
        return str(Path(root).resolve())
    parse_url(root)
    return root.rstrip("/")


def _check_root_matters(corpus: "Corpus") -> None:
    if corpus.has_bank:
        raise ConfigError(f"{corpus.path}: its audio is read from its sample bank, so it needs no root.")
    if not corpus.root:
        raise ConfigError(
            f"{corpus.path}: its audio is not relative to a root, so it cannot be moved. Prepare it again where the "
            "audio is now."
        )


def _run_all(tasks: Iterable[Callable[[], Checked]], jobs: int) -> Iterator[Checked]:
    """Runs tasks in threads, and yields their results in order; takes tasks only as fast as they are done."""
    tasks = iter(tasks)
    with ThreadPoolExecutor(jobs) as threads:
        waiting = [threads.submit(task) for task in islice(tasks, 2 * jobs)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting += [threads.submit(task) for task in islice(tasks, 1)]
        finally:
            for future in waiting:
                future.cancel()


def problem_of(error: OSError | StorageError, location: str) -> VerifyProblem:
    """Returns what kept a file or object from being read, as a problem of it.

    Raises:
        StorageError: The store does not answer or refuses its credentials, which says nothing about the audio.
    """
    if isinstance(error, OSError):
        return VerifyProblem(location, "unreadable", error.strerror or type(error).__name__)
    is_of_store = is_url(location) and error.kind not in ("missing", "changed")
    if is_of_store or error.kind == "unavailable":
        raise error
    return VerifyProblem(location, error.kind, str(error).removeprefix(f"{location}: "))


def compare_size(location: str, size: int, etag: str | None) -> list[VerifyProblem]:
    """Compares a file or object with the size and ETag that it should have.

    Raises:
        StorageError: The store does not answer.
    """
    try:
        found = storage().info(location)
    except StorageError as error:
        return [problem_of(error, location)]
    if found.size != size:
        return [VerifyProblem(location, "changed", f"it has {found.size} bytes, and should have {size}")]
    if etag is not None and found.etag is not None and found.etag != etag:
        return [VerifyProblem(location, "changed", f"its ETag is {found.etag}, and was {etag}")]
    return []


def _corpus_tasks(
    corpus: "Corpus", checksums: bool, accept_changed: bool
) -> tuple[VerifyReport, int, Iterator[Callable[[], Checked]]]:
    """Returns an empty report of a corpus, the number of its checks, and the checks."""
    import numpy as np

    from nestdata.corpus.addresses import NO_SHARD

    report = VerifyReport(location=str(corpus.path), num_cuts=len(corpus), num_shards=0)
    if corpus.has_bank:
        return report, 0, iter(())
    report.num_shards = corpus.num_shards
    shards = corpus.shard_numbers()
    without_shard = np.flatnonzero(shards == NO_SHARD)
    num_tasks = corpus.num_shards + -(-len(without_shard) // _CUTS_PER_TASK)
    return report, num_tasks, _checks_of(corpus, shards, without_shard, checksums, accept_changed)


def _checks_of(
    corpus: "Corpus",
    shards: "NDArray[np.int64]",
    without_shard: "NDArray[np.int64]",
    checksums: bool,
    accept_changed: bool,
) -> Iterator[Callable[[], Checked]]:
    """Yields the checks of the shards, then those of the cuts that are read from files of their own."""
    import numpy as np

    by_shard = np.argsort(shards, kind="stable") if checksums else None
    ends = None if by_shard is None else np.searchsorted(shards[by_shard], np.arange(corpus.num_shards + 1))
    for number, shard in enumerate(corpus.shards()):
        own = None if by_shard is None or ends is None else by_shard[ends[number] : ends[number + 1]].tolist()
        yield partial(_check_shard, corpus, shard.info, own)
    for first in range(0, len(without_shard), _CUTS_PER_TASK):
        indices = without_shard[first : first + _CUTS_PER_TASK].tolist()
        yield partial(_check_files, corpus, indices, checksums, accept_changed)


def _check_shard(corpus: "Corpus", info: Any, indices: list[int] | None) -> Checked:
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


def _check_member(corpus: "Corpus", index: int, address: "Address", content: bytes) -> list[VerifyProblem]:
    from nestdata.corpus.members import is_intact
    from nestdata.errors import AudioError

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


def _read_again(address: "Address") -> bytes:
    """Reads a member once more, because its bytes may have been damaged on their way."""
    with MemberStream(address.location) as stream:
        return stream.read(address.offset, address.length)


def _check_files(corpus: "Corpus", indices: list[int], decode: bool, accept_changed: bool) -> Checked:
    """Checks cuts that are read by the path in their line."""
    from nestdata.audio.decode import load_samples
    from nestdata.audio.file_kind import special_file_kind
    from nestdata.errors import AudioError
    from nestdata.pack.accept import accepted_version

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
                load_samples(line, allow_commands=corpus.allow_commands)
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

"""What ranks that extract features together leave on disk: finished batches, and signs of life.

Ranks use no collectives. All of them see the directory that is written, `OUTPUT.partial`, which contains:

    features/                 the files of finished batches
    batches/settings.json     what the records depend on
    batches/kept.jsonl        records of the batches of earlier starts
    batches/NAME.jsonl        records of one rank of the present start
    batches/start.json        the id of the present start, which rank 0 draws and writes first
    batches/start-ID/         rank-0, rank-1, ...: the random name of each rank, touched while its process lives;
                              go.json, written by rank 0 when all ranks have a name; NAME.done at the end of a share

A record is one line for each batch, written when the features of the batch are on disk. A rank takes part in the start
whose id it finds, and ends when it finds another id, or none. It writes features into the folder that it has opened. A
new start moves that folder away, so that ranks of an earlier start write into the old folder.
"""

import contextlib
import errno
import heapq
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from nestdata.output import replace_file
from nestmodel.errors import ExtractError
from nestmodel.evaluate.inputs import RejectedUtterance

FEATURES, RECORDS = "features", "batches"
"""Subfolders of the features and of the records."""

SILENCE_S = 300.0
"""Time without a sign of life after which another rank counts as ended, in seconds.

Clients of a network file system may see a change a minute late.
"""

_BEAT_S = 2.0
_POLL_S = 0.5
_NOTE_AFTER_S = 60.0
_MAX_OPEN = 32
_REMOVALS = 20

_log = logging.getLogger(__name__)


class FinishedBatch(NamedTuple):
    """The record of a batch."""

    number: int
    """Number of the batch; all ranks divide a corpus into the same batches."""

    rows: list[dict[str, Any]]
    """Lines of the index."""

    sizes: list[int]
    """Size of the file of each line, in bytes."""

    num_samples: int
    """Length of the utterances with features."""

    rejected: list[RejectedUtterance]

    def to_line(self) -> str:
        """Returns the line that `read_records` reads."""
        return json.dumps(self) + "\n"


def read_records(paths: Iterable[Path]) -> Iterator[FinishedBatch]:
    """Yields the records of files in the order of the batches, each of them once; damaged lines are left out."""
    last = -1
    for record in heapq.merge(*map(_read_file, paths), key=lambda record: record.number):
        if record.number > last:
            yield record
        last = record.number


def _read_file(path: Path) -> Iterator[FinishedBatch]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                number, rows, sizes, num_samples, rejected = json.loads(line)
                record = FinishedBatch(int(number), rows, sizes, num_samples, [RejectedUtterance(*r) for r in rejected])
            except (ValueError, TypeError):
                continue  # the process was killed, or the machine has crashed
            yield record


def keep_records(directory: Path, settings: dict[str, Any]) -> list[int]:
    """Keeps the batches of earlier starts with the same settings, and removes everything else from these starts.

    A batch is kept if its files are there with their sizes. Batches with rejected utterances are not kept: their audio
    may have been unreadable only for a while. Called by rank 0, before the ranks begin.

    Returns:
        The numbers of the batches that are finished.
    """
    folder, features, kept = directory / RECORDS, directory / FEATURES, directory / RECORDS / "kept.jsonl"
    if features.exists():
        features.rename(folder / f"earlier-{secrets.token_hex(8)}")
    features.mkdir()
    earlier, records = sorted(folder.glob("earlier-*")), sorted(folder.glob("*.jsonl"))
    lines = []
    if _read_json(folder / "settings.json") == settings:
        for record in read_records(records):
            names = [Path(row["file"]).name for row in record.rows]
            if not record.rejected and [_take(name, earlier, features) for name in names] == record.sizes:
                lines.append(record.to_line())
    else:
        replace_file(folder / "settings.json", json.dumps(settings).encode())
    replace_file(kept, "".join(lines).encode())
    for path in records:
        if path != kept:
            path.unlink()
    for path in earlier:
        shutil.rmtree(path, ignore_errors=True)  # a rank that still writes there ends at its next batch
    return [record.number for record in read_records([kept])]


def _take(name: str, earlier: Iterable[Path], features: Path) -> int | None:
    """Moves a file from the folders of earlier starts into the present one; returns its size, or None if missing."""
    for folder in earlier:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).replace(features / name)
            break
    try:
        return (features / name).stat().st_size
    except FileNotFoundError:
        return None


class FeatureFolder:
    """Writes files into a folder, also after it was moved away by another start.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._written: list[int] = []

    def __enter__(self) -> "FeatureFolder":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (*self._written, self._directory):
            os.close(descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which is on disk after the next `flush`.

        Raises:
            ExtractError: The folder was removed.
        """
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            raise ExtractError("this rank ends, because the features were started again or removed.") from error
        self._written.append(descriptor)
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        if len(self._written) >= _MAX_OPEN:
            self._flush_files()

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def flush(self) -> None:
        """Waits until all files are on disk."""
        self._flush_files()
        os.fsync(self._directory)

    def _flush_files(self) -> None:
        with ThreadPoolExecutor(_MAX_OPEN) as threads:  # many flushes at a time take about as long as one
            list(threads.map(os.fsync, self._written))
        while self._written:
            os.close(self._written.pop())


def has_records(directory: Path) -> bool:
    """Returns whether a batch has been finished."""
    return any(path.stat().st_size for path in (directory / RECORDS).glob("*.jsonl"))


def remove_records(directory: Path) -> None:
    """Removes what the ranks have left beside the features; another rank may just be ending."""
    for _ in range(_REMOVALS):
        shutil.rmtree(directory / RECORDS, ignore_errors=True)
        if not (directory / RECORDS).exists():
            return
        time.sleep(_POLL_S)
    shutil.rmtree(directory / RECORDS)


class Start(NamedTuple):
    """The message of rank 0 to all ranks before the first batch."""

    names: list[str]
    """Names of the ranks in their order."""

    settings: dict[str, Any]
    kept: list[int]
    """Numbers of the batches that are finished."""


class Ranks:
    """What one rank knows about all ranks that write the same output, from the directory that they share.

    Inside the `with` block, a thread shows the others that this process lives.

    Args:
        directory: The directory that is written. Rank 0 creates it, and the others wait for it.
        rank: Number of this rank.
        num_ranks: Number of all ranks.
    """

    def __init__(self, directory: Path, rank: int, num_ranks: int) -> None:
        self.name = secrets.token_hex(8)
        self._records, self._rank, self._num_ranks = directory / RECORDS, rank, num_ranks
        self._id = ""  # of the start that this rank takes part in
        self._signed = ""  # the start in which this rank has its name
        self._has_begun = rank == 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show_life, daemon=True)

    def __enter__(self) -> "Ranks":
        if self._rank == 0:
            self._id = secrets.token_hex(8)
            for path in self._records.glob("start-*"):
                shutil.rmtree(path, ignore_errors=True)
            self._folder.mkdir(parents=True)
            replace_file(self._records / "start.json", json.dumps(self._id).encode())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._rank == 0:
            (self._records / "start.json").unlink(missing_ok=True)

    @property
    def records(self) -> Path:
        """File of the records of this rank."""
        return self._records / f"{self.name}.jsonl"

    @property
    def _folder(self) -> Path:
        return self._records / f"start-{self._id}"

    def start(self, settings: dict[str, Any], kept: list[int]) -> Start:
        """Waits until every rank has a name, and lets them begin. For rank 0."""
        names = [self.name]
        for rank in range(1, self._num_ranks):
            self._wait_for(rank, lambda rank=rank: bool(self._name_of(rank)))  # type: ignore[misc]
            names.append(self._name_of(rank))
        start = Start(names, settings, kept)
        replace_file(self._folder / "go.json", json.dumps(start._asdict()).encode())
        return start

    def wait_for_start(self) -> Start:
        """Waits until rank 0 lets this rank begin."""
        found = list[Start]()

        def is_ready() -> bool:
            fields = _read_json(self._folder / "go.json") if self._id else None
            if fields and self.name in fields["names"]:
                found.append(Start(**fields))
            return bool(found)

        self._wait_for(0, is_ready)
        self._has_begun = True
        return found[0]

    def check(self) -> None:
        """Checks that the start of this rank goes on.

        Raises:
            ExtractError: Rank 0 has ended, or another start has taken its place.
        """
        if _read_json(self._records / "start.json") != self._id:
            raise ExtractError(
                f"rank {self._rank} of {self._num_ranks} ends, because rank 0 has ended or was started again. The same "
                "command, for all ranks, goes on with the batches that are missing."
            )

    def finish(self) -> None:
        """Tells rank 0 that the share of this rank is finished."""
        self.check()
        (self._folder / f"{self.name}.done").touch()

    def wait_for_others(self, start: Start) -> list[Path]:
        """Waits until every rank has finished its share, and returns all files of records. For rank 0.

        Raises:
            ExtractError: A rank has given no sign of life for a while.
        """
        for rank, name in enumerate(start.names):
            self._wait_for(rank, (self._folder / f"{name}.done").exists)
        return [self._records / "kept.jsonl", *(self._records / f"{name}.jsonl" for name in start.names)]

    def _wait_for(self, rank: int, is_ready: Callable[[], bool]) -> None:
        last_sign, seen_at, note_at = None, time.monotonic(), time.monotonic() + _NOTE_AFTER_S
        while not is_ready():
            now = time.monotonic()
            if (sign := _changed_at(self._sign_of(rank))) != last_sign:
                last_sign, seen_at = sign, now
            if now - seen_at > SILENCE_S:
                raise ExtractError(
                    f"rank {rank} of {self._num_ranks} has given no sign of life for {SILENCE_S:g} s: its process has "
                    f"ended, or its machine does not see {self._records.parent}. What it printed, or its launcher, "
                    "says why. The same command goes on with the batches that are missing."
                )
            if now > note_at:
                silence = now - seen_at
                _log.warning(
                    "waiting for rank %d of %d, whose last sign of life was %.0f s ago", rank, self._num_ranks, silence
                )
                note_at = float("inf")
            time.sleep(_POLL_S)

    def _show_life(self) -> None:
        while True:
            # Rank 0 may not have created the directory yet, or may have ended.
            with contextlib.suppress(OSError):
                if not self._has_begun:
                    self._id = _read_json(self._records / "start.json") or ""
                sign = self._sign_of(self._rank)
                if self._id and self._signed == self._id:
                    os.utime(sign)
                elif self._id:
                    with sign.open("x", encoding="utf-8") as file:  # another process may be this rank of the start
                        file.write(self.name)
                    self._signed = self._id
            if self._is_over.wait(_BEAT_S if self._has_begun else _POLL_S):
                return

    def _name_of(self, rank: int) -> str:
        try:
            return self._sign_of(rank).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _sign_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}"


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

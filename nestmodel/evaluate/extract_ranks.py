"""What ranks that extract features together leave on disk: finished batches, and signs of life.

Ranks use no collectives. All of them see the directory that is written, `OUTPUT.partial`, which contains, beside the
features:

    batches/settings.json   what the records depend on
    batches/kept.jsonl      records of batches that earlier runs have finished
    batches/NAME.jsonl      records of one rank of this run, and NAME.done once it has finished its share
    rank-0, rank-1, ...     the random name of each rank in this run, written anew while the process lives
    start.json              written by rank 0 when all ranks have a name: their names, the settings, the kept batches

A record is one line for each batch, written when the features of the batch are. Files of an earlier run do not mislead
a rank: it begins when it finds its own name in `start.json`.
"""

import contextlib
import heapq
import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

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

_log = logging.getLogger(__name__)


class FinishedBatch(NamedTuple):
    """The record of a batch."""

    number: int
    """Number of the batch; all ranks divide a corpus into the same batches."""

    rows: list[dict[str, Any]]
    """Lines of the index."""

    num_samples: int
    """Length of the utterances with features."""

    rejected: list[RejectedUtterance]

    def to_line(self) -> str:
        """Returns the line that `read_records` reads."""
        return json.dumps(self) + "\n"


def read_records(paths: Iterable[Path]) -> Iterator[FinishedBatch]:
    """Yields the records of files in the order of the batches, each of them once."""
    last = -1
    for record in heapq.merge(*map(_read_file, paths), key=lambda record: record.number):
        if record.number > last:
            yield record
        last = record.number


def _read_file(path: Path) -> Iterator[FinishedBatch]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return  # the process was killed
            number, rows, num_samples, rejected = json.loads(line)
            yield FinishedBatch(number, rows, num_samples, [RejectedUtterance(*fields) for fields in rejected])


def keep_records(directory: Path, settings: dict[str, Any]) -> list[int]:
    """Keeps the records of an earlier run with the same settings, and removes everything else that it has left.

    Batches with rejected utterances are not kept: their audio may have been unreadable for a while only.

    Returns:
        The numbers of the batches that are finished.
    """
    folder = directory / RECORDS
    if _read_json(folder / "settings.json") != settings:
        for name in (RECORDS, FEATURES):
            shutil.rmtree(directory / name, ignore_errors=True)
            (directory / name).mkdir()
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    kept, earlier = list[int](), sorted(folder.glob("*.jsonl"))
    unfinished = folder / "kept.tmp"
    with unfinished.open("w", encoding="utf-8") as file:
        for record in read_records(earlier):
            if not record.rejected:
                file.write(record.to_line())
                kept.append(record.number)
    unfinished.replace(folder / "kept.jsonl")
    for path in (*earlier, *folder.glob("*.done")):
        if path.name != "kept.jsonl":
            path.unlink()
    return kept


def has_records(directory: Path) -> bool:
    """Returns whether a batch has been finished."""
    return any(path.stat().st_size for path in (directory / RECORDS).glob("*.jsonl"))


class Start(NamedTuple):
    """What rank 0 tells all ranks before the first batch."""

    names: list[str]
    """Names of the ranks in their order."""

    settings: dict[str, Any]
    kept: list[int]
    """Numbers of the batches that are finished."""


class Ranks:
    """The ranks that write one output, as one of them sees them through the directory that they share.

    Inside the `with` block, a thread shows the others that this process lives.

    Args:
        directory: The directory that is written. Rank 0 creates it, and the others wait for it.
        rank: Number of this rank.
        num_ranks: Number of all ranks.
    """

    def __init__(self, directory: Path, rank: int, num_ranks: int) -> None:
        self.name = secrets.token_hex(8)
        self._directory, self._rank, self._num_ranks = directory, rank, num_ranks
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show_life, daemon=True)

    def __enter__(self) -> "Ranks":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._rank == 0:
            for path in (self._directory / "start.json", *map(self._sign_of, range(self._num_ranks))):
                path.unlink(missing_ok=True)

    @property
    def records(self) -> Path:
        """File of the records of this rank."""
        return self._directory / RECORDS / f"{self.name}.jsonl"

    def start(self, settings: dict[str, Any], kept: list[int]) -> Start:
        """Waits until every rank has a name, and lets them begin. For rank 0."""
        names = [self.name]
        for rank in range(1, self._num_ranks):
            self._wait_for(rank, lambda rank=rank: bool(self._name_of(rank)))  # type: ignore[misc]
            names.append(self._name_of(rank))
        start, unfinished = Start(names, settings, kept), self._directory / "start.tmp"
        unfinished.write_text(json.dumps(start._asdict()), encoding="utf-8")
        unfinished.replace(self._directory / "start.json")
        return start

    def wait_for_start(self) -> Start:
        """Waits until rank 0 lets this rank begin."""
        found = list[Start]()

        def is_ready() -> bool:
            fields = _read_json(self._directory / "start.json")
            if fields and self.name in fields["names"]:
                found.append(Start(**fields))
            return bool(found)

        self._wait_for(0, is_ready)
        return found[0]

    def finish(self) -> None:
        """Tells rank 0 that the share of this rank is finished."""
        self.records.with_suffix(".done").touch()

    def wait_for_others(self, start: Start) -> list[Path]:
        """Waits until every rank has finished its share, and returns all files of records. For rank 0.

        Raises:
            ExtractError: A rank has given no sign of life for a while.
        """
        folder = self._directory / RECORDS
        for rank, name in enumerate(start.names):
            self._wait_for(rank, (folder / f"{name}.done").exists)
        return [folder / "kept.jsonl", *(folder / f"{name}.jsonl" for name in start.names)]

    def _wait_for(self, rank: int, is_ready: Callable[[], bool]) -> None:
        last_sign, seen_at, note_at = None, time.monotonic(), time.monotonic() + _NOTE_AFTER_S
        while not is_ready():
            now = time.monotonic()
            if (sign := _changed_at(self._sign_of(rank))) != last_sign:
                last_sign, seen_at = sign, now
            if now - seen_at > SILENCE_S:
                raise ExtractError(
                    f"rank {rank} of {self._num_ranks} has given no sign of life for {SILENCE_S:g} s: its process has "
                    f"ended, or its machine does not see {self._directory}. What it printed, or its launcher, says "
                    "why. The same command goes on with the batches that are missing."
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
            # Rank 0 may not have created the directory yet, and removes what earlier runs have left in it.
            with contextlib.suppress(OSError):
                self._sign_of(self._rank).write_text(self.name, encoding="utf-8")
            if self._is_over.wait(_BEAT_S):
                return

    def _name_of(self, rank: int) -> str:
        try:
            return self._sign_of(rank).read_text(encoding="utf-8")
        except OSError:
            return ""

    def _sign_of(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"


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

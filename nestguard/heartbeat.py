"""Where a process says what it is doing: well under a microsecond each time, and nothing where no guard is on.

Owns the writing side, and being armed: a process that is armed gives its stacks and ends when it is told to, also while
it holds the GIL. One heartbeat per process; `current()` finds it.
"""

import ctypes
import faulthandler
import itertools
import logging
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

from nestguard.errors import GuardError
from nestguard.process import END_SIGNAL, STACK_SIGNAL, process_state, start_ticks
from nestguard.record import (
    ARMED,
    ARMED_AT,
    CUTS_AT,
    DETAIL_AT,
    FILE_SIZE,
    RECORD,
    RECORDS_AT,
    TEXT_SIZE,
    UNSET,
    Identity,
    Phase,
    Record,
    header,
    read_heartbeat,
    shortened,
)

_log = logging.getLogger(__name__)
_pack = RECORD.pack_into
_now = time.monotonic_ns
_FAILED_OR_LEAVING = (Phase.FAILED, Phase.LEAVING)
_FIELDS = range(len(Record._fields))
(
    _NUMBER,
    _BEAT_NS,
    _PHASE,
    _END,
    _STEP,
    _MICROBATCH,
    _COLLECTIVES,
    _FIRST_STEP,
    _TEXTS,
    _TEXT_SIZE,
    _DETAIL_SIZE,
    _NUMBER_AGAIN,
) = _FIELDS


class HeartbeatSlot(NamedTuple):
    """Where the heartbeats of a node lie, and whose child a loader worker is; can be pickled."""

    directory: Path
    identity: Identity


class NoHeartbeat:
    """Stands in where no guard is on: everything is allowed and does nothing."""

    place: HeartbeatSlot | None = None

    def beat(
        self, phase: Phase, step: int | None = None, microbatch: int | None = None, cut_ids: Iterable[str] = ()
    ) -> None:
        """Does nothing."""

    def beat_collective(self, step: int | None = None) -> None:
        """Does nothing."""

    def note_cuts(self, cut_ids: Iterable[str]) -> None:
        """Does nothing."""

    def note_cut(self, cut_id: str) -> None:
        """Does nothing."""

    def alive(self) -> None:
        """Does nothing."""

    def finish(self, phase: Phase, detail: str = "", traceback: str = "") -> None:
        """Does nothing."""

    def arm(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Heartbeat:
    """What one process says of itself, in a file that the monitor of its node reads.

    Any thread may write. What is said after `finish` is not heard.

    Args:
        directory: On a local file system, best in memory (/dev/shm); made where it is missing. One for each start of a
            run and each node.
        identity: Which process this is.

    Raises:
        GuardError: The file cannot be written, or this is no Linux.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory = Path(directory).resolve()
        self.place: HeartbeatSlot | None = HeartbeatSlot(self._directory, identity)
        self._name = _free_name(self._directory, identity)
        self._record = [0] * len(_FIELDS)
        self._record[_PHASE] = Phase.STARTING
        for field in (_END, _STEP, _MICROBATCH, _FIRST_STEP):
            self._record[field] = UNSET
        self._stacks: IO[str] | None = None
        try:
            self._map = self._create(identity)
        except OSError as error:
            raise GuardError(f"{directory}: the heartbeat of {self._name} cannot be written: {error}.") from error

    def beat(
        self, phase: Phase, step: int | None = None, microbatch: int | None = None, cut_ids: Iterable[str] = ()
    ) -> None:
        """Says what the process does from now on; what is not given stays as it was."""
        record = self._record
        if record[_END] != UNSET:
            return
        record[_PHASE] = phase
        if step is not None:
            record[_STEP] = step
            if record[_FIRST_STEP] < 0:
                record[_FIRST_STEP] = step
        if microbatch is not None:
            record[_MICROBATCH] = microbatch
        if cut_ids:
            self._put_cuts(_listed(cut_ids))
        self._write()

    def beat_collective(self, step: int | None = None) -> None:
        """Says that the process enters a collective that all ranks have to enter, and counts it."""
        if self._record[_END] == UNSET:
            self._record[_COLLECTIVES] += 1
            self.beat(Phase.COLLECTIVE, step)

    def note_cuts(self, cut_ids: Iterable[str]) -> None:
        """Says what is being loaded; no ids say that there is nothing to load, which a loader worker has to do."""
        if self._record[_END] == UNSET:
            self._put_cuts(_listed(cut_ids))
            self._write()

    def note_cut(self, cut_id: str) -> None:
        """Says which one of them is being loaded, in place of all."""
        if self._record[_END] == UNSET:
            self._put_cuts(cut_id.replace("\n", " "))
            self._write()

    def alive(self) -> None:
        """Says that the process gets on with what it does."""
        if self._record[_END] == UNSET:
            self._write()

    def finish(self, phase: Phase, detail: str = "", traceback: str = "") -> None:
        """Says how the process ends: DONE, FAILED or LEAVING. A failure, or being asked to leave, is not taken back.

        Args:
            phase: How.
            detail: One line, as the last of a traceback.
            traceback: The whole of it, printed if this is what ended the run.
        """
        if not phase.is_final:
            raise GuardError(f"{phase.name} is no way to end: expected DONE, FAILED or LEAVING.")
        if self._record[_END] in _FAILED_OR_LEAVING:
            return
        if traceback:
            (self._directory / f"{self._name}.traceback.txt").write_text(traceback, encoding="utf-8")
        data = shortened(detail)
        self._map[DETAIL_AT : DETAIL_AT + len(data)] = data
        self._record[_DETAIL_SIZE] = len(data)
        self._record[_END] = phase
        self._write()

    def arm(self) -> None:
        """Lets the monitor take the stacks of this process, and end it with exit code 44, even while it holds the GIL.

        Takes the signals 43 and 44 for good.
        """
        path = self._directory / f"{self._name}.stack.txt"
        self._stacks = path.open("w", encoding="utf-8")  # open for as long as the process lives
        # What faulthandler goes back to as the interpreter exits; otherwise the signal would kill from then on. A fork
        # has what its parent registered.
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True, chain=False)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        # No handler in Python: it would wait for the GIL, which may be what is stuck.
        libc.signal(END_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
        ARMED.pack_into(self._map, ARMED_AT, 1)

    def close(self) -> None:
        """Gives no stacks any more, after `finish`, for a process that lives on."""
        if self._stacks is not None:
            faulthandler.unregister(STACK_SIGNAL)
            self._stacks.close()
            self._stacks = None

    def _create(self, identity: Identity) -> mmap.mmap:
        pid = os.getpid()
        started = start_ticks(pid)
        if started is None:
            raise GuardError("The stall guard reads /proc, which is not there: it needs Linux. Turn it off.")
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        data = header(identity, self._name, pid, started, error_file)
        if len(data) > RECORDS_AT[0]:
            data = header(identity, self._name, pid, started, None)
        self._directory.mkdir(parents=True, exist_ok=True)
        beside = self._directory / f".{self._name}.{pid}.partial"
        # All of it is written, for a page that finds no room later would kill the process.
        beside.write_bytes(data.ljust(FILE_SIZE, b"\0"))
        with beside.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), FILE_SIZE)
        self._write()
        beside.rename(self._directory / f"{self._name}.beat")
        return self._map

    def _put_cuts(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        if len(data) > TEXT_SIZE:
            data = shortened(text)
        record = self._record
        record[_TEXTS] += 1
        at = CUTS_AT[record[_TEXTS] & 1]
        self._map[at : at + len(data)] = data
        record[_TEXT_SIZE] = len(data)

    def _write(self) -> None:
        record = self._record
        number = record[_NUMBER] + 1
        record[_NUMBER] = record[_NUMBER_AGAIN] = number
        record[_BEAT_NS] = _now()
        _pack(self._map, RECORDS_AT[number & 1], *record)


def _listed(cut_ids: Iterable[str]) -> str:
    """The ids one to a line, as many as there is room for."""
    taken, size = [], 0
    for cut_id in cut_ids:
        taken.append(cut_id.replace("\n", " "))
        size += len(cut_id) + 1
        if size > TEXT_SIZE:
            break
    return "\n".join(taken)


_NONE = NoHeartbeat()
_current: Heartbeat | NoHeartbeat = _NONE
_parent: HeartbeatSlot | None = None
_follows_forks = False


def current() -> Heartbeat | NoHeartbeat:
    """The heartbeat of this process; one that does nothing where no guard is on."""
    return _current


def set_current(heartbeat: Heartbeat | NoHeartbeat) -> None:
    """Makes this the heartbeat of the process. A child of it, by fork, has none until it calls `start_worker`."""
    global _current, _follows_forks
    _current = heartbeat
    if not _follows_forks and isinstance(heartbeat, Heartbeat):
        os.register_at_fork(after_in_child=_leave_to_parent)
        _follows_forks = True


def start_worker(worker_id: int, num_workers: int, place: HeartbeatSlot | None = None) -> None:
    """Gives a loader worker a heartbeat of its own, beside that of its rank. Does nothing where no guard is on.

    For the start of a worker. One that cannot have a heartbeat works without, and says so in the log.

    Args:
        worker_id: Its number.
        num_workers: How many there are.
        place: `current().place` of its rank, for a worker that is no fork of it.
    """
    place = place or _parent or _current.place
    if place is None:
        return
    assert 0 <= worker_id < num_workers
    try:
        heartbeat = Heartbeat(place.directory, replace(place.identity, worker=worker_id))
        heartbeat.arm()
    except (GuardError, OSError) as error:
        _log.warning("loader worker %d is not watched: %s", worker_id, error)
        return
    heartbeat.beat(Phase.LOADING)
    set_current(heartbeat)
    if "multiprocessing" in sys.modules:
        from multiprocessing.util import Finalize

        # Children of multiprocessing leave without atexit.
        Finalize(None, heartbeat.finish, args=(Phase.DONE,), exitpriority=0)


def _free_name(directory: Path, identity: Identity) -> str:
    """The name of the files of a process: that of a loader worker is not the one of another that is still there."""
    name = identity.name
    for number in itertools.count(2):
        other = None if identity.worker is None else read_heartbeat(directory / f"{name}.beat")
        if other is None or process_state(other.pid, other.start_ticks).has_ended:
            break
        name = f"{identity.name}.{number}"
    return name


def _leave_to_parent() -> None:
    global _current, _parent
    _parent = _current.place or _parent
    _current = _NONE

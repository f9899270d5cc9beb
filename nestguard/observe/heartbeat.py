"""Heartbeats: each process records what it is doing in a memory-mapped file that the monitor of its node reads.

This module owns the writing side, and `record` the layout of the file. `current` keeps the heartbeat of this process.
"""

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from nestguard.observe.device import DeviceEvent, DeviceWatch, TraceReader, TraceWriter
from nestguard.observe.directory import (
    BEAT_SUFFIX,
    PARTIAL_SUFFIX,
    TRACEBACK_SUFFIX,
    DirectoryLock,
    check_private,
    create_file,
    lock_directory,
)
from nestguard.observe.errors import GuardError
from nestguard.observe.process import process_state, start_ticks
from nestguard.observe.record import (
    ARMED,
    ARMED_AT,
    CUTS_AT,
    DETAIL_AT,
    DEVICE_RECORD,
    DEVICE_RECORDS_AT,
    FILE_SIZE,
    RECORD,
    RECORDS_AT,
    TEXT_SIZE,
    UNSET,
    WAIT_MARK,
    Record,
    header,
    read_heartbeat,
    truncated_utf8,
)
from nestguard.observe.stacks import StackWriter, dump_crashes, end_on_signal, stop_dumping_crashes
from nestguard.observe.view import DevicePosition, Identity, Phase

_pack = RECORD.pack_into
_now = time.monotonic_ns
_FAILED_OR_LEAVING = (Phase.FAILED, Phase.LEAVING)
_FIELDS = range(len(Record._fields))
(
    _SEQUENCE,
    _BEAT_NS,
    _PHASE,
    _END,
    _STEP,
    _MICROBATCH,
    _COLLECTIVES,
    _FIRST_STEP,
    _CUTS_VERSION,
    _CUTS_SIZE,
    _DETAIL_SIZE,
    _SEQUENCE_AGAIN,
) = _FIELDS


class HeartbeatSlot(NamedTuple):
    """Where a rank writes its heartbeat, and the rank's identity. Picklable: spawned loader workers receive it."""

    directory: Path
    identity: Identity


class Heartbeat:
    """Heartbeat of this process, written to a file that the monitor of its node reads.

    Any thread may call its methods. After `finish`, heartbeats are ignored.

    Args:
        directory: Where the file is written. A rank creates the directory if it is missing; one that exists must be
            closed to other users (mode 0700). Use a directory of its own for each node and each start of a run, on a
            local file system, preferably that of `run_directory`.
        identity: Identity of this process.

    Raises:
        GuardError: The file cannot be written, the directory is not safe, or the system is not Linux.
    """

    slot: HeartbeatSlot | None = None
    """Where it is written; None for a `NoHeartbeat`."""

    _lock: DirectoryLock | None = None
    _stacks: StackWriter | None = None
    _crash: FileIO | None = None
    _device: DeviceWatch | None = None
    _device_sequence = 0

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory = Path(os.path.abspath(directory))
        self.slot = HeartbeatSlot(self._directory, identity)
        self._record = _first_record(UNSET)
        try:
            if identity.worker is None:
                self._lock = lock_directory(self._directory)
            else:
                check_private(self._directory)  # its rank has created it
            self._name = _free_name(self._directory, identity)
            self._map = self._create(identity)
        except OSError as error:
            self._leave_directory()
            raise GuardError(f"{directory}: the heartbeat of {identity.name} cannot be written: {error}.") from error

    def beat(
        self, phase: Phase, step: int | None = None, microbatch: int | None = None, cut_ids: Iterable[str] = ()
    ) -> None:
        """Writes a heartbeat: sets the phase and the values that are given; the others keep their last value.

        Args:
            phase: What the process does until the next heartbeat.
            step: Optimizer step, as in `trainer.global_step`.
            microbatch: Index of the microbatch within the step.
            cut_ids: Cuts that the process works on.
        """
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
            self._put_cuts(_joined(cut_ids))
        self._write()
        if self._device is not None:
            self.mark_device(phase)

    def beat_collective(self, step: int | None = None) -> None:
        """Writes a heartbeat in phase COLLECTIVE and counts the collective, which every rank has to enter."""
        if self._record[_END] == UNSET:
            self._record[_COLLECTIVES] += 1
            self.beat(Phase.COLLECTIVE, step)

    def note_cuts(self, cut_ids: Iterable[str]) -> None:
        """Writes a heartbeat with the cuts being loaded.

        An empty list means that nothing is being loaded. A loader worker must pass one when it becomes idle; otherwise
        it would be reported as stuck at its last cut.
        """
        if self._record[_END] == UNSET:
            self._put_cuts(_joined(cut_ids))
            self._write()

    def note_cut(self, cut_id: str) -> None:
        """Writes a heartbeat with the one cut being loaded, which replaces the list of cuts."""
        if self._record[_END] == UNSET:
            self._put_cuts(cut_id.replace("\n", " "))
            self._write()

    def note_wait(self, cut_id: str, location: str) -> None:
        """Writes a heartbeat: the process waits for bytes of the cut being loaded.

        Args:
            cut_id: Id of the cut that is being loaded.
            location: Path or URL of the bytes.
        """
        if self._record[_END] == UNSET:
            cut, place = cut_id.replace("\n", " "), location.replace("\n", " ")
            self._put_cuts(f"{cut}\n{WAIT_MARK}{place}")
            self._write()

    def refresh(self) -> None:
        """Writes a heartbeat; phase, step and cuts are unchanged."""
        if self._record[_END] == UNSET:
            self._write()

    def watch_device(self, new_event: Callable[[], DeviceEvent], read_trace: TraceReader | None = None) -> None:
        """Observes the device of this process from now on, in a thread that ends with `finish`.

        Every heartbeat that changes phase, step or microbatch then marks this point in the work of the device. The
        monitor compares the positions of devices instead of those of processes. Further calls do nothing.

        Args:
            new_event: Creates an event on the device; see `DeviceEvent`.
            read_trace: Returns the trace of torch's flight recorder, which the report contains.
        """
        if self._device is None and self._record[_END] == UNSET:
            trace = TraceWriter(self._directory, self._name, read_trace)
            self._device = DeviceWatch(new_event, self._write_device, trace.write_if_requested)

    def mark_device(self, phase: Phase) -> None:
        """Marks where a phase begins in the work of the device, without a heartbeat; does nothing without a device.

        Call it where a phase of the device ends and the process itself continues in its phase, for example where the
        gradients of this rank are computed and the device waits for those of the other ranks.
        """
        device, record = self._device, self._record
        if device is not None and record[_END] == UNSET:
            device.mark(phase, record[_STEP], record[_MICROBATCH])

    def describe(self, detail: str) -> None:
        """Adds a line to what a report says about this process, such as that it is slower than the others."""
        if self._record[_END] == UNSET:
            self._put_detail(detail)
            self._write()

    def finish(self, phase: Phase, detail: str = "", traceback: str = "") -> None:
        """Records how the process ends. FAILED and LEAVING are permanent: a later call changes nothing.

        Args:
            phase: DONE, FAILED or LEAVING.
            detail: One line of explanation, for example the last line of a traceback.
            traceback: The complete traceback; the monitor prints it if this process caused the run to end.

        Raises:
            GuardError: The phase is not a final one.
        """
        if not phase.is_final:
            raise GuardError(f"{phase.name} is not a final phase: expected DONE, FAILED or LEAVING.")
        if self._record[_END] in _FAILED_OR_LEAVING:
            return
        if traceback:
            with create_file(self._directory / f"{self._name}{TRACEBACK_SUFFIX}") as file:
                file.write(traceback.encode("utf-8", errors="replace"))
        self._put_detail(detail)
        self._record[_END] = phase
        self._write()
        if self._device is not None:
            self._device.stop()

    def arm(self) -> None:
        """Lets the monitor dump the stacks of this process and end it with exit code 44, even while it holds the GIL.

        Installs handlers for the signals 43 and 44, which are never removed. Unless faulthandler is in use already, the
        stacks are also written if the process crashes or is aborted.
        """
        if self._record[_END] != UNSET:
            return
        self._stacks = StackWriter(self._directory, self._name)
        end_on_signal()
        self._crash = dump_crashes(self._directory, self._name)
        ARMED.pack_into(self._map, ARMED_AT, 1)

    def close(self) -> None:
        """Stops dumping stacks and observing the device, and leaves the directory.

        To be called after `finish` in a process that continues without a stall guard. The last of the ranks and the
        monitor to leave the directory removes the files.
        """
        if self._device is not None:
            self._device.close()
            self._device = None
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        if self._crash is not None:
            stop_dumping_crashes(self._crash)
            self._crash = None
        self._leave_directory()

    def _leave_directory(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _create(self, identity: Identity) -> mmap.mmap:
        pid = os.getpid()
        started = start_ticks(pid)
        if started is None:
            raise GuardError("The stall guard needs Linux: there is no /proc here. Disable the stall guard.")
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        data = header(identity, self._name, pid, started, error_file)
        if len(data) > RECORDS_AT[0]:
            data = header(identity, self._name, pid, started, None)
        partial = self._directory / f".{self._name}.{pid}{PARTIAL_SUFFIX}"
        # The whole file is allocated now: a memory-mapped page that finds the disk full later would kill the process.
        with create_file(partial) as file:
            os.posix_fallocate(file.fileno(), 0, FILE_SIZE)
            file.write(data)
            self._map = mmap.mmap(file.fileno(), FILE_SIZE)
        self._write()
        partial.rename(self._directory / f"{self._name}{BEAT_SUFFIX}")
        return self._map

    def _put_cuts(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        if len(data) > TEXT_SIZE:
            data = truncated_utf8(text)
        record = self._record
        record[_CUTS_VERSION] += 1
        at = CUTS_AT[record[_CUTS_VERSION] & 1]
        self._map[at : at + len(data)] = data
        record[_CUTS_SIZE] = len(data)

    def _put_detail(self, detail: str) -> None:
        data = truncated_utf8(detail)
        self._map[DETAIL_AT : DETAIL_AT + len(data)] = data
        self._record[_DETAIL_SIZE] = len(data)

    def _write(self) -> None:
        record = self._record
        sequence = record[_SEQUENCE] + 1
        record[_SEQUENCE] = record[_SEQUENCE_AGAIN] = sequence
        record[_BEAT_NS] = _now()
        _pack(self._map, RECORDS_AT[sequence & 1], *record)

    def _write_device(self, position: DevicePosition | None) -> None:
        """Writes what the device executes, and that it was observed now; called by the thread that observes it."""
        self._device_sequence += 1
        phase, step, microbatch = position or (UNSET, None, None)
        sequence = self._device_sequence
        DEVICE_RECORD.pack_into(
            self._map,
            DEVICE_RECORDS_AT[sequence & 1],
            sequence,
            _now(),
            phase,
            UNSET if step is None else step,
            UNSET if microbatch is None else microbatch,
            sequence,
        )


class NoHeartbeat(Heartbeat):
    """The heartbeat of a process that nobody watches. It ended before it began, so every method returns at once."""

    def __init__(self) -> None:
        self._record = _first_record(Phase.LEAVING)


def _first_record(end: int) -> list[int]:
    record = [0] * len(_FIELDS)
    record[_PHASE], record[_END] = Phase.STARTING, end
    for field in (_STEP, _MICROBATCH, _FIRST_STEP):
        record[field] = UNSET
    return record


def _joined(cut_ids: Iterable[str]) -> str:
    """Joins ids with newlines; stops once they exceed the space in the file."""
    taken, size = [], 0
    for cut_id in cut_ids:
        taken.append(cut_id.replace("\n", " "))
        size += len(cut_id) + 1
        if size > TEXT_SIZE:
            break
    return "\n".join(taken)


def _free_name(directory: Path, identity: Identity) -> str:
    """Returns the base name of a process's files. A loader worker avoids the name of another worker that still runs."""
    name = identity.name
    for number in itertools.count(2):
        other = None if identity.worker is None else read_heartbeat(directory / f"{name}{BEAT_SUFFIX}")
        if other is None or process_state(other.pid, other.start_ticks).has_ended:
            break
        name = f"{identity.name}.{number}"
    return name

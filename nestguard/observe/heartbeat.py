"""Heartbeats: each process records what it is doing in a memory-mapped file that the monitor of its node reads.

`heartbeat_file` has the layout of the file and its reader. `current` returns the heartbeat of this process, to which
any code can write; loader workers start their own.
"""

import itertools
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from nestguard.observe.device import DeviceEvent, DeviceWatch, TraceReader, write_trace_if_requested
from nestguard.observe.directory import (
    BEAT_SUFFIX,
    PARTIAL_SUFFIX,
    TRACEBACK_SUFFIX,
    DirectoryLock,
    check_private,
    create_file,
    lock_directory,
)
from nestguard.observe.heartbeat_file import (
    FILE_SIZE,
    MAGIC,
    UNSET,
    VERSION,
    WAIT_MARK,
    DeviceRecord,
    HeartbeatFile,
    Record,
    read_heartbeat,
    truncated_utf8,
    write_copy,
)
from nestguard.observe.process import process_state, start_ticks
from nestguard.observe.stacks import StackWriter, dump_crashes, end_on_signal, stop_dumping_crashes
from nestguard.observe.view import DevicePosition, GuardError, Identity, Phase

_log = logging.getLogger(__name__)
_now = time.monotonic_ns
_FAILED_OR_LEAVING = (Phase.FAILED, Phase.LEAVING)


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
            local file system, preferably the result of `run_directory`.
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

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory = Path(os.path.abspath(directory))
        self.slot = HeartbeatSlot(self._directory, identity)
        self._record = _first_record(UNSET)
        self._device_record = DeviceRecord()
        try:
            if identity.worker is None:
                self._lock = lock_directory(self._directory)
            else:
                check_private(self._directory)  # its rank has created it
            self._name = _free_name(self._directory, identity)
            self._file = self._create(identity)
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
        if record.final_phase != UNSET:
            return
        record.phase = phase
        if step is not None:
            record.step = step
            if record.first_step == UNSET:
                record.first_step = step
        if microbatch is not None:
            record.microbatch = microbatch
        if cut_ids:
            self._put_cuts(_joined(cut_ids))
        self._write()
        if self._device is not None:
            self.mark_device(phase)

    def beat_collective(self, step: int | None = None) -> None:
        """Writes a heartbeat in phase COLLECTIVE and counts the collective, which every rank has to enter."""
        if self._record.final_phase == UNSET:
            self._record.collectives += 1
            self.beat(Phase.COLLECTIVE, step)

    def note_cuts(self, cut_ids: Iterable[str]) -> None:
        """Writes a heartbeat with the cuts being loaded.

        An empty list means that nothing is being loaded. A loader worker must pass one when it becomes idle; otherwise
        it would be reported as stuck at its last cut.
        """
        self._note(_joined(cut_ids))

    def note_cut(self, cut_id: str) -> None:
        """Writes a heartbeat with the one cut being loaded, which replaces the list of cuts."""
        self._note(_joined([cut_id]))

    def note_wait(self, cut_id: str, location: str) -> None:
        """Writes a heartbeat: the process waits for bytes of the cut being loaded.

        Args:
            cut_id: Id of the cut that is being loaded.
            location: Path or URL of the bytes.
        """
        self._note(_joined([cut_id, f"{WAIT_MARK}{location}"]))

    def refresh(self) -> None:
        """Writes a heartbeat; phase, step and cuts are unchanged."""
        if self._record.final_phase == UNSET:
            self._write()

    def watch_device(self, new_event: Callable[[], DeviceEvent], read_trace: TraceReader | None = None) -> None:
        """Observes the device of this process from now on, in a thread that ends with `finish`.

        Every heartbeat that changes phase, step or microbatch then marks this point in the work of the device. The
        monitor compares positions of devices instead of processes. Further calls do nothing.

        Args:
            new_event: Creates an event on the device; see `DeviceEvent`.
            read_trace: Returns the trace of torch's flight recorder, which the report contains.
        """
        if self._device is None and self._record.final_phase == UNSET:
            on_poll = partial(write_trace_if_requested, self._directory, self._name, read_trace)
            self._device = DeviceWatch(new_event, self._write_device, on_poll)

    def mark_device(self, phase: Phase) -> None:
        """Marks where a phase begins in the work of the device, without a heartbeat; does nothing without a device.

        Call it where a phase of the device ends and the process itself continues in its phase, for example where the
        gradients of this rank are computed and the device waits for the gradients of the other ranks.
        """
        device, record = self._device, self._record
        if device is not None and record.final_phase == UNSET:
            device.mark(phase, record.step, record.microbatch)

    def describe(self, detail: str) -> None:
        """Adds a line to what a report says about this process, such as that it is slower than the others."""
        if self._record.final_phase == UNSET:
            self._file.detail = truncated_utf8(detail)
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
        if self._record.final_phase in _FAILED_OR_LEAVING:
            return
        if traceback:
            with create_file(self._directory / f"{self._name}{TRACEBACK_SUFFIX}") as file:
                file.write(traceback.encode("utf-8", errors="replace"))
        self._file.detail = truncated_utf8(detail)
        self._record.final_phase = phase
        self._write()
        if self._device is not None:
            self._device.stop()

    def arm(self) -> None:
        """Lets the monitor dump the stacks of this process and end it with exit code 44, even while it holds the GIL.

        Installs handlers for the signals 43 and 44, which are never removed. Unless faulthandler is in use already, the
        stacks are also written if the process crashes or is aborted.
        """
        if self._record.final_phase != UNSET:
            return
        self._stacks = StackWriter(self._directory, self._name)
        end_on_signal()
        self._crash = dump_crashes(self._directory, self._name)
        self._file.is_armed = 1

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

    def _create(self, identity: Identity) -> HeartbeatFile:
        pid = os.getpid()
        started = start_ticks(pid)
        if started is None:
            raise GuardError("The stall guard needs Linux: there is no /proc here. Disable the stall guard.")
        unfinished = self._directory / f".{self._name}.{pid}{PARTIAL_SUFFIX}"
        # The whole file is allocated now: a memory-mapped page that finds the disk full later would kill the process.
        with create_file(unfinished) as file:
            os.posix_fallocate(file.fileno(), 0, FILE_SIZE)
            self._file = HeartbeatFile.from_buffer(mmap.mmap(file.fileno(), FILE_SIZE))
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        description = {"identity": asdict(identity), "name": self._name, "error_file": error_file}
        self._file.magic, self._file.version = MAGIC, VERSION
        self._file.pid, self._file.start_ticks = pid, started
        self._file.description = json.dumps(description).encode()
        self._write()
        unfinished.rename(self._directory / f"{self._name}{BEAT_SUFFIX}")
        return self._file

    def _note(self, cuts: str) -> None:
        if self._record.final_phase == UNSET:
            self._put_cuts(cuts)
            self._write()

    def _put_cuts(self, text: str) -> None:
        self._record.cuts_version += 1
        self._file.cuts[self._record.cuts_version & 1].value = truncated_utf8(text)

    def _write(self) -> None:
        self._record.beat_ns = _now()
        write_copy(self._file.records, self._record)

    def _write_device(self, position: DevicePosition | None) -> None:
        """Writes what the device executes, and that it was observed now; called by the thread that observes it."""
        phase, step, microbatch = position or (UNSET, None, None)
        record = self._device_record
        record.observed_ns, record.phase = _now(), phase
        record.step = UNSET if step is None else step
        record.microbatch = UNSET if microbatch is None else microbatch
        write_copy(self._file.device_records, record)


class NoHeartbeat(Heartbeat):
    """The heartbeat of a process that is not watched. It has already ended, so every method returns at once."""

    def __init__(self) -> None:
        self._record = _first_record(Phase.LEAVING)


def _first_record(final_phase: int) -> Record:
    return Record(phase=Phase.STARTING, final_phase=final_phase, step=UNSET, microbatch=UNSET, first_step=UNSET)


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.replace("\n", " ") for line in lines)


def _free_name(directory: Path, identity: Identity) -> str:
    """Returns the base name of a process's files. A loader worker avoids the name of another worker that still runs."""
    name = identity.name
    for number in itertools.count(2):
        other = None if identity.worker is None else read_heartbeat(directory / f"{name}{BEAT_SUFFIX}")
        if other is None or process_state(other.pid, other.start_ticks).has_ended:
            break
        name = f"{identity.name}.{number}"
    return name


_current: Heartbeat = NoHeartbeat()
_parent: HeartbeatSlot | None = None
"""In a forked process, the heartbeat slot of the process that it was forked from."""

_handles_fork = False
"""Whether `_reset_after_fork` is registered; a registration cannot be removed."""


def current() -> Heartbeat:
    """Returns the heartbeat of this process; a `NoHeartbeat` while no stall guard is active."""
    return _current


def set_current(heartbeat: Heartbeat) -> None:
    """Sets the heartbeat of this process. A forked child has none until it calls `start_worker`."""
    global _current, _handles_fork
    _current = heartbeat
    if not _handles_fork and heartbeat.slot is not None:
        os.register_at_fork(after_in_child=_reset_after_fork)
        _handles_fork = True


def start_worker(worker_id: int, num_workers: int, slot: HeartbeatSlot | None = None) -> None:
    """Starts the heartbeat of a loader worker; to be called when the worker starts.

    Does nothing while no stall guard is active. If the heartbeat cannot be written, a warning is logged and the worker
    runs without one.

    Args:
        worker_id: Id of the worker, from 0.
        num_workers: Number of workers of the loader.
        slot: Heartbeat slot of the worker's rank, `current().slot`. Required if the worker is not forked from the rank.
    """
    slot = slot or _parent or _current.slot
    if slot is None:
        return
    assert 0 <= worker_id < num_workers
    try:
        heartbeat = Heartbeat(slot.directory, replace(slot.identity, worker=worker_id))
        heartbeat.arm()
    except (GuardError, OSError) as error:
        _log.warning("loader worker %d runs without a heartbeat and is not watched: %s", worker_id, error)
        return
    heartbeat.beat(Phase.LOADING)
    set_current(heartbeat)
    if "multiprocessing" in sys.modules:
        from multiprocessing.util import Finalize

        # Processes started by multiprocessing exit without running atexit handlers.
        Finalize(None, heartbeat.finish, args=(Phase.DONE,), exitpriority=0)


def _reset_after_fork() -> None:
    global _current, _parent
    _parent = _current.slot or _parent
    _current = NoHeartbeat()

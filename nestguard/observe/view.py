"""What is known about the processes of a run, and about nodes that have stopped sending messages.

Observation, diagnosis and connections share these types. Nothing here reads a file or asks the operating system.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

INVALID_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that reading foreign data, with missing keys or values of the wrong type, can raise."""


class GuardError(Exception):
    """The stall guard cannot be set up as requested. The message, a single string, gives the reason and the remedy.

    `nestguard` raises no other exception on purpose.
    """


class Phase(IntEnum):
    """What a process is doing, in the order of a training step; the last three phases are final."""

    STARTING = 0
    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    COLLECTIVE = 4
    OPTIMIZER = 5
    VALIDATION = 6
    CHECKPOINT = 7
    FINISHING = 8
    DONE = 9
    FAILED = 10
    LEAVING = 11
    """The process was asked to stop, for example by SIGTERM, and may exit at any time."""

    @property
    def is_final(self) -> bool:
        """Whether the process writes no more heartbeats after this phase."""
        return self >= Phase.DONE


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identifies one process of a run: a rank or one of its loader workers."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    host: str
    worker: int | None = None
    """Id of the loader worker; None for the rank itself."""

    @property
    def name(self) -> str:
        """Base name of the process's files, for example `rank-3` or `rank-3.worker-0`."""
        return f"rank-{self.rank}" + ("" if self.worker is None else f".worker-{self.worker}")


class DevicePosition(NamedTuple):
    """What the device of a process executes: the phase that it has begun last, behind all earlier work."""

    phase: Phase
    step: int | None
    microbatch: int | None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Content of a process's heartbeat file at one moment. The defaults stand for a missing file."""

    identity: Identity
    name: str
    """Base name of the process's files; has a suffix if two loaders have a worker with the same id."""

    pid: int = 0
    start_ticks: int = 0
    is_armed: bool = False
    """Whether the process handles the signals that dump its stacks and that end it."""

    error_file: str | None = None
    """File from which torchrun reads the reason of a failure; None without torchrun."""

    beat_ns: int = 0
    """Time of the last heartbeat, in ns of this machine's CLOCK_MONOTONIC."""

    phase: Phase = Phase.STARTING
    """Current phase; the final one after the process has reported its end."""

    last_phase: Phase = Phase.STARTING
    """Current phase, or the last one before the final phase."""

    step: int | None = None
    microbatch: int | None = None
    collectives: int = 0
    """Number of collectives entered since the start of the process."""

    first_step: int | None = None
    """Step that the process began with; greater than 0 if the run was resumed."""

    cuts: tuple[str, ...] = ()
    """Ids of the cuts being loaded; empty for an idle loader worker."""

    detail: str = ""
    """How the process ended, in one line; while it runs, what it says about itself, such as that it is slow."""

    waits_for: str | None = None
    """Location of the bytes of the cut that the process waits for; None while it does not wait for bytes."""

    device: DevicePosition | None = None
    """Position of the device; None without one."""

    device_ns: int = 0
    """When the device was last observed, in ns of this machine's CLOCK_MONOTONIC; 0 without a device."""

    @property
    def actual_phase(self) -> Phase:
        """What is executed now: the phase of the device, which may be behind the process, or else of the process."""
        return self.phase if self.device is None else self.device.phase

    @property
    def has_stepped(self) -> bool:
        """Whether the process has finished a step since its start."""
        return self.first_step is not None and self.step is not None and self.step > self.first_step


class ProcessState(StrEnum):
    """State of a process: what the operating system reports, or why nothing is known about it."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    BLOCKED = "blocked"
    """In an uninterruptible system call, which no signal interrupts: nearly always a disk or a network file system."""

    STOPPED = "stopped"
    """Stopped by SIGSTOP, by the terminal, or by a debugger."""

    ZOMBIE = "zombie"
    GONE = "gone"
    NOT_STARTED = "not started"
    """The process is expected, but it has not written a heartbeat."""

    UNSEEN = "unseen"
    """There is no contact with the node of the process, so its state is unknown."""

    @property
    def has_ended(self) -> bool:
        """Whether the process no longer runs."""
        return self in (ProcessState.ZOMBIE, ProcessState.GONE)


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """A process as the monitor of its node sees it: its last heartbeat and its state in the operating system."""

    reading: Reading
    state: ProcessState
    age_s: float
    """Seconds since its last heartbeat."""

    ended_s: float = 0.0
    """Seconds since the process ended or, if it is unseen, since contact with its node was lost.

    0 while the process runs, and if there was never any contact with its node.
    """

    exit_signal: int | None = None
    """Signal that ended the process; None if it is not known, or if there was none."""

    @property
    def name(self) -> str:
        """Unique name of the process, for example `rank-3.worker-0`."""
        return self.reading.name

    @property
    def rank(self) -> int:
        """Rank of the process; for a loader worker, the rank that it loads for."""
        return self.reading.identity.rank

    @property
    def is_rank(self) -> bool:
        """Whether the process is a rank, not a loader worker."""
        return self.reading.identity.worker is None

    @property
    def is_live(self) -> bool:
        """Whether the process is known to take part in the run: it has not ended and its node is in contact."""
        return not self.reading.phase.is_final and not self.state.has_ended and not self.is_unseen

    @property
    def is_unseen(self) -> bool:
        """Whether there is no contact with the node of the process, so that its present state is unknown."""
        return self.state is ProcessState.UNSEEN

    @property
    def is_dead(self) -> bool:
        """Whether the process ended without recording how."""
        return self.state.has_ended and not self.reading.phase.is_final


class NodeSilence(NamedTuple):
    """A connected node whose monitor sends no messages."""

    host: str
    seconds: float
    """Time since the last message."""


def never_seen(identity: Identity, state: ProcessState, age_s: float = 0.0, ended_s: float = 0.0) -> ProcessView:
    """Returns the view of a rank that has not written a heartbeat."""
    reading = Reading(identity=identity, name=identity.name)
    return ProcessView(reading=reading, state=state, age_s=age_s, ended_s=ended_s)


def missing_ranks(views: Iterable[ProcessView], identity: Identity, disconnected_s: float) -> list[ProcessView]:
    """Returns unseen views for the ranks of the run that are not in `views`.

    Args:
        views: The processes that are known.
        identity: Identity of any rank of the run.
        disconnected_s: Seconds since the monitors lost their connection; 0 if they were never connected.
    """
    missing = set(range(identity.world_size)) - {view.rank for view in views if view.is_rank}
    size = identity.local_world_size
    return [
        never_seen(
            replace(identity, rank=rank, local_rank=rank % size, node_rank=rank // size, host="", worker=None),
            ProcessState.UNSEEN,
            ended_s=disconnected_s,
        )
        for rank in sorted(missing)
    ]


def ranks_text(ranks: Collection[int]) -> str:
    """Returns ranks in short form: `rank 3`, `ranks 1, 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + text

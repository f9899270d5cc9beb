"""What a follower sends about its ranks each second: what has changed, and the time on the clock of its node.

The first update of a connection contains the full view of each rank. Later ones contain a row of numbers for each rank
that has written a heartbeat or whose state has changed, and a full view again if anything else has. Loader workers and
the cuts of a batch are not part of an update: the coordinator asks for them when it has found a culprit.

A row gives the time of the last heartbeat on the clock of its node. Clocks of nodes are never compared: the age of a
heartbeat is its distance from the time of the newest update, on the same clock, plus the time since that update
arrived. A heartbeat without progress changes this time and is sent; silence is not, and the age grows by itself.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from nestguard.connect.frames import Message
from nestguard.diagnose.limits import StallLimits, may_stop_run
from nestguard.observe.view import DevicePosition, Identity, Phase, ProcessState, ProcessView, Reading

_STATES = tuple(ProcessState)
_OPTIONAL = (int, type(None))


_TYPES: Mapping[type, Mapping[str, Any]] = {kind: get_type_hints(kind) for kind in (Identity, Reading)}

INVALID_MESSAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that reading a message with missing keys or values of the wrong type can raise."""


class Row(NamedTuple):
    """The part of a rank's view that changes in every step. Times are ms on the clock of the node."""

    rank: int
    since_ms: int
    """When the last heartbeat was written."""

    ended_ms: int
    """When the process ended; only if it has."""

    state: int
    """Index into the members of `ProcessState`."""

    phase: int
    last_phase: int
    collectives: int
    step: int | None
    microbatch: int | None
    first_step: int | None
    device: tuple[int, int | None, int | None] | None = None
    """Position of the device. A row without one is sent without this field."""


class UpdateEncoder:
    """Encodes the updates of one connection, in the order in which they are sent."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._fixed: dict[int, tuple[Any, ...]] = {}

    def encode(self, views: Iterable[ProcessView], at_s: float) -> Message:
        """Returns the message with all changes since the previous call.

        Args:
            views: All processes of the node; loader workers are ignored.
            at_s: When the views were taken, in seconds of CLOCK_MONOTONIC.
        """
        message: Message = {"type": "update", "at_ms": round(1000 * at_s)}
        rows: list[Sequence[Any]] = []
        full = []
        for view in views:
            if not view.is_rank:
                continue
            row = _row(view, at_s)
            fixed = _fixed(view)
            if fixed != self._fixed.get(row.rank):
                self._fixed[row.rank] = fixed
                full.append(view_to_json(_without_cuts(view)))
            elif row == self._rows.get(row.rank):
                continue
            self._rows[row.rank] = row
            rows.append(row if row.device is not None else row[:-1])
        return message | ({"rows": rows} if rows else {}) | ({"full": full} if full else {})


class NodeRanks:
    """The ranks of one node, as the updates of its follower describe them.

    Attributes:
        has_update: Whether an update has arrived.
    """

    def __init__(self) -> None:
        self.has_update = False
        self._at_ms = 0
        self._received_at = 0.0
        self._rows: dict[int, Row] = {}
        self._full: dict[int, ProcessView] = {}

    def apply(self, message: Message, received_at: float) -> None:
        """Applies an update that arrived at `received_at`, in seconds of `time.monotonic()`.

        Raises one of `INVALID_MESSAGE_ERRORS` if the message is malformed; nothing is changed then.
        """
        full = [view_from_json(view) for view in message.get("full", ())]
        known = self._full | {view.rank: view for view in full}
        rows = [_checked_row(values) for values in message.get("rows", ())]
        if not all(row.rank in known for row in rows) or not {view.rank for view in full} <= {row.rank for row in rows}:
            raise ValueError("an update of ranks that are not described")
        self._at_ms = int(message["at_ms"])
        self._received_at = received_at
        self._full = known
        self._rows.update((row.rank, row) for row in rows)
        self.has_update = True

    def views(self, now: float) -> Iterator[ProcessView]:
        """Returns the view of each rank at `now`, in seconds of `time.monotonic()`. Their cuts are left out."""
        for rank, row in self._rows.items():
            view = self._full[rank]
            reading = replace(
                view.reading,
                phase=Phase(row.phase),
                last_phase=Phase(row.last_phase),
                collectives=row.collectives,
                step=row.step,
                microbatch=row.microbatch,
                first_step=row.first_step,
                device=None if row.device is None else checked_position(row.device),
            )
            state = _STATES[row.state]
            ended_s = self._age_s(row.ended_ms, now) if state.has_ended else 0.0
            yield ProcessView(
                reading=reading,
                state=state,
                age_s=self._age_s(row.since_ms, now),
                ended_s=ended_s,
                exit_signal=view.exit_signal,
            )

    def may_stop_run(self, limits: StallLimits, now: float, *, is_lost: bool) -> bool:
        """Returns whether one of the ranks may be a reason to stop the run; see `limits.may_stop_run`.

        Args:
            limits: Result of `quick_limits`.
            now: Seconds of `time.monotonic()`.
            is_lost: Whether contact with the node was lost, so that its ranks are unseen.
        """
        return any(
            may_stop_run(
                Phase(row.phase),
                ProcessState.UNSEEN if is_lost else _STATES[row.state],
                self._age_s(row.since_ms, now),
                has_stepped=row.first_step is not None and row.step is not None and row.step > row.first_step,
                limits=limits,
            )
            for row in self._rows.values()
        )

    def _age_s(self, since_ms: int, now: float) -> float:
        return max(0.0, (self._at_ms - since_ms) / 1000 + now - self._received_at)


def aged(view: ProcessView, seconds: float) -> ProcessView:
    """Returns a view with its ages advanced by some seconds."""
    ended_s = view.ended_s + seconds if view.state.has_ended else 0.0
    return replace(view, age_s=view.age_s + seconds, ended_s=ended_s)


def encode_details(views: Sequence[ProcessView], at_s: float) -> Message:
    """Returns the message with everything that is known about the processes of a node, their ages advanced to now."""
    seconds = time.monotonic() - at_s
    return {"type": "details", "views": [view_to_json(aged(view, seconds)) for view in views]}


def _row(view: ProcessView, at_s: float) -> Row:
    reading = view.reading
    return Row(
        rank=view.rank,
        since_ms=round(1000 * (at_s - view.age_s)),
        ended_ms=round(1000 * (at_s - view.ended_s)) if view.state.has_ended else 0,
        state=_STATES.index(view.state),
        phase=int(reading.phase),
        last_phase=int(reading.last_phase),
        collectives=reading.collectives,
        step=reading.step,
        microbatch=reading.microbatch,
        first_step=reading.first_step,
        device=None if reading.device is None else (int(reading.device.phase), *reading.device[1:]),
    )


def _fixed(view: ProcessView) -> tuple[Any, ...]:
    """Returns the part of a view that is neither in a row nor left out of updates."""
    reading = view.reading
    return (
        reading.identity,
        reading.name,
        reading.pid,
        reading.start_ticks,
        reading.is_armed,
        reading.error_file,
        reading.detail,
        view.exit_signal,
    )


def _without_cuts(view: ProcessView) -> ProcessView:
    return replace(view, reading=replace(view.reading, cuts=(), waits_for=None))


def _checked_row(values: Sequence[Any]) -> Row:
    """Raises one of `INVALID_MESSAGE_ERRORS` unless the values are those of a row."""
    row = Row(*values)
    if not all(type(value) is int for value in row[:7]) or not all(type(value) in _OPTIONAL for value in row[7:10]):
        raise TypeError(f"a row is {values!r}")
    if not (0 <= row.state < len(_STATES) and 0 <= row.phase < len(Phase) and 0 <= row.last_phase < len(Phase)):
        raise ValueError(f"a row is {values!r}")
    if row.device is not None:
        checked_position(row.device)
    return row


def view_to_json(view: ProcessView) -> dict[str, Any]:
    """Returns the JSON form of a view. It holds ages, not times, because the clocks of nodes are not synchronised."""
    reading = asdict(view.reading)
    return {
        "reading": {**reading, "beat_ns": 0, "device_ns": 0, "phase": view.reading.phase.name},
        "state": view.state.value,
        "age_s": view.age_s,
        "ended_s": view.ended_s,
        "exit_signal": view.exit_signal,
    }


def view_from_json(data: Mapping[str, Any]) -> ProcessView:
    """Returns the view that `view_to_json` converted, with `beat_ns` and `device_ns` 0.

    Raises one of `INVALID_MESSAGE_ERRORS` if a key is missing or a value has the wrong type.
    """
    fields = data["reading"]
    identity = Identity(**fields["identity"])
    reading = Reading(
        **{
            **fields,
            "identity": identity,
            "phase": Phase[fields["phase"]],
            "last_phase": Phase(fields["last_phase"]),
            "cuts": tuple(fields["cuts"]),
            "device": None if fields["device"] is None else checked_position(fields["device"]),
        }
    )
    _check_types(identity)
    _check_types(reading)
    return ProcessView(
        reading=reading,
        state=ProcessState(data["state"]),
        age_s=float(data["age_s"]),
        ended_s=float(data["ended_s"]),
        exit_signal=None if data["exit_signal"] is None else int(data["exit_signal"]),
    )


def checked_position(values: Sequence[Any]) -> DevicePosition:
    """Returns the position of a device: phase, step and microbatch of a message.

    Raises one of `INVALID_MESSAGE_ERRORS` if the number or the types of the values are wrong.
    """
    phase, step, microbatch = values
    if not all(value is None or type(value) is int for value in (step, microbatch)):
        raise TypeError(f"the position of a device is {values!r}")
    return DevicePosition(Phase(phase), step, microbatch)


def _check_types(record: Identity | Reading) -> None:
    """Raises TypeError unless every field of a dataclass has its annotated type."""
    for name, hint in _TYPES[type(record)].items():
        value = getattr(record, name)
        if get_origin(hint) is tuple:
            is_valid = all(isinstance(item, get_args(hint)[0]) for item in value)
        else:
            is_valid = isinstance(value, hint)
        if not is_valid:
            raise TypeError(f"{name} is {value!r}")

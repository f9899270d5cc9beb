"""The message that a follower sends each second: the processes of its node as JSON.

Messages carry ages, not times, because the clocks of nodes are not synchronised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nestguard.connect.channel import Message
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.view import DevicePosition, Identity, Phase, ProcessState, ProcessView, Reading

_AnyRecord = TypeVar("_AnyRecord", Identity, Reading)
_TYPES: Mapping[type, Mapping[str, Any]] = {kind: get_type_hints(kind) for kind in (Identity, Reading)}


def views_message(views: Sequence[ProcessView], limits: StallLimits) -> Message:
    """Returns the message about the processes of a node.

    Cuts and loader workers are left out unless a diagnosis can name them: if they are late, dead or stopped.
    """
    sent = []
    for view in views:
        is_late = view.is_dead or view.age_s > limits.shortest_s / 2
        if view.is_rank:
            sent.append(view if is_late else replace(view, reading=replace(view.reading, cuts=(), waits_for=None)))
        elif view.is_dead or view.state is ProcessState.STOPPED or (is_late and view.reading.cuts):
            sent.append(view)
    return {"type": "views", "views": [view_to_json(view) for view in sent]}


def views_of(message: Message) -> list[ProcessView]:
    """Returns the processes in a message; raises one of `INVALID_VALUE_ERRORS` if it is malformed."""
    return [view_from_json(view) for view in message["views"]]


def aged(view: ProcessView, seconds: float) -> ProcessView:
    """Returns a view with its ages advanced by some seconds."""
    ended_s = view.ended_s + seconds if view.state.has_ended else 0.0
    return replace(view, age_s=view.age_s + seconds, ended_s=ended_s)


def view_to_json(view: ProcessView) -> dict[str, Any]:
    """Returns the JSON form of a view, without the times of its node's clock."""
    reading = asdict(view.reading)
    return {
        "reading": {**reading, "beat_ns": 0, "device_ns": 0},
        "state": view.state.value,
        "age_s": view.age_s,
        "ended_s": view.ended_s,
        "exit_signal": view.exit_signal,
    }


def view_from_json(data: Mapping[str, Any]) -> ProcessView:
    """Returns the view that `view_to_json` converted.

    Raises one of `INVALID_VALUE_ERRORS` if a key is missing or a value has the wrong type.
    """
    fields = data["reading"]
    reading = Reading(
        **{
            **fields,
            "identity": _checked(Identity(**fields["identity"])),
            "phase": Phase(fields["phase"]),
            "last_phase": Phase(fields["last_phase"]),
            "cuts": tuple(fields["cuts"]),
            "device": None if fields["device"] is None else _position(*fields["device"]),
        }
    )
    return ProcessView(
        reading=_checked(reading),
        state=ProcessState(data["state"]),
        age_s=float(data["age_s"]),
        ended_s=float(data["ended_s"]),
        exit_signal=None if data["exit_signal"] is None else int(data["exit_signal"]),
    )


def _position(phase: int, step: int | None, microbatch: int | None) -> DevicePosition:
    if not all(value is None or type(value) is int for value in (step, microbatch)):
        raise TypeError(f"the position of a device is step {step!r}, microbatch {microbatch!r}")
    return DevicePosition(Phase(phase), step, microbatch)


def _checked(record: _AnyRecord) -> _AnyRecord:
    """Raises TypeError unless every field of a dataclass has its annotated type."""
    for name, hint in _TYPES[type(record)].items():
        value = getattr(record, name)
        if get_origin(hint) is tuple:
            is_valid = all(isinstance(item, get_args(hint)[0]) for item in value)
        else:
            is_valid = isinstance(value, hint)
        if not is_valid:
            raise TypeError(f"{name} is {value!r}")
    return record

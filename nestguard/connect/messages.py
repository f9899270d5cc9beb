"""What a follower sends each second: the ranks of its node, and whether they may be a reason to stop the run.

Loader workers and the cuts of a batch are sent only where they can be named as the cause: while their rank loads, if
they are stopped, dead, or without a heartbeat for half of the limit. Ages are sent, not times, because the clocks of
nodes are not synchronised.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nestguard.connect.channel import MAX_MESSAGE_BYTES, SIZE_BYTES, Message, pack, unpack
from nestguard.diagnose.limits import StallLimits, limits_beside_silence, may_stop_run
from nestguard.observe.view import DevicePosition, Identity, Phase, ProcessState, ProcessView, Reading

_NAMED_STATES = (ProcessState.STOPPED, ProcessState.ZOMBIE, ProcessState.GONE)
_AnyRecord = TypeVar("_AnyRecord", Identity, Reading)
_TYPES: Mapping[type, Mapping[str, Any]] = {kind: get_type_hints(kind) for kind in (Identity, Reading)}


def views_message(views: Sequence[ProcessView], limits: StallLimits) -> Message:
    """Returns the message about the processes of a node.

    Its keys `may_stop` and `may_stop_beside_silence` spare the coordinator the diagnosis of thousands of ranks each
    second: it is needed only if one of these is true.
    """
    quick = limits_beside_silence(limits)
    return {
        "type": "views",
        "may_stop": any(may_stop_run(view, limits) for view in views),
        "may_stop_beside_silence": any(may_stop_run(view, quick) for view in views),
        "views": pack_views([view_to_json(view) for view in _told(views, limits)]),
    }


def pack_views(views: Sequence[Mapping[str, Any]]) -> str:
    """Returns views in JSON as one text, which the coordinator reads only if it needs them."""
    return base64.b64encode(pack({"views": views})[SIZE_BYTES:]).decode()


def unpack_views(packed: str) -> list[ProcessView]:
    """Returns the views that `pack_views` has packed; raises one of `INVALID_VALUE_ERRORS` if they are none."""
    views = unpack(base64.b64decode(packed, validate=True), MAX_MESSAGE_BYTES)["views"]
    return [view_from_json(view) for view in views]


def _told(views: Sequence[ProcessView], limits: StallLimits) -> list[ProcessView]:
    """Returns the ranks, and the loader workers that could be named as the cause of a stall, with their cuts."""
    loading = {
        view.rank: limits.limit_of(view.reading) / 2
        for view in views
        if view.is_rank and Phase.LOADING in (view.reading.phase, view.reading.actual_phase)
    }
    told = []
    for view in views:
        is_slow = view.rank in loading and (view.state in _NAMED_STATES or view.age_s > loading[view.rank])
        if view.is_rank and not is_slow:
            view = replace(view, reading=replace(view.reading, cuts=(), waits_for=None))
        if view.is_rank or is_slow:
            told.append(view)
    return told


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

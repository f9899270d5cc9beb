"""The message that a follower sends each second: the processes of its node as JSON.

Messages carry ages, not times, because the clocks of nodes are not synchronised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from nestguard.connect.channel import Message
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.observe.view import DevicePosition, Identity, Phase, ProcessState, ProcessView, Reading


def views_message(views: Sequence[ProcessView], limits: StallLimits) -> Message:
    """Returns the message about the processes of a node.

    Cuts and loader workers are left out unless a diagnosis can name them, because they are late, dead or stopped.
    """
    sent = []
    for view in views:
        is_late = view.is_dead or view.age_s > limits.shortest_s / 2
        reading = replace(view.reading, beat_ns=0, device_ns=0)  # times of this node
        if view.is_rank and not is_late:
            reading = replace(reading, cuts=(), waits_for=None)
        if view.is_rank or view.is_dead or view.state is ProcessState.STOPPED or (is_late and view.reading.cuts):
            sent.append(replace(view, reading=reading))
    return {"type": "views", "views": [asdict(view) for view in sent]}


def views_of(message: Message) -> list[ProcessView]:
    """Returns the processes in a message; raises one of `INVALID_VALUE_ERRORS` if it is malformed."""
    return [_view_of(view) for view in message["views"]]


def aged(view: ProcessView, seconds: float) -> ProcessView:
    """Returns a view with its ages advanced by some seconds."""
    ended_s = view.ended_s + seconds if view.state.has_ended else 0.0
    return replace(view, age_s=view.age_s + seconds, ended_s=ended_s)


def _view_of(data: Mapping[str, Any]) -> ProcessView:
    reading = data["reading"]
    device = reading["device"] and DevicePosition(*reading["device"])
    parsed = {
        "identity": Identity(**reading["identity"]),
        "phase": Phase(reading["phase"]),
        "last_phase": Phase(reading["last_phase"]),
        "cuts": tuple(reading["cuts"]),
        "device": device and device._replace(phase=Phase(device.phase)),
    }
    return ProcessView(**{**data, "reading": Reading(**{**reading, **parsed}), "state": ProcessState(data["state"])})

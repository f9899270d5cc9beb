"""The dicts of cuts, in the form that Lhotse writes: of an entry, of its windows, and of resampled recordings.

Building Lhotse's objects for every line of a large manifest would take longer than everything else together.
"""

import math
from typing import Any

from nestdata.audio.decode import samples_in
from nestdata.corpus import members
from nestdata.prepare.header import AudioInfo
from nestdata.prepare.inputs.audio import Command, File, Member
from nestdata.prepare.inputs.entry import LABELS, Entry


def source_at(audio: File | Command | Member) -> tuple[str, str]:
    """Returns type and source of a Lhotse `AudioSource`."""
    if isinstance(audio, File):
        return "file", audio.location
    if isinstance(audio, Command):
        return "command", audio.command
    found = members.source_at(audio.shard, audio.offset, audio.length)
    return found["type"], found["source"]


def cut_row(
    entry: Entry, audio: File | Command | Member, info: AudioInfo, duration: float, channel: int
) -> dict[str, Any]:
    """Returns the cut of an entry that is not a Lhotse cut."""
    cut_id, channels = entry.cut_id, list(range(info.num_channels))
    kind, source = source_at(audio)
    row: dict[str, Any] = {
        "id": cut_id,
        "start": entry.offset,
        "duration": duration,
        "channel": channel,
        "supervisions": [],
        "recording": {
            "id": cut_id,
            "sources": [{"type": kind, "channels": channels, "source": source}],
            "sampling_rate": info.rate,
            "num_samples": info.num_frames,
            "duration": info.num_frames / info.rate,
            "channel_ids": channels,
        },
        "type": "MonoCut",
    }
    labels, custom = {}, {}
    for key, value in (entry.labels or {}).items():
        if key not in LABELS:
            custom[key] = value
        elif value is not None:
            labels[LABELS[key]] = value if isinstance(value, str) else str(value)
    if labels:
        span = {"id": cut_id, "recording_id": cut_id, "start": 0.0, "duration": duration, "channel": channel}
        row["supervisions"].append(span | labels)
    if custom:
        row["custom"] = custom
    return row


def windows(row: dict[str, Any], max_seconds: float | None, rate: int) -> list[dict[str, Any]]:
    """Returns a cut, or its windows: as few as the limit allows, all of the same length in whole samples.

    Args:
        row: The cut.
        max_seconds: Longest duration of a window; None to keep the cut whole.
        rate: Rate of the corpus in Hz.
    """
    if max_seconds is None:
        return [row]
    num_samples, max_samples = samples_in(row["duration"], rate), math.floor(round(max_seconds * rate, 8))
    if num_samples <= max_samples:
        return [row]
    num_windows = -(-num_samples // max_samples)
    step = num_samples // num_windows
    return [window_of(row, row["start"] + i * step / rate, step / rate) for i in range(num_windows)]


def resample(recording: dict[str, Any], rate: int) -> None:
    """Adds the transform by which Lhotse resamples a recording when it is loaded; modifies `recording`."""
    source_rate = recording["sampling_rate"]
    if source_rate == rate:
        return
    kwargs = {"source_sampling_rate": source_rate, "target_sampling_rate": rate}
    recording["num_samples"] = samples_in(recording["duration"], rate)
    recording["duration"] = recording["num_samples"] / rate
    recording["sampling_rate"] = rate
    transforms = recording.get("transforms") or []
    recording["transforms"] = [*transforms, {"name": "Resample", "kwargs": kwargs}]


def window_of(row: dict[str, Any], start: float, duration: float) -> dict[str, Any]:
    """Returns one window of a cut, with its labels but without text, alignment and features of the whole cut."""
    cut_id = f"{row['id']}@{start:.3f}+{duration:.3f}"
    span = {"id": cut_id, "start": 0.0, "duration": duration}
    labels = [{**item, **span} for item in row["supervisions"][:1]]
    for label in labels:
        label.pop("text", None)
        label.pop("alignment", None)
    recording = dict(row["recording"])
    window = {**row, "id": cut_id, "start": start, "duration": duration, "supervisions": labels, "recording": recording}
    window.pop("features", None)
    return window

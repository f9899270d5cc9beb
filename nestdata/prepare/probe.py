"""Looks at the audio behind an entry and makes cuts of it, or says why it cannot be used.

Cuts are made as the plain dicts that Lhotse writes, because building its objects for every line of a large manifest
would take longer than everything else together.
"""

import math
import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal, NamedTuple

import soundfile
from lhotse import Recording

from nestdata.corpus.audio import SILENCE_DB, energy, load_samples, open_audio, samples_in
from nestdata.errors import AudioError
from nestdata.prepare.inputs import LABELS, Entry

ProbeMode = Literal["missing", "all", "decode"]

RejectReason = Literal[
    "missing",
    "empty",
    "unreadable",
    "truncated",
    "unknown_length",
    "wrong_duration",
    "not_finite",
    "silent",
    "too_short",
    "too_long",
    "duplicate_id",
    "rate_too_low",
    "no_such_channel",
]
# libsndfile's answer for a stream whose header does not give the number of samples.
_UNKNOWN_LENGTH = (1 << 63) - 1
# Manifests round durations; what is cut off by this little is no lie.
_ROUNDING_S = 0.05
# What libsndfile notes of a file that says how many bytes of samples it has and ends before. Streams say 0 or almost
# 2^31 or 2^32.
_ENDS_EARLY = re.compile(r"^ ?(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
_FORMATS_IN_BYTES = frozenset({"WAV", "WAVEX", "AIFF"})
_STREAMED_BYTES = 0x7FFF0000


class Reject(NamedTuple):
    """An input that was left out."""

    where: str
    cut_id: str
    reason: RejectReason
    detail: str
    """A sentence with the values that were found."""


class Cut(NamedTuple):
    """A cut as it will be written."""

    row: dict[str, Any]
    """As Lhotse's `MonoCut.to_dict` has it."""

    num_samples: int
    """At the rate at which it will be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What makes audio usable, and how it will be read."""

    sampling_rate: int
    channel: int
    min_seconds: float
    max_seconds: float | None
    min_rate: int = 0
    window_seconds: float | None = None
    mode: ProbeMode = "all"


class _Audio(NamedTuple):
    """What is known of a recording, without decoding it."""

    rate: int
    num_frames: int
    num_channels: int
    ends_early: bool = False
    """Whether the file itself says that it should be longer."""


def probe(entry: Entry, limits: Limits) -> list[Cut | Reject]:
    """Turns an entry into one cut, or several windows of it, at the wanted rate; what cannot be used into rejects.

    How closely it looks is `limits.mode`: `missing` looks at a file only where the manifest gives no duration, `all`
    reads the header of every file, `decode` decodes every span.
    """
    found = _in_file(entry, limits) if entry.cut is None else _recorded(entry, limits)
    if isinstance(found, Reject):
        return [found]
    cuts = [Cut(row, samples_in(row["duration"], limits.sampling_rate)) for row in _windows(found, limits)]
    if reject := _outside_limits(entry, cuts[0], limits):
        return [reject]
    for cut in cuts:
        _resample(cut.row["recording"], limits.sampling_rate)
    if limits.mode == "decode":
        return [_decoded(entry, cut) for cut in cuts]
    return [*cuts]


def _outside_limits(entry: Entry, cut: Cut, limits: Limits) -> Reject | None:
    """Compares samples, since a duration that is what is left after an offset is a little off."""
    rate, seconds = limits.sampling_rate, cut.row["duration"]
    if cut.num_samples < samples_in(limits.min_seconds, rate):
        return _reject(entry, "too_short", f"{seconds:.6g} s, less than the {limits.min_seconds:g} s asked for")
    if limits.max_seconds is not None and cut.num_samples > samples_in(limits.max_seconds, rate):
        return _reject(entry, "too_long", f"{seconds:.6g} s, more than the {limits.max_seconds:g} s asked for")
    if cut.num_samples < 1:
        return _reject(entry, "empty", "the span is shorter than one sample")
    return None


def _in_file(entry: Entry, limits: Limits) -> dict[str, Any] | Reject:
    audio: _Audio | Reject
    rate, channel = limits.sampling_rate, limits.channel
    known = entry.duration if entry.num_frames is None else entry.num_frames / rate
    if limits.mode == "missing" and known is not None:
        audio = _Audio(rate, samples_in(entry.offset + known, rate), channel + 1)
    else:
        audio = _header_of_command(entry) if entry.command else _header(entry, entry.path)
        if isinstance(audio, Reject):
            return audio
        known = entry.duration if entry.num_frames is None else entry.num_frames / audio.rate
        if reject := _beyond_end(entry, audio, entry.offset, known):
            return reject
    left = audio.num_frames / audio.rate - entry.offset
    row = _cut_row(entry, audio, left if known is None else min(known, left), channel)
    return _unfit(entry, audio.rate, channel, audio.num_channels, limits) or row


def _beyond_end(entry: Entry, audio: _Audio, start: float, duration: float | None) -> Reject | None:
    length, end = audio.num_frames / audio.rate, start + (duration or 0.0)
    if audio.ends_early and (duration is None or end > length):
        return _reject(entry, "truncated", f"the file ends after {length:.3f} s, before the length in its header")
    if start >= length or end > length + _ROUNDING_S:
        return _reject(entry, "wrong_duration", f"the manifest's span ends at {end:.3f} s of {length:.3f} s")
    return None


def _unfit(entry: Entry, rate: int, channel: int, num_channels: int, limits: Limits) -> Reject | None:
    if rate < limits.min_rate:
        return _reject(entry, "rate_too_low", f"{rate} Hz, less than the {limits.min_rate} Hz asked for")
    if channel >= num_channels:
        return _reject(entry, "no_such_channel", f"channel {channel} of {num_channels} was asked for")
    return None


def _cut_row(entry: Entry, audio: _Audio, duration: float, channel: int) -> dict[str, Any]:
    cut_id, channels = entry.cut_id, list(range(audio.num_channels))
    kind = "command" if entry.command else "file"
    source = {"type": kind, "channels": channels, "source": entry.command or entry.stored_path or entry.path}
    row: dict[str, Any] = {
        "id": cut_id,
        "start": entry.offset,
        "duration": duration,
        "channel": channel,
        "supervisions": [],
        "recording": {
            "id": cut_id,
            "sources": [source],
            "sampling_rate": audio.rate,
            "num_samples": audio.num_frames,
            "duration": audio.num_frames / audio.rate,
            "channel_ids": channels,
        },
        "type": "MonoCut",
    }
    supervised, custom = {}, {}
    for key, value in (entry.labels or {}).items():
        if key not in LABELS:
            custom[key] = value
        elif value is not None:
            supervised[LABELS[key]] = value if isinstance(value, str) else str(value)
    if supervised:
        place = {"id": cut_id, "recording_id": cut_id, "start": 0.0, "duration": duration, "channel": channel}
        row["supervisions"].append(place | supervised)
    if custom:
        row["custom"] = custom
    return row


def _windows(row: dict[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """Returns a cut, or the windows that it is cut into: as few as the limit allows, of one length in whole samples."""
    if limits.window_seconds is None:
        return [row]
    rate = limits.sampling_rate
    num_samples, most = samples_in(row["duration"], rate), math.floor(round(limits.window_seconds * rate, 8))
    if num_samples <= most:
        return [row]
    number = -(-num_samples // most)
    step = num_samples // number
    return [_window(row, row["start"] + i * step / rate, step / rate) for i in range(number)]


def _window(row: dict[str, Any], start: float, duration: float) -> dict[str, Any]:
    """Returns one window of a cut: with its labels, but not its text and features, which belong to the whole."""
    cut_id = f"{row['id']}@{start:.3f}+{duration:.3f}"
    place = {"id": cut_id, "start": 0.0, "duration": duration}
    labels = [{**item, **place} for item in row["supervisions"][:1]]
    for label in labels:
        label.pop("text", None)
        label.pop("alignment", None)
    recording = dict(row["recording"])
    window = {**row, "id": cut_id, "start": start, "duration": duration, "supervisions": labels, "recording": recording}
    window.pop("features", None)
    return window


def _resample(recording: dict[str, Any], rate: int) -> None:
    """Has Lhotse resample a recording when it is read; writes into it."""
    source_rate = recording["sampling_rate"]
    if source_rate == rate:
        return
    kwargs = {"source_sampling_rate": source_rate, "target_sampling_rate": rate}
    recording["num_samples"] = samples_in(recording["duration"], rate)
    recording["duration"] = recording["num_samples"] / rate
    recording["sampling_rate"] = rate
    transforms = recording.get("transforms") or []
    recording["transforms"] = [*transforms, {"name": "Resample", "kwargs": kwargs}]


def _recorded(entry: Entry, limits: Limits) -> dict[str, Any] | Reject:
    """Takes a cut of Lhotse's as it is, but for what the header of its file belies."""
    assert entry.cut is not None
    row, recording = entry.cut, entry.cut["recording"]
    channel, length, rate = row["channel"], recording["duration"], _source_rate(recording)
    for source in recording["sources"]:
        if source["type"] == "file":
            source["source"] = os.path.abspath(source["source"])
    holding = [source for source in recording["sources"] if channel in source["channels"]]
    if not holding:
        channels = sorted(channel for source in recording["sources"] for channel in source["channels"])
        return _reject(entry, "no_such_channel", f"channel {channel} of {channels} was asked for")
    position, num_channels = holding[0]["channels"].index(channel), len(holding[0]["channels"])
    said = _Audio(recording["sampling_rate"], recording["num_samples"], num_channels)
    if reject := _beyond_end(entry, said, row["start"], row["duration"]):
        return reject
    if limits.mode != "missing" and holding[0]["type"] == "file":
        audio = _header(entry, holding[0]["source"])
        if isinstance(audio, Reject):
            return audio
        rate, num_channels = audio.rate, audio.num_channels
        if all(transform["name"] == "Resample" for transform in recording.get("transforms") or ()):
            if reject := _beyond_end(entry, audio, row["start"], row["duration"]):
                return reject
            length = min(length, audio.num_frames / audio.rate)
    if row["duration"] > length - row["start"] + 0.5 / recording["sampling_rate"]:
        row["duration"] = length - row["start"]
    return _unfit(entry, rate, position, num_channels, limits) or row


def _source_rate(recording: dict[str, Any]) -> int:
    """Returns the rate of the file behind a recording of Lhotse's, as it says itself."""
    resampled = [t["kwargs"] for t in recording.get("transforms") or () if t["name"] == "Resample"]
    rate: int = resampled[0]["source_sampling_rate"] if resampled else recording["sampling_rate"]
    return rate


def _header(entry: Entry, path: str) -> _Audio | Reject:
    try:
        with open_audio(path) as file:
            audio = _Audio(file.samplerate, file.frames, file.channels, _ends_early(file))
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        # Only now, since most files are as they should be, and every look at a file costs time.
        if not os.path.isfile(path):
            return _reject(entry, "missing", f"{path} does not exist")
        if os.path.getsize(path) == 0:
            return _reject(entry, "empty", f"{path} has no bytes")
        found = _header_by_lhotse(path)
        if found is None:
            # Without the number of the descriptor, which is another in every process.
            detail = getattr(error, "error_string", str(error))
            return _reject(entry, "unreadable", f"{path}: {' '.join(detail.split())}")
        audio = found
    if audio.num_frames >= _UNKNOWN_LENGTH:
        detail = f"{path}: its header does not give the number of samples; re-encode it"
        return _reject(entry, "unknown_length", detail)
    return audio if audio.num_frames > 0 else _reject(entry, "empty", f"{path} holds no samples")


def _ends_early(file: soundfile.SoundFile) -> bool:
    if file.format not in _FORMATS_IN_BYTES:
        return False
    noted = _ENDS_EARLY.search(file.extra_info)
    return noted is not None and int(noted[2]) < int(noted[1]) < _STREAMED_BYTES


def _header_by_lhotse(path: str) -> _Audio | None:
    """Asks Lhotse's other decoders about a format that libsndfile does not know, such as M4A or SPHERE."""
    for decodes in (False, True):
        with suppress(Exception):  # whichever decoder fails, the next may do, and what none can read is unreadable
            recording = Recording.from_file(path, force_read_audio=decodes)
            return _Audio(recording.sampling_rate, recording.num_samples, recording.num_channels)
    return None


def _header_of_command(entry: Entry) -> _Audio | Reject:
    """Runs the command, since nothing else tells how much it writes."""
    try:
        written = subprocess.run(entry.command, shell=True, stdout=subprocess.PIPE, check=True).stdout
        samples, rate = soundfile.read(BytesIO(written), dtype="float32", always_2d=True)
    except Exception as error:  # the shell, the program and the decoder may each fail
        return _reject(entry, "unreadable", f"{entry.command!r}: {' '.join(str(error).split())[:200]}")
    if not len(samples):
        return _reject(entry, "empty", f"{entry.command!r} writes no samples")
    return _Audio(rate, len(samples), samples.shape[1])


def _decoded(entry: Entry, cut: Cut) -> Cut | Reject:
    """Decodes a cut from start to end; returns it, or what is wrong with it."""
    row = cut.row
    if entry.stored_path:  # the file is on its way there
        recording = row["recording"]
        row = {**row, "recording": {**recording, "sources": [{**recording["sources"][0], "source": entry.path}]}}
    try:
        samples = load_samples(row)
    except AudioError as error:
        return _reject(entry, error.reason, str(error))._replace(cut_id=row["id"])
    if energy(samples) < 10 ** (SILENCE_DB / 10) * len(samples):
        detail = f"its level is below {SILENCE_DB:g} dB of full scale throughout"
        return _reject(entry, "silent", detail)._replace(cut_id=row["id"])
    return cut


def _reject(entry: Entry, reason: RejectReason, detail: str) -> Reject:
    return Reject(entry.where, entry.cut_id, reason, detail)

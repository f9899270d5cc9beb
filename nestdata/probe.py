"""Looks at the audio behind an entry and makes a cut of it, or says why it cannot be used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import soundfile
from lhotse import AudioSource, MonoCut, Recording, SupervisionSegment
from lhotse.utils import fastcopy

from nestdata.manifest import Entry

RejectReason = Literal[
    "missing",
    "empty",
    "unreadable",
    "unknown_length",
    "no_such_channel",
    "beyond_end",
    "too_short",
    "too_long",
    "duplicate_id",
]
# libsndfile's answer for a stream whose header does not give the number of samples.
_UNKNOWN_LENGTH = (1 << 63) - 1
# Manifests round durations; what is cut off by this little is no lie.
_ROUNDING_S = 0.05
_SUPERVISION_FIELDS = {"text": "text", "lang": "language", "language": "language", "speaker": "speaker"}


@dataclass(frozen=True, slots=True)
class Reject:
    """An input that was left out."""

    where: str
    cut_id: str
    reason: RejectReason
    detail: str
    """A sentence with the values that were found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What makes audio usable, and how it will be read."""

    sampling_rate: int
    channel: int
    min_seconds: float
    max_seconds: float | None


def probe(entry: Entry, limits: Limits) -> MonoCut | Reject:
    """Turns an entry into a cut at the wanted rate and channel, reading no more than the header of the file."""
    found = _recorded_cut(entry) if entry.cut is not None else _file_cut(entry, limits.channel)
    if isinstance(found, Reject):
        return found
    if found.duration < limits.min_seconds:
        return _reject(entry, "too_short", f"{found.duration:.6g} s, less than the {limits.min_seconds:g} s asked for")
    if limits.max_seconds is not None and found.duration > limits.max_seconds:
        return _reject(entry, "too_long", f"{found.duration:.6g} s, more than the {limits.max_seconds:g} s asked for")
    if found.sampling_rate != limits.sampling_rate:
        found = found.resample(limits.sampling_rate)
    return found if found.num_samples else _reject(entry, "empty", "the span is shorter than one sample")


def _recorded_cut(entry: Entry) -> MonoCut | Reject:
    """Trusts what Lhotse recorded, but for whether the file is there."""
    cut = entry.cut
    assert cut is not None
    for source in cut.recording.sources:
        if source.type == "file" and not Path(source.source).is_file():
            return _reject(entry, "missing", f"{source.source} does not exist")
    if cut.end > cut.recording.duration + _ROUNDING_S:
        return _reject(entry, "beyond_end", f"the cut ends at {cut.end:.3f} s of {cut.recording.duration:.3f} s")
    if not any(cut.channel in source.channels for source in cut.recording.sources):
        channels = sorted(channel for source in cut.recording.sources for channel in source.channels)
        return _reject(entry, "no_such_channel", f"channel {cut.channel} of {channels} was asked for")
    sources = [
        fastcopy(source, source=str(Path(source.source).absolute())) if source.type == "file" else source
        for source in cut.recording.sources
    ]
    return fastcopy(cut, recording=fastcopy(cut.recording, sources=sources))


def _file_cut(entry: Entry, channel: int) -> MonoCut | Reject:
    recording = _probe_file(entry)
    if isinstance(recording, Reject):
        return recording
    if channel >= recording.num_channels:
        return _reject(entry, "no_such_channel", f"channel {channel} of {recording.num_channels} was asked for")
    left = recording.duration - entry.offset
    duration = left if entry.duration is None else entry.duration
    if left <= 0 or duration > left + _ROUNDING_S:
        end = entry.offset + duration
        return _reject(entry, "beyond_end", f"the manifest's span ends at {end:.3f} s of {recording.duration:.3f} s")
    duration = min(duration, left)
    supervised = {to: entry.labels[key] for key, to in _SUPERVISION_FIELDS.items() if key in entry.labels}
    supervisions = []
    if supervised:
        supervisions = [SupervisionSegment(entry.cut_id, recording.id, start=0.0, duration=duration, **supervised)]
    custom = {key: value for key, value in entry.labels.items() if key not in _SUPERVISION_FIELDS}
    return MonoCut(
        id=entry.cut_id,
        start=entry.offset,
        duration=duration,
        channel=channel,
        supervisions=supervisions,
        recording=recording,
        custom=custom or None,
    )


def _probe_file(entry: Entry) -> Recording | Reject:
    assert entry.path is not None
    path = entry.path.absolute()
    if not path.is_file():
        return _reject(entry, "missing", f"{path} does not exist")
    if path.stat().st_size == 0:
        return _reject(entry, "empty", f"{path} has no bytes")
    try:
        info = soundfile.info(str(path))
        rate, num_samples, num_channels = info.samplerate, info.frames, info.channels
    except (soundfile.LibsndfileError, UnicodeEncodeError) as error:
        found = _probe_with_lhotse(path)
        if found is None:
            return _reject(entry, "unreadable", f"{path}: {' '.join(str(error).split())}")
        rate, num_samples, num_channels = found
    if num_samples >= _UNKNOWN_LENGTH:
        return _reject(entry, "unknown_length", f"{path}: its header does not give the number of samples; re-encode it")
    if num_samples <= 0:
        return _reject(entry, "empty", f"{path} holds no samples")
    return Recording(
        id=entry.cut_id,
        sources=[AudioSource(type="file", channels=list(range(num_channels)), source=str(path))],
        sampling_rate=rate,
        num_samples=num_samples,
        duration=num_samples / rate,
        channel_ids=list(range(num_channels)),
    )


def _probe_with_lhotse(path: Path) -> tuple[int, int, int] | None:
    """Asks Lhotse's other decoders about a format that libsndfile does not know, such as M4A or SPHERE."""
    try:
        recording = Recording.from_file(path)
    except Exception:  # whichever decoder failed, the answer is that none can read it
        return None
    return recording.sampling_rate, recording.num_samples, recording.num_channels


def _reject(entry: Entry, reason: RejectReason, detail: str) -> Reject:
    return Reject(where=entry.where, cut_id=entry.cut_id, reason=reason, detail=detail)

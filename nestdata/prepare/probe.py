"""Checks the audio of an entry, and returns the cuts made from it or the reason why it is rejected.

Cuts are plain dicts in the form that Lhotse writes: building Lhotse's objects for every line of a large manifest would
take longer than everything else together.
"""

import math
import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from nestdata.corpus.addresses import MAX_MEMBER_BYTES
from nestdata.corpus.audio import SILENCE_DB, energy, load_samples, samples_in
from nestdata.corpus.channels import MIX_FIELD, Channel, is_mixed
from nestdata.corpus.encoded import EncodedAudio, open_audio, open_stream
from nestdata.corpus.file_kind import special_file_kind
from nestdata.corpus.members import describe, source_at
from nestdata.errors import AudioError, StorageError
from nestdata.prepare.config import ProbeMode
from nestdata.prepare.inputs.content import GuardedStream, LoadedContent
from nestdata.prepare.inputs.entry import LABELS, Entry, Member, Problem, RejectReason
from nestdata.prepare.speech.config import SpeechLimits

if TYPE_CHECKING:
    import soundfile

# Number of frames that libsndfile reports for a stream whose header does not give one.
_UNKNOWN_LENGTH = (1 << 63) - 1
# Tolerance for durations that manifests have rounded up.
_ROUNDING_S = 0.05
# libsndfile's log entry for a WAV or AIFF file that is shorter than the number of bytes in its header. Files written
# to a pipe give 0 there, or almost 2^31 or 2^32.
_ENDS_EARLY = re.compile(r"^ ?(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
_FORMATS_WITH_BYTE_COUNT = frozenset({"WAV", "WAVEX", "AIFF"})
_STREAMED_BYTES = 0x7FFF0000


class Reject(NamedTuple):
    """An entry or window that is not taken into the corpus."""

    where: str
    """Position in the input, such as `speech.json:12`."""

    cut_id: str
    reason: RejectReason
    detail: str
    """An explanation that gives the values found."""


class Cut(NamedTuple):
    """A cut as it is written to the corpus."""

    row: dict[str, Any]
    """The dict that Lhotse's `MonoCut.to_dict` would return."""

    num_samples: int
    """Length in samples at the rate of the corpus."""

    member: Member | None = None
    """Where its audio is, if that is not the file that the row names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Requirements on audio, and how it is probed and loaded. The fields are those of `PrepareConfig`."""

    sampling_rate: int
    """Rate in Hz at which cuts are loaded."""

    channel: Channel
    """Channel to read, counted from 0, or "mix" for the average of all, unless a Lhotse cut names its own."""

    min_seconds: float
    max_seconds: float | None
    """Longest duration of a cut or window; None for no limit."""

    min_rate: int = 0
    """Lowest rate in Hz of an audio file."""

    window_seconds: float | None = None
    """Longest duration of a window; None to keep recordings whole."""

    mode: ProbeMode = "all"

    speech: SpeechLimits | None = None
    """How cuts are made and chosen by their speech; None if speech is not looked for."""


class _AudioInfo(NamedTuple):
    """Properties of an audio file or recording, known without decoding it."""

    rate: int
    num_frames: int
    num_channels: int
    ends_early: bool = False
    """Whether the file is shorter than its own header says."""


def probe(entry: Entry, limits: Limits) -> list[Cut | Reject]:
    """Returns the cut of an entry, or its windows, at the rate of the corpus; unusable ones are a `Reject`.

    With `limits.mode` "missing", a file is opened only if the manifest gives no duration; "all" reads the header of
    every file; "decode" decodes every cut.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    checked = checked_row(entry, limits)
    if isinstance(checked, Reject):
        return [checked]
    entry, row = checked
    windows = windows_of(row, limits)
    if reject := check_length(entry, windows[0], limits):
        return [reject]
    return [finished_cut(entry, window, limits) for window in windows]


def checked_row(entry: Entry, limits: Limits) -> tuple[Entry, dict[str, Any]] | Reject:
    """Returns an entry, with its bytes if they are needed, and its cut as a dict, before it is divided and resampled.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    try:
        entry = _with_checksum(entry, limits)
        if entry.problem:
            return _reject(entry, *entry.problem)
        row = _cut_from_file(entry, limits) if entry.cut is None else _cut_from_lhotse(entry, limits)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        row = _reject(entry, error.kind, str(error))
    return row if isinstance(row, Reject) else (entry, row)


def finished_cut(entry: Entry, row: dict[str, Any], limits: Limits) -> Cut | Reject:
    """Returns a cut that is resampled and decoded as the limits ask; modifies the recording of `row`."""
    num_samples = samples_in(row["duration"], limits.sampling_rate)
    _resample(row["recording"], limits.sampling_rate)
    cut = Cut(row, num_samples, entry.member)
    return _decoded(entry, cut) if limits.mode == "decode" else cut


def reads_audio(entry: Entry, limits: Limits) -> bool:
    """Returns whether `probe` reads the header or the samples of an entry."""
    if limits.speech:
        return True
    if limits.mode == "missing":
        return entry.duration is None and entry.num_frames is None and entry.cut is None
    return limits.mode == "decode" or not entry.is_measured


def _with_checksum(entry: Entry, limits: Limits) -> Entry:
    """Reads the bytes of a member that is decoded, and returns the entry with their checksum.

    Raises:
        StorageError: The bytes cannot be read.
    """
    member = entry.member
    if member is None or member.length > MAX_MEMBER_BYTES:
        return entry
    content = member.content
    if (limits.mode == "decode" or limits.speech) and not isinstance(content, LoadedContent):
        content = LoadedContent(content.read())
    if isinstance(content, LoadedContent):
        found = crc32(content.content)
        if member.crc32 not in (None, found):
            detail = f"{_name_of(entry)}: its checksum is not the one that the input gives"
            return entry._replace(problem=Problem("corrupt", detail))
        member = member._replace(crc32=found)
    member = member._replace(content=content)
    return entry._replace(member=member)


def check_length(entry: Entry, row: dict[str, Any], limits: Limits) -> Reject | None:
    """Checks the limits on duration, in samples, because a duration in seconds after an offset is inexact."""
    rate, seconds = limits.sampling_rate, row["duration"]
    num_samples = samples_in(seconds, rate)
    if num_samples < samples_in(limits.min_seconds, rate):
        return _reject(entry, "too_short", f"{seconds:.6g} s, the minimum is {limits.min_seconds:g} s")
    if limits.max_seconds is not None and num_samples > samples_in(limits.max_seconds, rate):
        return _reject(entry, "too_long", f"{seconds:.6g} s, the maximum is {limits.max_seconds:g} s")
    if num_samples < 1:
        return _reject(entry, "empty", "the span is shorter than one sample")
    return None


def _cut_from_file(entry: Entry, limits: Limits) -> dict[str, Any] | Reject:
    """Returns the cut of a span of a file or of the output of a command."""
    info: _AudioInfo | Reject
    rate, channel = limits.sampling_rate, 0 if limits.channel == "mix" else limits.channel
    if entry.member and entry.member.length > MAX_MEMBER_BYTES:
        return _reject(entry, "too_large", f"{_name_of(entry)}: a member must be shorter than 4 GiB")
    duration = entry.duration if entry.num_frames is None else entry.num_frames / rate
    if limits.mode == "missing" and duration is not None:
        info = _AudioInfo(rate, samples_in(entry.offset + duration, rate), channel + 1)
    else:
        info = _header_of_command(entry) if entry.command else _header(entry, entry.path)
        if isinstance(info, Reject):
            return info
        duration = entry.duration if entry.num_frames is None else entry.num_frames / info.rate
        if reject := _check_span(entry, info, entry.offset, duration):
            return reject
    left = info.num_frames / info.rate - entry.offset
    row = _cut_row(entry, info, left if duration is None else min(duration, left), channel)
    if limits.channel == "mix":
        row["custom"] = row.get("custom", {}) | {MIX_FIELD: "mix"}
    return _check_rate_and_channel(entry, info.rate, channel, info.num_channels, limits) or row


def _check_span(entry: Entry, info: _AudioInfo, start: float, duration: float | None) -> Reject | None:
    length, end = info.num_frames / info.rate, start + (duration or 0.0)
    if info.ends_early and (duration is None or end > length):
        return _reject(entry, "truncated", f"the file ends after {length:.3f} s, before the length in its header")
    if start >= length:
        detail = f"the span in the manifest starts at {start:.3f} s, the audio lasts {length:.3f} s"
        return _reject(entry, "wrong_duration", detail)
    if end > length + _ROUNDING_S:
        detail = f"the span in the manifest ends at {end:.3f} s, the audio lasts {length:.3f} s"
        return _reject(entry, "wrong_duration", detail)
    return None


def _check_rate_and_channel(entry: Entry, rate: int, channel: int, num_channels: int, limits: Limits) -> Reject | None:
    if rate < limits.min_rate:
        return _reject(entry, "rate_too_low", f"{rate} Hz, the minimum is {limits.min_rate} Hz")
    if channel >= num_channels:
        detail = f"channel {channel} was requested, and the number of channels is {num_channels}"
        return _reject(entry, "no_such_channel", detail)
    return None


def _cut_row(entry: Entry, info: _AudioInfo, duration: float, channel: int) -> dict[str, Any]:
    cut_id, channels = entry.cut_id, list(range(info.num_channels))
    kind, location = _source(entry)
    source = {"type": kind, "channels": channels, "source": location}
    row: dict[str, Any] = {
        "id": cut_id,
        "start": entry.offset,
        "duration": duration,
        "channel": channel,
        "supervisions": [],
        "recording": {
            "id": cut_id,
            "sources": [source],
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


def _source(entry: Entry) -> tuple[str, str]:
    """Returns type and source of the Lhotse `AudioSource` of an entry that is not a Lhotse cut."""
    if entry.member:
        found = source_at(*entry.member[:3])
        return found["type"], found["source"]
    return "command" if entry.command else "file", entry.command or entry.stored_path or entry.path


def windows_of(row: dict[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """Returns a cut, or its windows: as few as the limit allows, all of the same length in whole samples."""
    if limits.window_seconds is None:
        return [row]
    rate = limits.sampling_rate
    num_samples, max_samples = samples_in(row["duration"], rate), math.floor(round(limits.window_seconds * rate, 8))
    if num_samples <= max_samples:
        return [row]
    num_windows = -(-num_samples // max_samples)
    step = num_samples // num_windows
    return [window_of(row, row["start"] + i * step / rate, step / rate) for i in range(num_windows)]


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


def _resample(recording: dict[str, Any], rate: int) -> None:
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


def _cut_from_lhotse(entry: Entry, limits: Limits) -> dict[str, Any] | Reject:
    """Returns a Lhotse cut, checked against the header of its file; modifies `entry.cut`."""
    assert entry.cut is not None
    row, recording = entry.cut, entry.cut["recording"]
    channel, length, rate = row["channel"], recording["duration"], _source_rate(recording)
    if entry.member and entry.member.length > MAX_MEMBER_BYTES:
        return _reject(entry, "too_large", f"{_name_of(entry)}: a member must be shorter than 4 GiB")
    for source in recording["sources"]:
        if source["type"] == "file":
            source["source"] = os.path.abspath(source["source"])
    if is_mixed(row) and len(recording["sources"]) > 1:
        detail = "the channels of the recording are in several files, and only those of one file can be averaged"
        return _reject(entry, "no_such_channel", detail)
    with_channel = [source for source in recording["sources"] if channel in source["channels"]]
    if not with_channel:
        channels = sorted(channel for source in recording["sources"] for channel in source["channels"])
        detail = f"channel {channel} was requested, and the recording has {channels}"
        return _reject(entry, "no_such_channel", detail)
    source = with_channel[0]
    if entry.member:
        source.update(source_at(*entry.member[:3]))
    position, num_channels = source["channels"].index(channel), len(source["channels"])
    in_manifest = _AudioInfo(recording["sampling_rate"], recording["num_samples"], num_channels)
    if reject := _check_span(entry, in_manifest, row["start"], row["duration"]):
        return reject
    if limits.mode != "missing" and not entry.is_measured and (entry.member or source["type"] == "file"):
        info = _header(entry, source["source"])
        if isinstance(info, Reject):
            return info
        rate, num_channels = info.rate, info.num_channels
        if all(transform["name"] == "Resample" for transform in recording.get("transforms") or ()):
            if reject := _check_span(entry, info, row["start"], row["duration"]):
                return reject
            length = min(length, info.num_frames / info.rate)
    if row["duration"] > length - row["start"] + 0.5 / recording["sampling_rate"]:
        row["duration"] = length - row["start"]
    return _check_rate_and_channel(entry, rate, position, num_channels, limits) or row


def _source_rate(recording: dict[str, Any]) -> int:
    """Returns the rate in Hz of the file of a Lhotse recording, as given by the recording itself."""
    resampled = [t["kwargs"] for t in recording.get("transforms") or () if t["name"] == "Resample"]
    rate: int = resampled[0]["source_sampling_rate"] if resampled else recording["sampling_rate"]
    return rate


def _header(entry: Entry, path: str) -> _AudioInfo | Reject:
    """Reads the header of an audio file, or of the member of the entry.

    Raises:
        StorageError: The member cannot be read.
    """
    import soundfile

    try:
        with _opened(entry, path) as file:
            info = _AudioInfo(file.samplerate, file.frames, file.channels, _ends_early(file))
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        # The causes are examined only after a failure, because most files are valid and every call costs time.
        name = _name_of(entry, path)
        if entry.member is None:
            if kind := special_file_kind(path):
                return _reject(entry, "not_a_file", f"{path} is {kind}")
            if not os.path.isfile(path):
                return _reject(entry, "missing", f"{path} does not exist")
        audio = EncodedAudio(name, entry.member.content.read() if entry.member else None)
        if not audio.size():
            return _reject(entry, "empty", f"{name} has no bytes")
        found = _header_by_lhotse(audio)
        if found is None:
            # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
            detail = getattr(error, "error_string", str(error))
            return _reject(entry, "unreadable", f"{name}: {' '.join(detail.split())}")
        info = found
    name = _name_of(entry, path)
    if info.num_frames >= _UNKNOWN_LENGTH:
        detail = f"{name}: its header does not give the number of samples; re-encode it"
        return _reject(entry, "unknown_length", detail)
    return info if info.num_frames > 0 else _reject(entry, "empty", f"{name} holds no samples")


@contextmanager
def _opened(entry: Entry, path: str) -> "Iterator[soundfile.SoundFile]":
    """Opens a file, or the member of the entry; errors are those of `open_audio` and of reading the member."""
    if entry.member is None:
        with open_audio(path) as file:
            yield file
        return
    with entry.member.content.open() as stream:
        guarded = GuardedStream(stream)
        try:
            with open_stream(guarded) as file:
                yield file
        finally:
            guarded.check()


def _name_of(entry: Entry, path: str = "") -> str:
    """Returns a name of the audio for messages."""
    member = entry.member
    return path if member is None else describe(member.shard.location, member.offset, member.length)


def _ends_early(file: "soundfile.SoundFile") -> bool:
    if file.format not in _FORMATS_WITH_BYTE_COUNT:
        return False
    match = _ENDS_EARLY.search(file.extra_info)
    return match is not None and int(match[2]) < int(match[1]) < _STREAMED_BYTES


def _header_by_lhotse(audio: EncodedAudio) -> _AudioInfo | None:
    """Reads the header of a format that libsndfile does not know, such as M4A or SPHERE, with Lhotse's decoders."""
    from lhotse import Recording

    with audio.as_file() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # audioread leaves files open that it cannot read
        for decodes in (False, True):
            with suppress(Exception):  # decoders raise errors of many kinds; None if all of them fail
                recording = Recording.from_file(path, force_read_audio=decodes)
                return _AudioInfo(recording.sampling_rate, recording.num_samples, recording.num_channels)
    return None


def _header_of_command(entry: Entry) -> _AudioInfo | Reject:
    """Runs the command, which is the only way to find the length of its output."""
    import soundfile

    try:
        written = subprocess.run(entry.command, shell=True, stdout=subprocess.PIPE, check=True).stdout
        samples, rate = soundfile.read(BytesIO(written), dtype="float32", always_2d=True)
    except Exception as error:  # the shell, the program and the decoder may each fail
        return _reject(entry, "unreadable", f"{entry.command!r}: {' '.join(str(error).split())[:200]}")
    if not len(samples):
        return _reject(entry, "empty", f"{entry.command!r} writes no samples")
    return _AudioInfo(rate, len(samples), samples.shape[1])


def _decoded(entry: Entry, cut: Cut) -> Cut | Reject:
    """Decodes a cut from start to end; returns the cut, or a reject if its audio cannot be used."""
    row = cut.row
    if entry.stored_path:  # the corpus is not in place yet, and the file is still at `entry.path`
        recording = row["recording"]
        row = {**row, "recording": {**recording, "sources": [{**recording["sources"][0], "source": entry.path}]}}
    try:
        samples = load_samples(row, content=entry.member.content.read() if entry.member else None)
    except AudioError as error:
        return _reject(entry, error.reason, str(error))._replace(cut_id=row["id"])
    if energy(samples) < 10 ** (SILENCE_DB / 10) * len(samples):
        detail = f"the level of the whole cut is below {SILENCE_DB:g} dB of full scale"
        return _reject(entry, "silent", detail)._replace(cut_id=row["id"])
    return cut


def _reject(entry: Entry, reason: RejectReason, detail: str) -> Reject:
    return Reject(entry.where, entry.cut_id, reason, detail)

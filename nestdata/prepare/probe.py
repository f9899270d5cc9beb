"""Checks the audio of an entry, and returns the cuts made from it or the reason why it is rejected."""

import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

from nestdata.corpus.addresses import MAX_MEMBER_BYTES
from nestdata.corpus.audio import SILENCE_DB, energy, load_samples, samples_in
from nestdata.corpus.channels import MIX_FIELD, Channel, is_mixed
from nestdata.corpus.members import source_at
from nestdata.errors import AudioError, StorageError
from nestdata.prepare.audio_span import AudioSpan, span_of_cut
from nestdata.prepare.config import ProbeMode
from nestdata.prepare.cut_rows import cut_row, resample, windows
from nestdata.prepare.header import AudioInfo, header_of_command, name_of, read_header
from nestdata.prepare.inputs.content import LoadedContent
from nestdata.prepare.inputs.entry import Entry, Member, Problem, RejectReason
from nestdata.prepare.speech.config import SpeechLimits
from nestdata.redaction import redacted
from nestdata.storage import FileVersion

# Tolerance for durations that manifests have rounded up.
_ROUNDING_S = 0.05
# Samples of all channels that are decoded at a time, in 256 MiB.
_MAX_DECODED = 1 << 26
# A few limits are compared with every cut.
_limit_in = cache(samples_in)


class Reject(NamedTuple):
    """An entry or window that is not taken into the corpus."""

    where: str
    """Position in the input, such as `speech.json:12`."""

    cut_id: str
    reason: RejectReason
    detail: str
    """An explanation that gives the values found."""

    audio: AudioSpan | None = None
    """The audio, if it may be worth listening to."""

    def without_secrets(self) -> "Reject":
        """Returns the reject as it may be written and shown."""
        where, cut_id, detail = redacted(self.where), redacted(self.cut_id), redacted(self.detail)
        return Reject(where, cut_id, self.reason, detail, self.audio)


class Cut(NamedTuple):
    """A cut as it is written to the corpus."""

    row: dict[str, Any]
    """The dict that Lhotse's `MonoCut.to_dict` would return."""

    num_samples: int
    """Length in samples at the rate of the corpus."""

    member: Member | None = None
    """Where its audio is, if that is not the file that the row names."""

    version: FileVersion | None = None
    """The version of the file that the row names, if it was opened."""


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

    allow_commands: bool = False
    """Whether to run the commands that cuts give instead of files."""

    speech: SpeechLimits | None = None
    """How cuts are made and chosen by their speech; None if speech is not looked for."""


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
    rows = windows(row, limits.window_seconds, limits.sampling_rate)
    if reject := check_length(entry, rows[0], limits):
        return [reject]
    return [finished_cut(entry, window, limits) for window in rows]


def checked_row(entry: Entry, limits: Limits) -> tuple[Entry, dict[str, Any]] | Reject:
    """Returns an entry, with its bytes if they are needed, and its cut as a dict, before it is divided and resampled.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    try:
        if entry.member and not entry.problem:
            entry = _with_checksum(entry, entry.member, limits)
        if entry.problem:
            return _reject(entry, *entry.problem)
        found = _cut_from_file(entry, limits) if entry.cut is None else _cut_from_lhotse(entry, limits)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        return _reject(entry, error.kind, str(error))
    if isinstance(found, Reject):
        return found
    row, version = found
    # A copy of audio in the corpus directory is moved and copied with it, which may change its time.
    return entry._replace(version=None if entry.stored_path else version), row


def finished_cut(entry: Entry, row: dict[str, Any], limits: Limits) -> Cut | Reject:
    """Returns a cut that is resampled and decoded as the limits ask; modifies the recording of `row`."""
    num_samples = samples_in(row["duration"], limits.sampling_rate)
    resample(row["recording"], limits.sampling_rate)
    cut = Cut(row, num_samples, entry.member, entry.version)
    return _decoded(entry, cut, limits) if limits.mode == "decode" else cut


def reads_audio(entry: Entry, limits: Limits) -> bool:
    """Returns whether `probe` reads the header or the samples of an entry."""
    if limits.speech:
        return True
    if limits.mode == "missing":
        return entry.duration is None and entry.num_frames is None and entry.cut is None
    return limits.mode == "decode" or not entry.is_measured


def _with_checksum(entry: Entry, member: Member, limits: Limits) -> Entry:
    """Reads the bytes of a member that is decoded, and returns the entry with their checksum.

    Raises:
        StorageError: The bytes cannot be read.
    """
    content = member.content
    decodes = limits.mode == "decode" or limits.speech
    if decodes and not isinstance(content, LoadedContent) and member.length <= MAX_MEMBER_BYTES:
        content = LoadedContent(content.read())
    if not isinstance(content, LoadedContent):
        return entry
    found = crc32(content.content)
    if member.crc32 not in (None, found):
        detail = f"{name_of(entry.path, member)}: its checksum is not the one that the input gives"
        return entry._replace(problem=Problem("corrupt", detail))
    return entry._replace(member=member._replace(content=content, crc32=found))


def check_length(entry: Entry, row: dict[str, Any], limits: Limits) -> Reject | None:
    """Checks the limits on duration, in samples, because a duration in seconds after an offset is inexact."""
    rate, seconds = limits.sampling_rate, row["duration"]
    num_samples = samples_in(seconds, rate)
    if num_samples < _limit_in(limits.min_seconds, rate):
        return _reject(entry, "too_short", f"{seconds:.6g} s, the minimum is {limits.min_seconds:g} s")
    if limits.max_seconds is not None and num_samples > _limit_in(limits.max_seconds, rate):
        return _reject(entry, "too_long", f"{seconds:.6g} s, the maximum is {limits.max_seconds:g} s")
    if num_samples < 1:
        return _reject(entry, "empty", "the span is shorter than one sample")
    return None


def _cut_from_file(entry: Entry, limits: Limits) -> tuple[dict[str, Any], FileVersion | None] | Reject:
    """Returns the cut of a span of a file or of the output of a command, and the version of the file."""
    rate, channel = limits.sampling_rate, 0 if limits.channel == "mix" else limits.channel
    if entry.member and entry.member.length > MAX_MEMBER_BYTES:
        return _reject(entry, "too_large", f"{name_of(entry.path, entry.member)}: a member must be shorter than 4 GiB")
    duration = entry.duration if entry.num_frames is None else entry.num_frames / rate
    if limits.mode == "missing" and duration is not None:
        info = AudioInfo(rate, samples_in(entry.offset + duration, rate), channel + 1)
    else:
        found = header_of_command(entry.command) if entry.command else read_header(entry.path, entry.member)
        if isinstance(found, Problem):
            return _reject(entry, *found)
        info = found
        duration = entry.duration if entry.num_frames is None else entry.num_frames / info.rate
        if reject := _check_span(entry, info, entry.offset, duration):
            return reject
    left = info.num_frames / info.rate - entry.offset
    row = cut_row(entry, info, left if duration is None else min(duration, left), channel)
    if limits.channel == "mix":
        row["custom"] = row.get("custom", {}) | {MIX_FIELD: "mix"}
    return _check_rate_and_channel(entry, info.rate, channel, info.num_channels, limits) or (row, info.version)


def _check_span(entry: Entry, info: AudioInfo, start: float, duration: float | None) -> Reject | None:
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


def _cut_from_lhotse(entry: Entry, limits: Limits) -> tuple[dict[str, Any], FileVersion | None] | Reject:
    """Returns a Lhotse cut, checked against the header of its file, and the file's version; modifies `entry.cut`."""
    assert entry.cut is not None
    version = None
    row, recording = entry.cut, entry.cut["recording"]
    channel, length, rate = row["channel"], recording["duration"], source_rate(recording)
    if entry.member and entry.member.length > MAX_MEMBER_BYTES:
        return _reject(entry, "too_large", f"{name_of(entry.path, entry.member)}: a member must be shorter than 4 GiB")
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
    in_manifest = AudioInfo(recording["sampling_rate"], recording["num_samples"], num_channels)
    if reject := _check_span(entry, in_manifest, row["start"], row["duration"]):
        return reject
    if limits.mode != "missing" and not entry.is_measured and (entry.member or source["type"] == "file"):
        info = read_header(source["source"], entry.member)
        if isinstance(info, Problem):
            return _reject(entry, *info)
        rate, num_channels, version = info.rate, info.num_channels, info.version
        if all(transform["name"] == "Resample" for transform in recording.get("transforms") or ()):
            if reject := _check_span(entry, info, row["start"], row["duration"]):
                return reject
            length = min(length, info.num_frames / info.rate)
    if row["duration"] > length - row["start"] + 0.5 / recording["sampling_rate"]:
        row["duration"] = length - row["start"]
    return _check_rate_and_channel(entry, rate, position, num_channels, limits) or (row, version)


def source_rate(recording: dict[str, Any]) -> int:
    """Returns the rate in Hz of the file of a Lhotse recording, as given by the recording itself."""
    resampled = [t["kwargs"] for t in recording.get("transforms") or () if t["name"] == "Resample"]
    rate: int = resampled[0]["source_sampling_rate"] if resampled else recording["sampling_rate"]
    return rate


def _decoded(entry: Entry, cut: Cut, limits: Limits) -> Cut | Reject:
    """Decodes a cut from start to end; returns the cut, or a reject if its audio cannot be used."""
    row = cut.row
    if entry.stored_path:  # the corpus is not in place yet, and the file is still at `entry.path`
        recording = row["recording"]
        row = {**row, "recording": {**recording, "sources": [{**recording["sources"][0], "source": entry.path}]}}
    block, found = _samples_at_a_time(row), 0.0
    try:
        content = entry.member.content.read() if entry.member else None
        for start in range(0, cut.num_samples, block):
            size = min(block, cut.num_samples - start)
            samples = load_samples(
                row, start=start, num_samples=size, content=content, allow_commands=limits.allow_commands
            )
            found += energy(samples)
    except AudioError as error:
        return _reject_cut(entry, row, error.reason, str(error))
    if found < 10 ** (SILENCE_DB / 10) * cut.num_samples:
        detail = f"the level of the whole cut is below {SILENCE_DB:g} dB of full scale"
        return _reject_cut(entry, row, "silent", detail)
    return cut


def _samples_at_a_time(row: dict[str, Any]) -> int:
    """Returns how many samples of a cut may be decoded at a time; a command is run once."""
    recording = row["recording"]
    if any(source["type"] == "command" for source in recording["sources"]):
        return sys.maxsize
    ratio = max(1.0, source_rate(recording) / recording["sampling_rate"])
    return max(1, int(_MAX_DECODED / ratio / max(len(source["channels"]) for source in recording["sources"])))


def _reject_cut(entry: Entry, row: dict[str, Any], reason: RejectReason, detail: str) -> Reject:
    return Reject(entry.where, row["id"], reason, detail, span_of_cut(row, entry.member))


def _reject(entry: Entry, reason: RejectReason, detail: str) -> Reject:
    return Reject(entry.where, entry.cut_id, reason, detail)

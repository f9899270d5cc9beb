"""Checks the audio of an entry, and returns the cuts made from it or the reason why it is rejected."""

import os
import sys
from functools import cache
from typing import Any, NamedTuple

from nestdata.audio.channels import MIX_FIELD, is_mixed
from nestdata.audio.decode import SILENCE_DB, energy, load_samples, samples_in
from nestdata.errors import AudioError, StorageError
from nestdata.prepare.audio_span import AudioSpan, span_of_cut
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.cut_rows import cut_row, resample, source_at, windows
from nestdata.prepare.header import AudioInfo, read_header
from nestdata.prepare.inputs.audio import Audio, Command, File, LhotseCut, Member, RejectReason, Unusable, at_member
from nestdata.prepare.inputs.entry import Entry
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


class WholeEntry(NamedTuple):
    """The audio of an entry that was read as far as the configuration asks, before it is divided and resampled."""

    entry: Entry
    audio: Audio
    """The audio of the entry, with its bytes if they are needed."""

    row: dict[str, Any]
    """The cut as a dict."""

    version: FileVersion | None
    """The version of its local file, if it was opened."""

    def reject(self, row: dict[str, Any], reason: RejectReason, detail: str) -> Reject:
        """Returns why a part of the entry is not taken, with its audio."""
        return Reject(self.entry.where, row["id"], reason, detail, span_of_cut(row, self.audio.member))


def probe(entry: Entry, config: PrepareConfig) -> list[Cut | Reject]:
    """Returns the cut of an entry, or its windows, at the rate of the corpus; unusable ones are a `Reject`.

    With `config.probe` "missing", a file is opened only if the manifest gives no duration; "all" reads the header of
    every file; "decode" decodes every cut.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    whole = read_entry(entry, config)
    if isinstance(whole, Reject):
        return [whole]
    rows = windows(whole.row, config.window_seconds, config.sampling_rate)
    if reject := check_length(entry, rows[0], config):
        return [reject]
    return [finish(whole, row, config) for row in rows]


def read_entry(entry: Entry, config: PrepareConfig) -> WholeEntry | Reject:
    """Reads what is needed of the audio of an entry.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    try:
        audio = entry.audio
        if audio.member and not isinstance(audio, Unusable):
            member = audio.member.loaded(is_decoded=config.probe == "decode" or config.finds_speech)
            audio = member if isinstance(member, Unusable) else at_member(audio, member)
        match audio:
            case Unusable():
                found: WholeEntry | Unusable = audio
            case LhotseCut():
                found = _cut_from_lhotse(entry, audio, config)
            case _:
                found = _cut_from_file(entry, audio, config)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        found = Unusable(error.kind, str(error))
    return _reject(entry, found.reason, found.detail) if isinstance(found, Unusable) else found


def finish(whole: WholeEntry, row: dict[str, Any], config: PrepareConfig) -> Cut | Reject:
    """Returns a cut that is resampled and decoded as the configuration asks; modifies the recording of `row`."""
    recording, audio = row["recording"], whole.audio
    cut = Cut(row, samples_in(row["duration"], config.sampling_rate), audio.member, whole.version)
    resample(recording, config.sampling_rate)
    if config.probe == "decode" and (reject := _undecodable(whole, cut, config)):
        return reject
    if isinstance(audio, File) and audio.stored_path:
        # A copy of audio in the corpus directory is moved and copied with it, which may change its time.
        recording["sources"] = [{**recording["sources"][0], "source": audio.stored_path}]
        return cut._replace(version=None)
    return cut


def reads_audio(entry: Entry, config: PrepareConfig) -> bool:
    """Returns whether `probe` reads the header or the samples of an entry."""
    cut = entry.audio if isinstance(entry.audio, LhotseCut) else None
    if config.finds_speech:
        return True
    if config.probe == "missing":
        return cut is None and entry.duration is None and entry.num_frames is None
    return config.probe == "decode" or cut is None or not cut.is_measured


def check_length(entry: Entry, row: dict[str, Any], config: PrepareConfig) -> Reject | None:
    """Checks the limits on duration, in samples, because a duration in seconds after an offset is inexact."""
    rate, seconds = config.sampling_rate, row["duration"]
    num_samples = samples_in(seconds, rate)
    if num_samples < _limit_in(config.min_seconds, rate):
        return _reject(entry, "too_short", f"{seconds:.6g} s, the minimum is {config.min_seconds:g} s")
    if config.max_seconds is not None and num_samples > _limit_in(config.max_seconds, rate):
        return _reject(entry, "too_long", f"{seconds:.6g} s, the maximum is {config.max_seconds:g} s")
    if num_samples < 1:
        return _reject(entry, "empty", "the span is shorter than one sample")
    return None


def _cut_from_file(entry: Entry, audio: File | Command | Member, config: PrepareConfig) -> WholeEntry | Unusable:
    """Returns the cut of a span of a file or of the output of a command."""
    rate, channel = config.sampling_rate, 0 if config.channel == "mix" else config.channel
    duration = entry.duration if entry.num_frames is None else entry.num_frames / rate
    if config.probe == "missing" and duration is not None:
        info = AudioInfo(rate, samples_in(entry.offset + duration, rate), channel + 1)
    else:
        found = read_header(audio)
        if isinstance(found, Unusable):
            return found
        info = found
        duration = entry.duration if entry.num_frames is None else entry.num_frames / info.rate
        if problem := _problem_of_span(info, entry.offset, duration):
            return problem
    left = info.num_frames / info.rate - entry.offset
    row = cut_row(entry, audio, info, left if duration is None else min(duration, left), channel)
    if config.channel == "mix":
        row["custom"] = row.get("custom", {}) | {MIX_FIELD: "mix"}
    problem = _problem_of_layout(info.rate, channel, info.num_channels, config)
    return problem or WholeEntry(entry, audio, row, info.version)


def _problem_of_span(info: AudioInfo, start: float, duration: float | None) -> Unusable | None:
    length, end = info.num_frames / info.rate, start + (duration or 0.0)
    if info.ends_early and (duration is None or end > length):
        return Unusable("truncated", f"the file ends after {length:.3f} s, before the length in its header")
    if start >= length:
        detail = f"the span in the manifest starts at {start:.3f} s, the audio lasts {length:.3f} s"
        return Unusable("wrong_duration", detail)
    if end > length + _ROUNDING_S:
        detail = f"the span in the manifest ends at {end:.3f} s, the audio lasts {length:.3f} s"
        return Unusable("wrong_duration", detail)
    return None


def _problem_of_layout(rate: int, channel: int, num_channels: int, config: PrepareConfig) -> Unusable | None:
    if rate < config.min_rate:
        return Unusable("rate_too_low", f"{rate} Hz, the minimum is {config.min_rate} Hz")
    if channel >= num_channels:
        detail = f"channel {channel} was requested, and the number of channels is {num_channels}"
        return Unusable("no_such_channel", detail)
    return None


def _cut_from_lhotse(entry: Entry, audio: LhotseCut, config: PrepareConfig) -> WholeEntry | Unusable:
    """Returns a Lhotse cut, checked against the header of its file; modifies `audio.row`."""
    row, recording, version = audio.row, audio.row["recording"], None
    channel, length, rate = row["channel"], recording["duration"], source_rate(recording)
    for source in recording["sources"]:
        if source["type"] == "file":
            source["source"] = os.path.abspath(source["source"])
    if is_mixed(row) and len(recording["sources"]) > 1:
        detail = "the channels of the recording are in several files, and only those of one file can be averaged"
        return Unusable("no_such_channel", detail)
    with_channel = [source for source in recording["sources"] if channel in source["channels"]]
    if not with_channel:
        channels = sorted(channel for source in recording["sources"] for channel in source["channels"])
        detail = f"channel {channel} was requested, and the recording has {channels}"
        return Unusable("no_such_channel", detail)
    source = with_channel[0]
    if audio.member:
        source["type"], source["source"] = source_at(audio.member)
    position, num_channels = source["channels"].index(channel), len(source["channels"])
    in_manifest = AudioInfo(recording["sampling_rate"], recording["num_samples"], num_channels)
    if problem := _problem_of_span(in_manifest, row["start"], row["duration"]):
        return problem
    if config.probe != "missing" and not audio.is_measured and (audio.member or source["type"] == "file"):
        info = read_header(audio.member or File(source["source"]))
        if isinstance(info, Unusable):
            return info
        rate, num_channels, version = info.rate, info.num_channels, info.version
        if all(transform["name"] == "Resample" for transform in recording.get("transforms") or ()):
            if problem := _problem_of_span(info, row["start"], row["duration"]):
                return problem
            length = min(length, info.num_frames / info.rate)
    if row["duration"] > length - row["start"] + 0.5 / recording["sampling_rate"]:
        row["duration"] = length - row["start"]
    return _problem_of_layout(rate, position, num_channels, config) or WholeEntry(entry, audio, row, version)


def source_rate(recording: dict[str, Any]) -> int:
    """Returns the rate in Hz of the file of a Lhotse recording, as given by the recording itself."""
    resampled = [t["kwargs"] for t in recording.get("transforms") or () if t["name"] == "Resample"]
    rate: int = resampled[0]["source_sampling_rate"] if resampled else recording["sampling_rate"]
    return rate


def _undecodable(whole: WholeEntry, cut: Cut, config: PrepareConfig) -> Reject | None:
    """Decodes a cut from start to end; returns a reject if its audio cannot be used."""
    row = cut.row
    block, found = _samples_at_a_time(row), 0.0
    try:
        content = whole.audio.read()
        for start in range(0, cut.num_samples, block):
            size = min(block, cut.num_samples - start)
            samples = load_samples(
                row, start=start, num_samples=size, content=content, allow_commands=config.allow_commands
            )
            found += energy(samples)
    except AudioError as error:
        return whole.reject(row, error.reason, str(error))
    if found < 10 ** (SILENCE_DB / 10) * cut.num_samples:
        return whole.reject(row, "silent", f"the level of the whole cut is below {SILENCE_DB:g} dB of full scale")
    return None


def _samples_at_a_time(row: dict[str, Any]) -> int:
    """Returns how many samples of a cut may be decoded at a time; a command is run once."""
    recording = row["recording"]
    if any(source["type"] == "command" for source in recording["sources"]):
        return sys.maxsize
    ratio = max(1.0, source_rate(recording) / recording["sampling_rate"])
    return max(1, int(_MAX_DECODED / ratio / max(len(source["channels"]) for source in recording["sources"])))


def _reject(entry: Entry, reason: RejectReason, detail: str) -> Reject:
    return Reject(entry.where, entry.cut_id, reason, detail)

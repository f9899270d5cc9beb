"""Reads an entry as far as the configuration asks: its cut as a dict, or the reason why it is rejected.

The dict has the form that Lhotse writes. Building Lhotse's objects for every line of a large manifest would take longer
than everything else together.
"""

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nestdata.audio.channels import MIX_FIELD, Channel, is_mixed
from nestdata.audio.decode import samples_in
from nestdata.audio.lhotse_audio import file_rate
from nestdata.corpus import members
from nestdata.errors import StorageError
from nestdata.prepare.found import Reject
from nestdata.prepare.header import AudioInfo, read_header
from nestdata.prepare.inputs.audio import Audio, File, LhotseCut, Member, RejectReason, Unusable, at_member
from nestdata.prepare.inputs.entry import Entry
from nestdata.prepare.inputs.meaning import divide_labels
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.storage import FileVersion

ROUNDING_S = 0.05
"""Tolerance for durations that manifests have rounded."""


class WholeEntry(NamedTuple):
    """The audio of an entry that was read as far as the configuration asks, before it is divided and resampled."""

    entry: Entry
    audio: Audio
    """The audio of the entry, with its bytes if they are needed."""

    row: dict[str, Any]
    """The cut as a dict."""

    version: FileVersion | None
    """The version of its local file, if it was opened."""

    ends_early: bool = False
    """Whether its file ends before its own header says, and is used up to there."""

    def reject(self, row: dict[str, Any], reason: RejectReason, detail: str) -> Reject:
        """Returns why a part of the entry is not taken."""
        return Reject(self.entry.where, row["id"], reason, detail)


def read_entry(entry: Entry, config: PrepareConfig) -> WholeEntry | Reject:
    """Reads what is needed of the audio of an entry.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    if entry.channel is not None and config.channel is not None:
        entry = _in_channel(entry, config.chosen_channel)
    try:
        audio = entry.audio
        if audio.member:
            member = audio.member.loaded(is_decoded=config.probe == "decode" or config.finds_speech)
            audio = member if isinstance(member, Unusable) else at_member(audio, member)
        if isinstance(audio, Unusable):
            found: WholeEntry | Unusable = audio
        elif isinstance(audio, LhotseCut):
            found = _cut_from_lhotse(entry, audio, config)
        else:
            found = _cut_from_file(entry, audio, config)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        found = Unusable(error.kind, str(error))
    if isinstance(found, Unusable):
        return Reject(entry.where, entry.cut_id, found.reason, found.detail)
    return found


def has_text(row: Mapping[str, Any]) -> bool:
    """Returns whether a cut, as a dict, has a text."""
    return any("text" in label for label in row["supervisions"])


def reads_audio(entry: Entry, config: PrepareConfig) -> bool:
    """Returns whether the header or the samples of an entry are read."""
    if config.finds_speech:
        return True
    if config.probe == "missing":
        return not isinstance(entry.audio, LhotseCut) and entry.duration is None and entry.num_frames is None
    return True


def _cut_from_file(entry: Entry, audio: File | Member, config: PrepareConfig) -> WholeEntry | Unusable:
    """Returns the cut of a span of a file or member."""
    given = config.chosen_channel if entry.channel is None else entry.channel
    channel = given if isinstance(given, int) else 0
    offset, duration = _span_of(entry, config.sampling_rate)
    if config.probe == "missing" and duration is not None:
        info = AudioInfo(config.sampling_rate, samples_in(offset + duration, config.sampling_rate), channel + 1)
    else:
        audio, found = _read_file(audio, searches=config.probe == "decode")
        if isinstance(found, Unusable):
            return found
        info, (offset, duration) = found, _span_of(entry, found.rate)
        length = info.num_frames / info.rate
        # A span that ends after the file, and is as long as the file, is the position of this clip in a recording.
        if duration is not None and offset + duration > length + ROUNDING_S and abs(duration - length) <= ROUNDING_S:
            offset, duration = 0.0, None
    left = info.num_frames / info.rate - offset
    # The rest of a truncated file is used, unless it has a text, which describes more audio.
    is_used = info.ends_early and left > 0 and "text" not in divide_labels(entry.labels or {})[0]
    if not is_used and (problem := _problem_of_span(info, offset, duration)):
        return problem
    row = _cut_row(entry, audio, info, (offset, left if duration is None else min(duration, left)), channel)
    if given == "mix":
        row["custom"] = row.get("custom", {}) | {MIX_FIELD: "mix"}
    problem = _problem_of_layout(info.rate, channel, info.num_channels, config)
    ends_early = info.ends_early and (duration is None or duration > left)
    return problem or WholeEntry(entry, audio, row, info.version, ends_early)


def _span_of(entry: Entry, rate: int) -> tuple[float, float | None]:
    """Returns start and duration of an entry in seconds, given the rate of its file."""
    offset = entry.offset if entry.first_frame is None else entry.first_frame / rate
    return offset, entry.duration if entry.num_frames is None else entry.num_frames / rate


def _read_file(audio: File | Member, *, searches: bool) -> tuple[File | Member, AudioInfo | Unusable]:
    """Returns audio and its header; if a file does not exist, of one with the same name in another Unicode form."""
    info = read_header(audio, searches=searches)
    if isinstance(info, Unusable) and info.reason == "missing" and isinstance(audio, File):
        location = _in_other_form(audio.location)
        if location:
            audio = replace(audio, location=location)
            info = read_header(audio, searches=searches)
    return audio, info


def _in_other_form(path: str) -> str:
    """Returns the path of a file whose name is the same text in another Unicode form; empty if there is none."""
    found = ""
    for part in [] if path.isascii() else path.strip("/").split("/"):
        forms = (part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD")))
        found = next((place for form in forms if os.path.exists(place := f"{found}/{form}")), "")
        if not found:
            break
    return found


def _in_channel(entry: Entry, channel: Channel | None) -> Entry:
    """Returns an entry without the channel that its row names, and with the id for the one that the caller chose."""
    stem = entry.cut_id.removesuffix(f"@ch{entry.channel}")
    suffix = "" if stem == entry.cut_id else "@mix" if channel == "mix" else f"@ch{channel}"
    return entry._replace(cut_id=stem + suffix, channel=None)


def _cut_row(
    entry: Entry, audio: File | Member, info: AudioInfo, span: tuple[float, float], channel: int
) -> dict[str, Any]:
    """Returns the cut of an entry that is not a Lhotse cut, given its start and duration in seconds."""
    cut_id, channels, (start, duration) = entry.cut_id, list(range(info.num_channels)), span
    kind, source = _source_at(audio)
    row: dict[str, Any] = {
        "id": cut_id,
        "start": start,
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
    labels, custom = divide_labels(entry.labels or {})
    if labels:
        whole = {"id": cut_id, "recording_id": cut_id, "start": 0.0, "duration": duration, "channel": channel}
        row["supervisions"].append(whole | labels)
    if custom:
        row["custom"] = custom
    return row


def _source_at(audio: File | Member) -> tuple[str, str]:
    """Returns type and source of a Lhotse `AudioSource`."""
    if isinstance(audio, File):
        return "file", audio.location
    found = members.source_at(audio.shard, audio.offset, audio.length)
    return found["type"], found["source"]


def _problem_of_span(info: AudioInfo, start: float, duration: float | None) -> Unusable | None:
    length, end = info.num_frames / info.rate, start + (duration or 0.0)
    if info.ends_early and (duration is None or end > length):
        return Unusable("truncated", f"the file ends after {length:.3f} s, before the length in its header")
    if start >= length:
        detail = f"the span in the manifest starts at {start:.3f} s, the audio lasts {length:.3f} s"
        return Unusable("wrong_duration", detail)
    if end > length + ROUNDING_S:
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
    channel, length, rate = row["channel"], recording["duration"], file_rate(recording)
    for source in recording["sources"]:
        if source["type"] == "file":
            source["source"] = os.path.abspath(source["source"])
    if is_mixed(row) and len(recording["sources"]) > 1:
        detail = "the channels of the recording are in several files, but only channels of one file can be averaged"
        return Unusable("no_such_channel", detail)
    with_channel = [source for source in recording["sources"] if channel in source["channels"]]
    if not with_channel:
        channels = sorted(channel for source in recording["sources"] for channel in source["channels"])
        detail = f"channel {channel} was requested, and the recording has {channels}"
        return Unusable("no_such_channel", detail)
    source = with_channel[0]
    if audio.member:
        source["type"], source["source"] = _source_at(audio.member)
    position, num_channels = source["channels"].index(channel), len(source["channels"])
    in_manifest = AudioInfo(recording["sampling_rate"], recording["num_samples"], num_channels)
    if problem := _problem_of_span(in_manifest, row["start"], row["duration"]):
        return problem
    if config.probe != "missing" and (audio.member or source["type"] == "file"):
        file = File(source["source"], hint=audio.hint)
        found, info = _read_file(audio.member or file, searches=config.probe == "decode")
        if isinstance(info, Unusable):
            return info
        if isinstance(found, File):
            source["source"] = found.location
        rate, num_channels, version = info.rate, info.num_channels, info.version
        if all(transform["name"] == "Resample" for transform in recording.get("transforms") or ()):
            if problem := _problem_of_span(info, row["start"], row["duration"]):
                return problem
            length = min(length, info.num_frames / info.rate)
    if row["duration"] > length - row["start"] + 0.5 / recording["sampling_rate"]:
        row["duration"] = length - row["start"]
    return _problem_of_layout(rate, position, num_channels, config) or WholeEntry(entry, audio, row, version)

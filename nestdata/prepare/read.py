"""Reads an entry as far as the configuration asks: its cut as a dict, or the reason why it is rejected.

The dict has the form that Lhotse writes. Building Lhotse's objects for every line of a large manifest would take longer
than everything else together. The headers of plain FLAC and WAV files are parsed here, in a twentieth of libsndfile's
time. Everything else is opened as for decoding. If a header gives no length, or only part of it, the samples are
counted: by frames or pages if possible, otherwise by decoding.
"""

import os
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nestdata.audio import flac, mpeg, wav
from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.channels import MIX_FIELD, Channel, is_mixed
from nestdata.audio.decode import samples_in
from nestdata.audio.encoded import EncodedAudio, open_copy, open_ranges
from nestdata.audio.file_kind import check_regular_file, special_file_kind
from nestdata.audio.lhotse_audio import file_rate
from nestdata.audio.parts import JoinedAudio, SoundFileAudio
from nestdata.audio.reader import AudioReader, MixedStreamsError
from nestdata.corpus import members
from nestdata.errors import AudioError, StorageError
from nestdata.prepare.found import Reject
from nestdata.prepare.inputs.entry import (
    HEAD_BYTES,
    Audio,
    Entry,
    File,
    LhotseCut,
    Member,
    RejectReason,
    Unusable,
    at_member,
)
from nestdata.prepare.inputs.rows import divide_labels
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.storage import FileVersion, is_url

ROUNDING_S = 0.05
"""Tolerance for durations that manifests have rounded."""
_FLAC_MAGIC = b"fLaC"
# Largest number of samples of a channel per byte of a file; more are a mistake in its header. It is FLAC's: up to 65535
# samples in a frame of 12 bytes, 8 for the header, 2 for a constant of 4 bits, 2 for the checksum (RFC 9639, sections
# 9.1 to 9.3).
_MAX_SAMPLES_PER_BYTE = 65535 / 12


class AudioInfo(NamedTuple):
    """Properties of an audio file or recording, known without decoding it."""

    rate: int
    num_frames: int
    num_channels: int
    ends_early: bool = False
    """Whether the file is shorter than its own header says."""

    version: FileVersion | None = None
    """The version of a local file; None for a member, and if no file was opened."""


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
        found = Unusable.of(error)
    if isinstance(found, Unusable):
        return Reject(entry.where, entry.cut_id, found.reason, found.detail)
    return found


def read_header(audio: File | Member, *, searches: bool = False) -> AudioInfo | Unusable:
    """Reads the header of an audio file or of a member.

    Args:
        audio: The audio.
        searches: Whether to look for a second file in all bytes of FLAC; if not, its last frame is compared with its
            header.

    Raises:
        StorageError: The member cannot be read.
    """
    import soundfile

    try:
        if isinstance(audio, File):
            info, size = _header_of_file(audio.location, searches)
        else:
            is_distant = is_url(audio.location) and not audio.is_loaded
            info, size = _header_in(audio.ranges(), None, searches, is_distant=is_distant), audio.length
    except (MixedStreamsError, AudioError) as error:
        return Unusable("unreadable", f"{audio}: {error}")
    except (soundfile.LibsndfileError, OSError, ValueError) as error:
        found = _header_after(error, audio)
        if isinstance(found, Unusable):
            return found
        info, size = found
    if info.num_frames > _MAX_SAMPLES_PER_BYTE * size:
        detail = f"{audio}: its header gives {info.num_frames} samples, too many for {size} bytes"
        return Unusable("truncated", detail)
    if info.num_frames <= 0:
        return Unusable("empty", f"{audio} holds no samples")
    return info


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


def _header_of_file(path: str, searches: bool) -> tuple[AudioInfo, int]:
    """Returns the header of a file and its size.

    Raises OSError, ValueError, soundfile.LibsndfileError.
    """
    check_regular_file(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        info = _header_in(ByteRanges.of_file(descriptor, status.st_size), lambda: open_copy(descriptor), searches)
    finally:
        os.close(descriptor)
    # Not by `_replace`, which takes a fiftieth of the time of a line.
    return AudioInfo(
        info.rate, info.num_frames, info.num_channels, info.ends_early, FileVersion.of(status)
    ), status.st_size


def _header_in(
    ranges: ByteRanges, open_whole: Callable[[], SoundFileAudio] | None, searches: bool, *, is_distant: bool = False
) -> AudioInfo:
    """Returns the header of audio.

    Args:
        ranges: The bytes.
        open_whole: As for `open_ranges`.
        searches: As for `read_header`.
        is_distant: Whether each read is a request to a store.

    Raises the same errors as `_header_of_file`, and errors of reading the bytes.
    """
    head = ranges.at(0, HEAD_BYTES)
    info = _plain_header(head, ranges.size)
    start = mpeg.tag_length(head)
    behind_tag = ranges.at(start, HEAD_BYTES) if start else head
    if behind_tag.startswith(_FLAC_MAGIC) and not is_distant:
        header, last = flac.stream_info(behind_tag), flac.last_sample(behind_tag, ranges)
        if searches or header.num_samples != last or flac.is_too_large(behind_tag, header, ranges.size):
            with open_ranges(ranges, open_whole, searches=True) as file:
                if isinstance(file, JoinedAudio):
                    info = _info_of(file)
                elif header.num_samples != last:
                    info = _counted_flac(file, header.num_samples, (last or 0) - flac.block_size(behind_tag))
    if info is None:
        if is_distant:
            ranges.at(HEAD_BYTES, 1)  # not under the lock of the process that soundfile holds while it opens a stream
        try:
            with open_ranges(ranges, open_whole) as file:
                info = _info_of(file)
        finally:
            ranges.check()
    ranges.check()
    return info


def _plain_header(head: bytes, size: int) -> AudioInfo | None:
    """Parses the start of a file of `size` bytes; returns None if libsndfile has to read the header."""
    found = flac.parse_header(head) or wav.parse_header(head, size)
    return AudioInfo(found.rate, found.num_samples, found.num_channels) if found else None


def _counted_flac(file: AudioReader, claimed: int, last_block: int) -> AudioInfo:
    """Returns the header of an open FLAC file with the number of samples that can be decoded.

    Args:
        file: The file.
        claimed: Number of samples that its header gives; 0 if it gives none.
        last_block: First sample of its last frame, which may be cut off; negative if none is found.

    Raises:
        AudioError: Its header gives no length, and frames follow behind damage.
    """
    num_samples = file.skip()
    if not claimed and last_block > num_samples:
        after, seconds = num_samples / file.rate, (last_block - num_samples) / file.rate
        raise AudioError(f"damaged after {after:.2f} s, and {seconds:.2f} s follow")
    return AudioInfo(file.rate, num_samples, file.num_channels, num_samples < claimed)


def _info_of(file: AudioReader) -> AudioInfo:
    """Returns the header of an open file; counts the samples if they are not known."""
    return AudioInfo(file.rate, file.count(), file.num_channels, file.ends_early)


def _header_after(error: Exception, audio: File | Member) -> tuple[AudioInfo, int] | Unusable:
    """Returns why libsndfile could not read a header, or the header that another decoder found, and the size.

    The causes are examined only after a failure, because most files are valid and every call costs time.
    """
    if isinstance(audio, File):
        path = audio.location
        if kind := special_file_kind(path):
            return Unusable("not_a_file", f"{path} is {kind}")
        if isinstance(error, PermissionError):
            return Unusable("unreadable", f"{path} cannot be opened ({error.strerror}); grant read permission")
        if not os.path.isfile(path):
            return Unusable("missing", f"{path} does not exist{audio.hint}")
    encoded = EncodedAudio(str(audio), audio.read())
    if not encoded.size():
        return Unusable("empty", f"{audio} has no bytes")
    if kind := encoded.kind_if_not_audio():
        return Unusable("not_audio", f"{audio} is {kind}")
    try:
        with encoded.open() as file:
            info = _info_of(file)
    except (RuntimeError, ValueError) as other:  # libsndfile and torchcodec raise RuntimeErrors
        error = other
        if encoded.has_no_sound():
            return Unusable("not_audio", f"{audio} has pictures and no sound: leave it out")
    else:
        if isinstance(audio, Member):
            return info, audio.length
        status = os.stat(audio.location)
        return info._replace(version=FileVersion.of(status)), status.st_size
    # libsndfile's own message: soundfile adds the file descriptor, which differs between processes.
    detail = " ".join(getattr(error, "error_string", str(error)).split())[:300].rstrip(".")
    return Unusable("unreadable", f"{audio}: {detail}{encoded.advice()}")

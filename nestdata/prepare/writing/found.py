"""Cuts and rejects found in an entry; rejects have the location of their audio, so that it can be listened to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nestdata.audio.channels import Channel, is_mixed
from nestdata.prepare.inputs.audio import File, LhotseCut, Member, RejectReason, Unusable
from nestdata.redaction import redacted
from nestdata.storage import FileVersion

if TYPE_CHECKING:
    from nestdata.corpus.addresses import Address
    from nestdata.prepare.inputs.entry import Entry


class Extent(NamedTuple):
    """The bytes of an audio file in a shard."""

    offset: int
    length: int
    shard_size: int
    etag: str | None


class AudioSpan(NamedTuple):
    """A span of one channel of an audio file, with all that is needed to decode it natively."""

    location: str
    """Path or URL of the file, or of the shard that holds it."""

    extent: Extent | None
    """Its bytes in the shard; None for a file of its own."""

    start: float
    """In seconds from the start of the file."""

    duration: float | None
    """In seconds; None for the rest of the file."""

    channel: int | None
    """Index of the channel in the file; None for the average of all."""

    @classmethod
    def from_json(cls, values: list[Any]) -> "AudioSpan":
        """Returns the span that was written as JSON."""
        location, extent, *rest = values
        return cls(location, extent and Extent(*extent), *rest)


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


def rejected_entry(entry: "Entry", reason: RejectReason, detail: str, channel: Channel) -> Reject:
    """Returns why an entry is not taken as a whole, with its audio if it can be opened.

    Args:
        entry: The entry.
        reason: The reason.
        detail: An explanation that gives the values found.
        channel: Channel of audio whose manifest names none.
    """
    audio = entry.audio.audio if isinstance(entry.audio, Unusable) else entry.audio
    span = None
    match audio:
        case LhotseCut(row, member):
            span = span_of_cut(row, member)
        case File() | Member():
            given = channel if entry.channel is None else entry.channel
            index = None if given == "mix" else given
            span = AudioSpan(audio.location, _extent(audio.member), entry.offset, entry.duration, index)
    return Reject(entry.where, entry.cut_id, reason, detail, span)


def span_of_cut(row: Mapping[str, Any], member: Member | None = None) -> AudioSpan | None:
    """Returns the audio of a Lhotse cut; None if it is neither a file nor a member.

    Args:
        row: The cut as a dict.
        member: Where its audio is, if that is not the file that the row names.
    """
    return _span(row, member.location if member else None, _extent(member))


def span_at_address(row: Mapping[str, Any], address: "Address | None") -> AudioSpan | None:
    """Returns the audio of a cut of a corpus, given its address if it has one; otherwise as `span_of_cut`."""
    if address is None:
        return _span(row, None, None)
    extent = Extent(address.offset, address.length, address.shard_size, address.etag)
    return _span(row, address.location, extent)


def _span(row: Mapping[str, Any], location: str | None, extent: Extent | None) -> AudioSpan | None:
    for source in row["recording"].get("sources", ()):
        if row["channel"] in source["channels"]:
            if location is None and source["type"] != "file":
                return None
            channel = None if is_mixed(row) else source["channels"].index(row["channel"])
            return AudioSpan(location or source["source"], extent, row["start"], row["duration"], channel)
    return None


def _extent(member: Member | None) -> Extent | None:
    return Extent(member.offset, member.length, member.shard.size, member.shard.etag) if member else None

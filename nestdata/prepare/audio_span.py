"""Where a span of audio is, with all that is needed to decode it natively for the report."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nestdata.audio.channels import Channel, is_mixed
from nestdata.prepare.inputs.audio import Audio, File, LhotseCut, Member

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
    """A span of one channel of an audio file."""

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


def span_of_entry(entry: "Entry", audio: Audio | None, channel: Channel) -> AudioSpan | None:
    """Returns the span of an entry in its audio, or None if it cannot be opened: commands are not run again."""
    match audio:
        case LhotseCut(row, member):
            return span_of_cut(row, member)
        case File() | Member():
            index = None if channel == "mix" else channel
            return AudioSpan(audio.location, _extent(audio.member), entry.offset, entry.duration, index)
    return None


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

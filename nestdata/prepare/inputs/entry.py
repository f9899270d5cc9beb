"""Entries and sources: the form that every input format is converted to.

An entry is a span of audio that an input names, before the audio has been opened: in a file, in a shard, in a cut of
Lhotse; or why it is unusable. A source yields the entries of one input in two steps, so that the work can be shared
among processes: `items` runs in one process and only splits the input into lines, paths, row numbers or shards;
`entries` parses one item, in whichever process receives it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

from nestdata.audio.byte_ranges import ByteRanges
from nestdata.errors import StorageError
from nestdata.input_format import InputFormat
from nestdata.storage import ObjectInfo, is_url, storage

if TYPE_CHECKING:
    from nestdata.prepare.inputs.rows import Meaning

# Offsets and durations of this many seconds, about four months, or more are treated as mistakes.
MAX_SECONDS = 1e7

MAIN_SUFFIXES = (
    ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".m4a", ".sph", ".w64", ".wma",
)  # fmt: skip
"""Suffixes of the formats that speech is published in. If files differ in the suffix alone, these are read first."""

# Other suffixes of what the decoders read. Left out are those that mostly name something else, `.mat`, `.htk`
# (features), `.iff` (pictures) and `.ts` (programs), and `.raw`, whose rate is unknown.
_LIBSNDFILE_SUFFIXES = (
    ".wave", ".rf64", ".aifc", ".au", ".snd", ".caf", ".oga", ".mp1", ".mp2", ".nist", ".voc", ".ircam", ".sf",
    ".svx", ".8svx", ".avr", ".paf", ".pvf", ".sds", ".wve", ".xi",
)  # fmt: skip
_FFMPEG_SUFFIXES = (
    ".aac", ".ac3", ".amr", ".ape", ".awb", ".dff", ".dsf", ".dts", ".eac3", ".m4b", ".mka", ".mpc", ".mpga", ".ra",
    ".spx", ".tta", ".weba", ".wv", ".3g2", ".3gp", ".asf", ".avi", ".f4v", ".flv", ".m2ts", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".ogx", ".vob", ".webm", ".wmv",
)  # fmt: skip

AUDIO_SUFFIXES = MAIN_SUFFIXES + _LIBSNDFILE_SUFFIXES + _FFMPEG_SUFFIXES
"""Suffixes of what libsndfile or, if torchcodec is installed, FFmpeg reads: audio, and videos for their sound."""

AUDIO_KEYS = ("audio_filepath", "audio_filename")
"""Names of the audio file in NeMo's manifests, which others use as well."""

RejectReason = str
"""Why audio is not taken into a corpus: a key of `ADVICE`."""

ADVICE = {
    "missing": "Check the paths; docs/formats.md says where relative ones start.",
    "not_a_file": "Name audio files: directories, pipes, sockets and devices are never opened.",
    "empty": "Copy the files again, or drop the lines.",
    "unreadable": "Convert the files again.",
    "truncated": "Copy the files again: they are shorter than their own headers say.",
    "not_audio": "Get the audio in their place, as the details say.",
    "wrong_duration": "Rebuild the manifest from the current audio.",
    "not_finite": "Convert the files again: they hold NaN or Inf.",
    "silent": "Check that --channel names the channel with speech.",
    "no_speech": (
        "No speech was found: these are pauses, music or noise, or --channel names a channel without speech. Prepare "
        "noise without --segment and --min-speech-share."
    ),
    "little_speech": "Lower --min-speech-share to keep them.",
    "too_short": "Lower --min-seconds to keep them.",
    "too_long": "Raise --max-seconds, or cut them with --window-seconds.",
    "duplicate_id": "Drop one of the two: they are the same audio, or a recording in two forms.",
    "rate_too_low": "Lower --min-rate to keep them.",
    "no_such_channel": "Give another --channel.",
    "changed": "Prepare again when nothing writes to the shards any more.",
    "corrupt": "Copy the shards again: their bytes do not have the checksums in the manifest.",
    "no_such_member": "Check that the archives belong to this manifest.",
    "ambiguous_member": "Pack the archives again, with one member for each name.",
    "shard_unreadable": "Copy the archives again.",
    "compressed_tar": "Decompress the archives: members of compressed ones cannot be read at random.",
    "unsafe_member": "Pack the archives again, without links, devices, and names outside of the archive.",
    "too_large": "Divide the files: members of 4 GiB or more have no address.",
    "invalid_url": "Give URLs of object stores, without user names, passwords, queries and fragments.",
    "malformed_row": "Fix these rows, or drop them.",
    "unknown_pointer": "Write the manifest with Lhotse's Shar writers, or name the tars themselves.",
    "transform": "Write the audio to files in Lhotse first, with `CutSet.save_audios`.",
    "command": "Commands are not run. Write the audio to files first, and name these.",
}
"""What to do about rejected audio, by the reason of the reject."""

MAX_BYTES = 0xFFFFFFFF
"""Length of the longest member with an address (`nestdata.corpus.addresses`), which has 32 bits for it."""

HEAD_BYTES = 1 << 14
"""Bytes from the start of an audio file that hold its header, with 8 KiB of padding that the `flac` program writes."""

# Bytes that are read at a time behind the header. A request to a store costs as much as half a megabyte.
_LOCAL_BLOCK, _REMOTE_BLOCK = 1 << 14, 1 << 18


class _Audio:
    """Defaults, for audio that is not in a shard."""

    __slots__ = ()

    @property
    def member(self) -> "Member | None":
        """The bytes in a shard or object, if that is where the audio is."""
        return None

    def read(self) -> bytes | None:
        """Returns the bytes of audio in a shard or object; None for other audio. Raises the errors of the store."""
        return self.member.read() if self.member else None


@dataclass(frozen=True, slots=True)
class File(_Audio):
    """An audio file of its own."""

    location: str
    """Absolute path or URL."""

    hint: str = field(default="", compare=False, repr=False)
    """What to add to the message if it does not exist: the other places where it was looked for."""

    def __str__(self) -> str:
        return self.location


@dataclass(frozen=True, slots=True)
class Member(_Audio):
    """The bytes of an audio file in a shard: a member of a tar, or a whole object. They are read when they are needed.

    Reading raises the same errors as `Storage.read_range`.
    """

    shard: ObjectInfo
    offset: int
    """First byte in the shard."""

    length: int
    """Number of bytes."""

    crc32: int | None = None
    """Checksum of the bytes, if the source has read all of them; `loaded` computes it if it reads them."""

    start: bytes = field(default=b"", repr=False)
    """The first bytes, or all, as far as they have been read already."""

    written_to: str = ""
    """Path of the shard while the corpus is not in place, if that differs from its location."""

    def __str__(self) -> str:
        from nestdata.corpus.members import describe  # imports numpy, which `--help` can do without

        return describe(self.shard.location, self.offset, self.length)

    @property
    def member(self) -> "Member":
        """The member itself."""
        return self

    @property
    def location(self) -> str:
        """Path or URL of the shard."""
        return self.shard.location

    @property
    def is_loaded(self) -> bool:
        """Whether all bytes are in memory."""
        return len(self.start) == self.length

    def loaded(self, *, is_decoded: bool) -> "Member | Unusable":
        """Returns the member with its bytes in memory if they will be decoded, and with the checksum of loaded bytes.

        Raises:
            StorageError: The bytes cannot be read.
        """
        if self.length > MAX_BYTES:
            return Unusable("too_large", f"{self}: a member must be shorter than 4 GiB")
        if not (is_decoded or self.is_loaded):
            return self
        content = self.read()
        found = crc32(content)
        if self.crc32 not in (None, found):
            return Unusable("corrupt", f"{self}: its checksum is not the one that the input gives")
        return replace(self, start=content, crc32=found)

    def read(self) -> bytes:
        """Returns all bytes."""
        return self.start if self.is_loaded else self._read_range(0, self.length)

    def ranges(self) -> ByteRanges:
        """Returns random access to the bytes; keeps those from the start and those that were read last."""
        if self.is_loaded:
            return ByteRanges.of_bytes(self.start)
        block = _REMOTE_BLOCK if is_url(self.location) else _LOCAL_BLOCK
        kept = [(0, self.start), (0, b"")]

        def read(start: int, length: int) -> bytes:
            for begin, content in kept:
                if begin <= start and (found := content[start - begin : start - begin + length]):
                    return found
            # The first read takes no more than is asked for, because a header may be enough.
            wanted = length if not kept[0][1] else max(length, block)
            found = self._read_range(start, min(wanted, self.length - start)) if start < self.length else b""
            kept[start > 0] = start, found
            return found[:length]

        return ByteRanges(self.length, read)

    def _read_range(self, start: int, length: int) -> bytes:
        location, size = self.written_to or self.location, self.shard.size
        return storage().read_range(location, self.offset + start, length, etag=self.shard.etag, size=size)


@dataclass(frozen=True, slots=True)
class LhotseCut(_Audio):
    """A cut of a Lhotse manifest."""

    row: dict[str, Any]
    """The cut as a dict."""

    member: Member | None = None
    """Where its audio is, if that is not the source in `row`."""

    hint: str = field(default="", compare=False, repr=False)
    """The `hint` of its `File`."""

    @property
    def location(self) -> str:
        """Path or URL of the shard or of the source of its channel; empty for a source of another type."""
        return self.member.location if self.member else self.source_of("file", "url")

    def source_of(self, *kinds: str) -> str:
        """Returns the first source of one of these types that has its channel; empty if there is none."""
        sources = (source for source in self.row["recording"]["sources"] if self.row["channel"] in source["channels"])
        return next((str(source["source"]) for source in sources if source["type"] in kinds), "")


@dataclass(frozen=True, slots=True)
class Unusable(_Audio):
    """Why audio cannot be used, if that is known without decoding it."""

    location: ClassVar[str] = ""
    reason: RejectReason
    detail: str
    """An explanation that gives the values found."""

    audio: File | Member | LhotseCut | None = None
    """The audio, if there is some."""

    @classmethod
    def of(cls, error: StorageError, audio: File | Member | LhotseCut | None = None) -> "Unusable":
        """Returns why audio in a store cannot be used; raises the error if it says nothing about the audio."""
        if error.kind not in ("missing", "changed"):
            raise error
        return cls(error.kind, str(error), audio)


def unusable_command(command: str) -> Unusable:
    """Returns the reject for an input that gives a command instead of a file."""
    return Unusable("command", f"a command instead of a file: {command[:120]!r}")


Audio = File | Member | LhotseCut | Unusable


def at_member(audio: Audio, member: Member) -> Member | LhotseCut:
    """Returns audio that has the bytes of a member."""
    return replace(audio, member=member) if isinstance(audio, LhotseCut) else member


class Entry(NamedTuple):
    """A span of audio that an input names, before the audio has been opened."""

    where: str
    """Position in the input, such as `speech.json:12`."""

    cut_id: str
    audio: Audio
    offset: float = 0.0
    """Start of the span in the file, in seconds."""

    duration: float | None = None
    """Length of the span in seconds: the cut ends there, and the entry is rejected if the file ends before. None for
    the rest of the file, and for a `LhotseCut`, which has its own span."""

    num_frames: int | None = None
    """Length of the span in samples at the rate of the file, for inputs that count samples."""

    labels: dict[str, Any] | None = None
    """Other values of the input, such as text, lang and speaker."""

    number: int | None = None
    """The number for which `Source.where` returns the position of this entry; None for the number of its item.

    Cuts are written in the order of these numbers. A later entry of the same item with the same number replaces the
    earlier one, for instance if a tar turns out to hold two members with the name in a line.
    """

    first_frame: int | None = None
    """Start of the span in samples at the rate of the file, instead of `offset`."""

    channel: int | None = None
    """Channel of the file that the input names, counted from 0; None if it names none, and for a `LhotseCut`."""

    meaning: "Meaning | None" = None
    """What the names of its row mean; None for an input without names."""


@runtime_checkable
class Source(Protocol):
    """One input. Sources are small, because they are pickled to other processes along with some of their items."""

    @property
    def path(self) -> Path | str:
        """The manifest or folder, as the caller gave it: a path, or a URL."""

    @property
    def format(self) -> InputFormat:
        """The format that it is read as."""

    @property
    def items_per_task(self) -> int | None:
        """Number of items that a process is given at a time; None for the number that suits the probe mode."""

    def items(self) -> Iterator[Any]:
        """Yields items (lines, paths, row numbers, shards), each of which holds any number of entries."""

    def entries(self, number: int, item: Any) -> Iterator[Entry]:
        """Parses an item; `number` is its index, counted from 1.

        Yields:
            The entries: none for a blank line or a comment, one for a line of a record, one for each member of a shard.

        Raises:
            ManifestError: The item cannot be parsed; the message names its position.
        """

    def where(self, number: int) -> str:
        """Returns the position in the input of the item, or of an entry, with this number.

        It is empty if the location of the audio is the position.
        """

    def count(self) -> int | None:
        """Returns the approximate number of items, or None if counting would cost as much as reading them."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A source whose entries depend on files other than its items, such as shards and the manifests of shards.

    The result of an item is not taken from an interrupted run if one of them has changed.
    """

    def files(self, item: Any) -> list[str]:
        """Returns the absolute paths or URLs of the files that the entries of an item depend on."""


def span_suffix(offset: float, duration: float | None) -> str:
    """Returns the end of a cut id that distinguishes several spans of one file; both values are in seconds."""
    return f"@{offset:.3f}" if duration is None else f"@{offset:.3f}+{duration:.3f}"

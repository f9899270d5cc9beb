"""Where the audio of an entry is: in a file, in a shard, in a cut of Lhotse; or why it is unusable.

Each kind gives its own bytes, knows its location and names itself.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from zlib import crc32

from nestdata.prepare.inputs.content import Content, LoadedContent
from nestdata.storage import ObjectInfo

RejectReason = Literal[
    "missing",
    "not_a_file",
    "empty",
    "unreadable",
    "truncated",
    "not_audio",
    "wrong_duration",
    "not_finite",
    "silent",
    "no_speech",
    "little_speech",
    "too_short",
    "too_long",
    "duplicate_id",
    "rate_too_low",
    "no_such_channel",
    "changed",
    "corrupt",
    "no_such_member",
    "ambiguous_member",
    "shard_unreadable",
    "compressed_tar",
    "unsafe_member",
    "too_large",
    "invalid_url",
    "malformed_row",
    "command",
]

MAX_BYTES = 0xFFFFFFFF
"""Length of the longest member with an address: `nestdata.corpus.addresses.MAX_MEMBER_BYTES`, without numpy."""


class _Audio:
    """The answers of audio that is not in a shard."""

    __slots__ = ()

    @property
    def member(self) -> "Member | None":
        """The bytes in a shard or object, if that is where the audio is."""
        return None

    def read(self) -> bytes | None:
        """Returns the bytes of audio in a shard or object; None for other audio. Errors are those of the store."""
        return self.member.content.read() if self.member else None


@dataclass(frozen=True, slots=True)
class File(_Audio):
    """An audio file of its own."""

    location: str
    """Absolute path or URL."""

    stored_path: str = ""
    """Path of the file once the corpus is in place, if that differs from `location`."""

    hint: str = field(default="", compare=False, repr=False)
    """What to add to the message if it does not exist: the other places where it was looked for."""

    def __str__(self) -> str:
        return self.location


@dataclass(frozen=True, slots=True)
class Member(_Audio):
    """The bytes of an audio file in a shard: a member of a tar, or a whole object."""

    shard: ObjectInfo
    offset: int
    """First byte in the shard."""

    length: int
    """Number of bytes."""

    content: Content
    crc32: int | None = None
    """Checksum of the bytes, if the source has read all of them; `loaded` computes it if it reads them."""

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

    def loaded(self, *, is_decoded: bool) -> "Member | Unusable":
        """Returns the member with its bytes in memory if they will be decoded, and with the checksum of loaded bytes.

        Raises:
            StorageError: The bytes cannot be read.
        """
        if self.length > MAX_BYTES:
            return Unusable("too_large", f"{self}: a member must be shorter than 4 GiB")
        content = self.content
        if is_decoded and not isinstance(content, LoadedContent):
            content = LoadedContent(content.read())
        if not isinstance(content, LoadedContent):
            return self
        found = crc32(content.content)
        if self.crc32 not in (None, found):
            return Unusable("corrupt", f"{self}: its checksum is not the one that the input gives")
        return replace(self, content=content, crc32=found)


@dataclass(frozen=True, slots=True)
class LhotseCut(_Audio):
    """A cut of a Lhotse manifest."""

    row: dict[str, Any]
    """The cut as a dict."""

    member: Member | None = None
    """Where its audio is, if that is not the source in `row`."""

    hint: str = field(default="", compare=False, repr=False)
    """That of its `File`."""

    @property
    def location(self) -> str:
        """Path or URL of the shard or of the source of its channel; empty for a source of another type."""
        return self.member.location if self.member else self.source_of("file", "url")

    def source_of(self, *kinds: str) -> str:
        """Returns the first source with its channel that is of one of these types; empty if there is none."""
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


def unusable_command(command: str) -> Unusable:
    """Returns the reject for an input that gives a command instead of a file."""
    return Unusable("command", f"a command instead of a file: {command[:120]!r}")


Audio = File | Member | LhotseCut | Unusable


def at_member(audio: Audio, member: Member) -> Member | LhotseCut:
    """Returns audio whose bytes are those of a member."""
    return replace(audio, member=member) if isinstance(audio, LhotseCut) else member

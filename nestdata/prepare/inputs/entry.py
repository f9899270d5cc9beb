"""Entries and sources: the form that every input format is converted to.

An entry is a span of audio that an input names, before the audio has been opened. A source yields the entries of one
input in two steps, so that the work can be shared among processes: `items` runs in one process and only splits the
input into lines, paths, row numbers or shards; `entries` parses one item, in whichever process receives it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.audio import Audio

if TYPE_CHECKING:
    from nestdata.prepare.inputs.meaning import Meaning

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

"""Kaldi data directories: wav.scp, and segments, text, utt2spk, utt2lang, utt2dur and reco2dur if they exist.

Source: Kaldi's `extract-segments`, for the fields of `segments`. `reco2file_and_channel` names the files of transcripts
for scoring, and Kaldi does not read audio by it.

Lhotse's reader of Kaldi directories stops at the first recording that it cannot open, and gives up when a fifth of the
recordings are broken. The files are therefore read here. The file that lists the utterances is read line by line; the
others are held in memory.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import File, Unusable, unusable_command
from nestdata.prepare.inputs.entry import MAX_SECONDS, Entry
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.lines import count_lines, open_lines
from nestdata.prepare.inputs.names import FileNames

# Longer numbers of channels are mistakes: libsndfile reads up to 1024 channels.
_MAX_CHANNEL_DIGITS = 4
# Options of programs that write a file, or one channel of it, to a pipe without changing its samples. `sph2pipe` counts
# channels from 1.
_OPTIONS = {
    "cat": re.compile(""),
    "flac": re.compile(r"(?=.*c)(?=.*d)-[cds]+(?: -[cds]+)*"),
    "sph2pipe": re.compile(r"(?: ?(?:-f wav|-p|-c (?P<channel>[12])))*"),
}
# Characters by which a shell does more than call one program with plain arguments.
_SHELL = re.compile(r"[$`;&|<>()*?\[\]{}\\]")
_LABEL_FILES = {"text": "text", "utt2spk": "speaker", "utt2lang": "language"}


class _Span(NamedTuple):
    """A line of the file that lists utterances."""

    utterance: str
    recording: str
    audio: str
    """The value in wav.scp: a path, or a command followed by a pipe character."""

    offset: float = 0.0
    """Start in the recording, in seconds."""

    end: float | None = None
    """End in the recording, in seconds; None for the end of the recording."""

    channel: int | None = None


class _Utterance(NamedTuple):
    utterance: str
    audio: str
    offset: float
    duration: float | None
    labels: dict[str, Any]
    channel: int | None


@dataclass(frozen=True, slots=True)
class KaldiDirectory:
    """The utterances of `segments`, or the recordings of `wav.scp` if there are no segments, with their Kaldi ids."""

    items_per_task: ClassVar[None] = None
    path: Path
    names: FileNames
    """Relative paths start from the current directory, as in Kaldi's recipes, or from the directory itself."""

    has_segments: bool

    def items(self) -> Iterator[_Utterance | None]:
        """Yields utterances with their labels and durations; None for a blank line."""
        labels = {name: self._table(file) for file, name in _LABEL_FILES.items()}
        utterances, recordings = self._durations("utt2dur"), self._durations("reco2dur")
        for span in self._segments() if self.has_segments else self._recordings():
            if span is None:
                yield None
                continue
            duration = utterances.get(span.utterance) if span.end is None else span.end - span.offset
            if duration is None and span.recording in recordings:
                duration = max(recordings[span.recording] - span.offset, 0.0)
            own = {name: values[span.utterance] for name, values in labels.items() if span.utterance in values}
            yield _Utterance(span.utterance, span.audio, span.offset, duration, own, span.channel)

    def entries(self, number: int, item: _Utterance | None) -> Iterator[Entry]:
        """Yields the entry of an utterance; none for a blank line."""
        if item is None:
            return
        where = self.where(number)
        audio, channel = self._audio(item.audio, where)
        if channel is None:
            channel = item.channel
        elif item.channel:
            audio = Unusable("no_such_channel", f"{item.audio!r} writes channel 0 only, not channel {item.channel}")
        yield Entry(where, item.utterance, audio, item.offset, item.duration, labels=item.labels, channel=channel)

    def where(self, number: int) -> str:
        """Returns the path of `segments` or, if there is none, of `wav.scp`, and the line number, counted from 1."""
        return f"{self.path}/{'segments' if self.has_segments else 'wav.scp'}:{number}"

    def count(self) -> int | None:
        """Returns the number of lines of the file that lists the utterances."""
        return count_lines(self.path / ("segments" if self.has_segments else "wav.scp"))

    def _audio(self, text: str, where: str) -> tuple[File | Unusable, int | None]:
        """Returns the audio of a value in wav.scp, and its channel, if a command chooses one."""
        if ".ark:" in text and not text.endswith("|"):
            raise ManifestError(f"{where}: {text!r} is in a Kaldi archive. Write it to audio files first.")
        name, channel = _file_of(text)
        return (unusable_command(text) if name is None else self.names.file(name)), channel

    def _recordings(self) -> Iterator[_Span | None]:
        for row in _rows(self.path / "wav.scp", "a recording and its file or command"):
            yield _Span(row[0], row[0], row[1]) if row else None

    def _segments(self) -> Iterator[_Span | None]:
        audio = self._table("wav.scp")
        expected = "an utterance, a recording, a start and an end in seconds, and perhaps a channel"
        rows = _rows(self.path / "segments", expected, 4, 5)
        for number, row in enumerate(rows, start=1):
            if row is None:
                yield None
                continue
            utterance, recording, *times = row[:4]
            channel = _channel(row[4], self.where(number)) if len(row) > 4 else None
            if recording not in audio:
                raise ManifestError(f"{self.where(number)}: recording {recording!r} is not in wav.scp. Add it there.")
            start, end = (_seconds(time, self.where(number)) for time in times)
            if start < 0 or 0 <= end <= start:
                raise ManifestError(
                    f"{self.where(number)}: a segment from {start:g} s to {end:g} s. Fix or drop this line."
                )
            yield _Span(utterance, recording, audio[recording], start, end if end >= 0 else None, channel)

    def _table(self, name: str) -> dict[str, str]:
        """Returns the value of each utterance or recording in a file; empty if the file does not exist."""
        if not has_table(self.path, name):
            return {}
        expected = "a recording and its file or command" if name == "wav.scp" else ""
        return {row[0]: row[1] for row in _rows(self.path / name, expected) if row}

    def _durations(self, name: str) -> dict[str, float]:
        return {key: _seconds(value, f"{self.path / name}, {key}") for key, value in self._table(name).items()}


def _open(given: GivenInput) -> Opened:
    if isinstance(given.path, str):
        raise ManifestError(
            f"{given.path if given.format else given.folder}: a Kaldi directory is not read from a URL. Copy its text "
            "files to a local folder; wav.scp may name audio by URLs."
        )
    path = given.path
    given.check_folder()
    if not has_table(path, "wav.scp"):
        raise ManifestError(f"{path}: no wav.scp in this folder, so that it is not a Kaldi directory.")
    has_segments, names = has_table(path, "segments"), _names(path)
    return given.location, lambda _: KaldiDirectory(path, names, has_segments)


FORMAT = Format("kaldi", lambda given: given.kind == "folder" and given.has_file("wav.scp"), _open)


def _names(path: Path) -> FileNames:
    """Returns how wav.scp names its files.

    Kaldi takes them relative to the current directory of a recipe; in a directory that was moved, they are relative to
    the directory itself.

    Raises:
        ManifestError: There is no wav.scp, or it cannot be read.
    """
    own = os.path.abspath(path)
    names = (name for row in _rows(path / "wav.scp") if row and (name := _file_of(row[1])[0]))
    return FileNames.of(names, (os.getcwd(), own), own)


def _file_of(text: str) -> tuple[str | None, int | None]:
    """Returns the file that a value in wav.scp names, and the channel that a command chooses, counted from 0.

    The file is None for a command other than those that only write a file to a pipe. Nothing is run.
    """
    if not text.endswith("|"):
        return text, None
    command = text[:-1].strip()
    try:
        program, *options, name = shlex.split("" if _SHELL.search(command) else command)
    except ValueError:  # no closing quotation mark, or fewer than two words
        return None, None
    known = _OPTIONS.get(os.path.basename(program))
    found = known.fullmatch(" ".join(options)) if known else None
    if found is None:
        return None, None
    channel = found.groupdict().get("channel")
    return name, int(channel) - 1 if channel else None


def has_table(directory: Path, name: str) -> bool:
    """Returns whether a Kaldi directory holds a file of this name; subfolders are ignored.

    True for a pipe or device as well, so that opening it raises an error: ignoring it would silently lose its labels.
    """
    return (directory / name).exists() and not (directory / name).is_dir()


def _rows(path: Path, expected: str = "", num_fields: int = 2, max_fields: int = 0) -> Iterator[list[str] | None]:
    """Yields the fields of each line, or None for a blank one.

    Args:
        path: The file.
        expected: The fields of a line, in words. If given, a line with too few or too many fields is an error;
            otherwise missing fields are empty.
        num_fields: Number of fields. If it is 2, the second field may hold spaces.
        max_fields: Largest number of fields, if it is another one.
    """
    with open_lines(path) as file:
        for number, line in enumerate(file, start=1):
            # Split as bytes: `str.split` would also split text at Unicode spaces.
            fields = line.strip().split(None, 1 if num_fields == 2 else -1)
            row = [field.decode(errors="surrogateescape") for field in fields]
            if expected and row and not num_fields <= len(row) <= max(num_fields, max_fields):
                raise ManifestError(f"{path}:{number}: not {expected}: {line[:80]!r}. Fix or drop this line.")
            yield [*row, *[""] * (num_fields - len(row))] if row else None


def _channel(text: str, where: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= _MAX_CHANNEL_DIGITS:
        return int(text)
    raise ManifestError(
        f"{where}: the channel is {text!r}. Give it as a number, as in Kaldi: 0 is the first channel and 1 the second."
    )


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
        if abs(value) < MAX_SECONDS:
            return value
    except ValueError:
        pass
    raise ManifestError(f"{where}: {text!r} is not a number of seconds. Fix or drop this line.")

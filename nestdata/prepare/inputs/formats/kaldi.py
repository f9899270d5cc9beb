"""Kaldi data directories: wav.scp, and segments, text, utt2spk, utt2lang, utt2dur and reco2dur if they exist.

Lhotse's reader of Kaldi directories stops at the first recording that it cannot open, and gives up when a fifth of the
recordings are broken. The files are therefore read here. The file that lists the utterances is read line by line; the
others are held in memory.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import Command, File
from nestdata.prepare.inputs.entry import (
    MAX_SECONDS,
    Entry,
    base_directory,
    check_command,
    resolve,
)
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.lines import count_lines, open_lines

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


class _Utterance(NamedTuple):
    utterance: str
    audio: str
    offset: float
    duration: float | None
    labels: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KaldiDirectory:
    """The utterances of `segments`, or the recordings of `wav.scp` if there are no segments, with their Kaldi ids."""

    items_per_task: ClassVar[None] = None
    path: Path
    directory: str
    """Absolute path of the folder that relative paths start from."""

    allow_commands: bool
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
            yield _Utterance(span.utterance, span.audio, span.offset, duration, own)

    def entries(self, number: int, item: _Utterance | None) -> Iterator[Entry]:
        """Yields the entry of an utterance; none for a blank line."""
        if item is None:
            return
        where = self.where(number)
        audio = self._audio(item.audio, where)
        yield Entry(where, item.utterance, audio, item.offset, item.duration, labels=item.labels)

    def where(self, number: int) -> str:
        """Returns the path of `segments` or, if there is none, of `wav.scp`, and the line number, counted from 1."""
        return f"{self.path}/{'segments' if self.has_segments else 'wav.scp'}:{number}"

    def count(self) -> int | None:
        """Returns the number of lines of the file that lists the utterances."""
        return count_lines(self.path / ("segments" if self.has_segments else "wav.scp"))

    def _audio(self, text: str, where: str) -> Command | File:
        """Returns what a value in wav.scp stands for."""
        if text.endswith("|"):
            check_command(text, where, allowed=self.allow_commands)
            return Command(text[:-1].strip())
        if ".ark:" in text:
            raise ManifestError(f"{where}: {text!r} is in a Kaldi archive. Write it to audio files first.")
        return File(resolve(self.directory, text))

    def _recordings(self) -> Iterator[_Span | None]:
        for row in _rows(self.path / "wav.scp", "a recording and its file or command"):
            yield _Span(row[0], row[0], row[1]) if row else None

    def _segments(self) -> Iterator[_Span | None]:
        audio = self._table("wav.scp")
        rows = _rows(self.path / "segments", "an utterance, a recording, a start and an end in seconds", 4)
        for number, row in enumerate(rows, start=1):
            if row is None:
                yield None
                continue
            utterance, recording, *times = row
            if recording not in audio:
                raise ManifestError(f"{self.where(number)}: recording {recording!r} is not in wav.scp. Add it there.")
            start, end = (_seconds(time, self.where(number)) for time in times)
            if start < 0 or 0 <= end <= start:
                raise ManifestError(
                    f"{self.where(number)}: a segment from {start:g} s to {end:g} s. Fix or drop this line."
                )
            yield _Span(utterance, recording, audio[recording], start, end if end >= 0 else None)

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
    has_segments, base = has_table(path, "segments"), _audio_directory(path)
    return given.location, lambda _: KaldiDirectory(path, base, given.options.allow_commands, has_segments)


FORMAT = Format("kaldi", lambda given: given.kind == "folder" and given.has_file("wav.scp"), _open)


def _audio_directory(path: Path) -> str:
    """Returns the absolute path of the folder that relative paths in wav.scp start from.

    Kaldi takes them relative to the current directory of a recipe; in a directory that was moved, they are relative to
    the directory itself. The first relative path that exists in either folder decides.

    Raises:
        ManifestError: There is no wav.scp, or it cannot be read.
    """
    own = os.path.abspath(path)
    names = (row[1] for row in _rows(path / "wav.scp") if row and not row[1].endswith("|"))
    return base_directory(names, (os.getcwd(), own), own)


def has_table(directory: Path, name: str) -> bool:
    """Returns whether a Kaldi directory holds a file of this name; subfolders are ignored.

    True for a pipe or device as well, so that opening it raises an error: ignoring it would silently lose its labels.
    """
    return (directory / name).exists() and not (directory / name).is_dir()


def _rows(path: Path, expected: str = "", num_fields: int = 2) -> Iterator[list[str] | None]:
    """Yields the fields of each line, or None for a blank one.

    Args:
        path: The file.
        expected: The fields of a line, in words. If given, a line with too few or too many fields is an error;
            otherwise missing fields are empty.
        num_fields: Number of fields. If it is 2, the second field may hold spaces.
    """
    with open_lines(path) as file:
        for number, line in enumerate(file, start=1):
            # Split as bytes: `str.split` would also split text at Unicode spaces.
            fields = line.strip().split(None, 1 if num_fields == 2 else -1)
            row = [field.decode(errors="surrogateescape") for field in fields]
            if expected and row and len(row) != num_fields:
                raise ManifestError(f"{path}:{number}: not {expected}: {line[:80]!r}. Fix or drop this line.")
            yield [*row, *[""] * (num_fields - len(row))] if row else None


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
        if abs(value) < MAX_SECONDS:
            return value
    except ValueError:
        pass
    raise ManifestError(f"{where}: {text!r} is not a number of seconds. Fix or drop this line.")

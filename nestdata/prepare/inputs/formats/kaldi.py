"""Kaldi data directories: wav.scp, and segments, text, utt2spk, utt2lang, utt2dur and reco2dur if they exist.

Source: Kaldi's `extract-segments`, for the fields of `segments`. `reco2file_and_channel` names the files of transcripts
for scoring, and Kaldi does not read audio by it.

Lhotse's reader of Kaldi directories opens every recording, runs commands, gives up when a fifth of the recordings are
broken, and takes ten times the memory. The files are therefore read here: the one that lists the utterances line by
line, the others into memory.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import MAX_SECONDS, Entry, Unusable, unusable_command
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.lines import LineSource, Manifest, numbered_lines
from nestdata.prepare.inputs.rows import FileNames

# Programs that write a file, or one channel of it, to a pipe without changing its samples, with their options.
# `sph2pipe` counts channels from 1.
_PIPES = {
    "cat": re.compile(""),
    "flac": re.compile(r"(?=.*c)(?=.*d)-[cds]+(?: -[cds]+)*"),
    "sph2pipe": re.compile(r"(?: ?(?:-f wav|-p|-c (?P<channel>[12])))*"),
}
# Characters by which a shell does more than call one program with plain arguments.
_SHELL = re.compile(r"[$`;&|<>()*?\[\]{}\\]")
# Channels with more digits are mistakes: libsndfile reads up to 1024 channels.
_CHANNEL = re.compile(r"[0-9]{1,4}")
_LABEL_FILES = {"text": "text", "utt2spk": "speaker", "utt2lang": "language"}


class _Utterance(NamedTuple):
    """A line of `segments` or, if there is none, of wav.scp, joined with the other files."""

    utterance: str
    audio: str
    """The value in wav.scp: a path, or a command followed by a pipe character."""

    offset: float
    duration: float | None
    labels: dict[str, Any]
    channel: int | None


@dataclass(frozen=True, slots=True)
class KaldiDirectory(LineSource):
    """The utterances of `segments`, or the recordings of `wav.scp` if there are no segments, with their Kaldi ids."""

    format: ClassVar[InputFormat] = "kaldi"
    manifest: Manifest
    """The file that lists the utterances: `segments` or `wav.scp`."""

    names: FileNames
    """Relative paths start from the current directory, as in Kaldi's recipes, or from the directory itself."""

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.manifest.path).parent

    def items(self) -> Iterator[_Utterance | None]:
        """Yields utterances with their labels and durations; None for a blank line."""
        list_file = Path(self.manifest.path)
        has_segments = list_file.name == "segments"
        audio = _table(self.path, "wav.scp") if has_segments else {}
        labels = {name: _table(self.path, file) for file, name in _LABEL_FILES.items()}
        utterances, recordings = (
            {key: _seconds(value, f"{self.path / name}, {key}") for key, value in _table(self.path, name).items()}
            for name in ("utt2dur", "reco2dur")
        )
        for number, row in enumerate(_rows(list_file, is_split=has_segments), start=1):
            if row is None:
                yield None
                continue
            utterance, recording, offset, end, channel = (
                self._segment(row, self.where(number)) if has_segments else (row[0], row[0], 0.0, None, None)
            )
            value = audio.get(recording) if has_segments else row[1]
            if value is None:
                raise ManifestError(f"{self.where(number)}: recording {recording!r} is not in wav.scp. Add it there.")
            duration = utterances.get(utterance) if end is None else end - offset
            if duration is None and recording in recordings:
                duration = max(recordings[recording] - offset, 0.0)
            own = {name: values[utterance] for name, values in labels.items() if utterance in values}
            yield _Utterance(utterance, value, offset, duration, own, channel)

    def entries(self, number: int, item: _Utterance | None) -> Iterator[Entry]:
        """Yields the entry of an utterance; none for a blank line."""
        if item is None:
            return
        where = self.where(number)
        if ".ark:" in item.audio and not item.audio.endswith("|"):
            raise ManifestError(f"{where}: {item.audio!r} is in a Kaldi archive. Write it to audio files first.")
        name, channel = _file_of(item.audio)
        audio = unusable_command(item.audio) if name is None else self.names.file(name)
        if channel is None:
            channel = item.channel
        elif item.channel:
            audio = Unusable("no_such_channel", f"{item.audio!r} writes channel 0 only, not channel {item.channel}")
        yield Entry(where, item.utterance, audio, item.offset, item.duration, labels=item.labels, channel=channel)

    def _segment(self, row: list[str], where: str) -> tuple[str, str, float, float | None, int | None]:
        """Returns utterance, recording, start, end and channel; no end if the segment ends with the recording."""
        if not 4 <= len(row) <= 5 or (len(row) == 5 and not _CHANNEL.fullmatch(row[4])):
            raise ManifestError(
                f"{where}: not an utterance, a recording, a start and an end in seconds, and perhaps a channel, "
                f"counted from 0: {' '.join(row)[:80]!r}. Fix or drop this line."
            )
        start, end = (_seconds(time, where) for time in row[2:4])
        if start < 0 or 0 <= end <= start:
            raise ManifestError(f"{where}: a segment from {start:g} s to {end:g} s. Fix or drop this line.")
        return row[0], row[1], start, end if end >= 0 else None, int(row[4]) if len(row) == 5 else None


def open_kaldi(given: GivenInput) -> Opened | None:
    """Opens a local folder with wav.scp."""
    if given.format is None and not given.has_file("wav.scp"):
        return None
    path = given.path
    if isinstance(path, str):
        raise ManifestError(
            f"{path if given.format else given.folder}: a Kaldi directory is not read from a URL. Copy its text files "
            "to a local folder; wav.scp may name audio by URLs."
        )
    given.check_folder()
    if not _has_table(path, "wav.scp"):
        raise ManifestError(f"{path}: no wav.scp in this folder, so that it is not a Kaldi directory.")
    # Kaldi takes names relative to the current directory of a recipe; in a directory that was moved, they are relative
    # to the directory itself.
    rows = (row for row in _rows(path / "wav.scp") if row)
    names = FileNames.of((_file_of(row[1])[0] or "" for row in rows), (os.getcwd(), given.location), given.location)
    list_file = path / ("segments" if _has_table(path, "segments") else "wav.scp")
    return given.location, lambda _: KaldiDirectory(Manifest(list_file), names)


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
    known = _PIPES.get(os.path.basename(program))
    found = known.fullmatch(" ".join(options)) if known else None
    if found is None:
        return None, None
    channel = found.groupdict().get("channel")
    return name, int(channel) - 1 if channel else None


def _has_table(directory: Path, name: str) -> bool:
    """Returns whether a Kaldi directory holds a file of this name; subfolders are ignored.

    True for a pipe or device as well, so that opening it raises an error: ignoring it would silently lose its labels.
    """
    return (directory / name).exists() and not (directory / name).is_dir()


def _table(directory: Path, name: str) -> dict[str, str]:
    """Returns the value of each utterance or recording in a file; empty if the file does not exist."""
    return {row[0]: row[1] for row in _rows(directory / name) if row} if _has_table(directory, name) else {}


def _rows(path: Path, *, is_split: bool = False) -> Iterator[list[str] | None]:
    """Yields the fields of each line, or None for a blank one: a key and a value, which may hold spaces, or all fields.

    The value may be missing, except in wav.scp.
    """
    for number, line in numbered_lines(str(path)):
        # Split as bytes: `str.split` would also split text at Unicode spaces.
        fields = line.strip().split(None, -1 if is_split else 1)
        row = [field.decode(errors="surrogateescape") for field in fields]
        if len(row) == 1 and path.name == "wav.scp":
            raise ManifestError(
                f"{path}:{number}: not a recording and its file or command: {line[:80]!r}. Fix or drop this line."
            )
        if len(row) == 1 and not is_split:
            row.append("")
        yield row or None


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
        if abs(value) < MAX_SECONDS:
            return value
    except ValueError:
        pass
    raise ManifestError(f"{where}: {text!r} is not a number of seconds. Fix or drop this line.")

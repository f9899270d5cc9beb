"""Notes on entries that are used, but not as a person may expect: of several channels, cut off, or shortened."""

import os
from collections.abc import Mapping
from typing import Any

from nestdata.audio import ogg
from nestdata.audio.byte_ranges import FileRanges, MemoryRanges
from nestdata.corpus.file_version import path_of
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.found import Note, NoteKind
from nestdata.prepare.inputs.audio import LhotseCut
from nestdata.prepare.inputs.entry import Entry, span_suffix
from nestdata.prepare.read import ROUNDING_S, WholeEntry

TEXTS: Mapping[NoteKind, str] = {
    "first_channel": "entries of which only the first channel is used (--channel takes another one, or mix)",
    "shortened": "entries with text that end with the duration in the manifest, before their file",
    "no_end_mark": "Ogg files without an end mark, cut off or recorded from a stream",
    "copy": "files byte-equal to another one",
}
"""What the summary calls the notes of each kind."""


def notes_of(whole: WholeEntry, config: PrepareConfig) -> list[Note]:
    """Returns the notes on an entry, in which a header that was not read is assumed to agree with the manifest."""
    notes: list[Note] = []
    entry, row = whole.entry, whole.row
    recording = row["recording"]
    if not isinstance(whole.audio, LhotseCut):
        num_channels, seconds = len(recording["channel_ids"]), recording["duration"]
        if num_channels > 1 and config.channel == 0 and entry.channel is None:
            notes.append(_note("first_channel", whole, f", which has {num_channels}"))
        if row["duration"] < seconds - ROUNDING_S and _is_whole_utterance(entry, row):
            notes.append(_note("shortened", whole, f", {row['duration']:.3f} of {seconds:.3f} s"))
    if config.probe == "decode" and _lacks_end_mark(whole):
        notes.append(_note("no_end_mark", whole))
    return notes


def _note(kind: NoteKind, whole: WholeEntry, text: str = "") -> Note:
    return Note(kind, whole.entry.where, f"{whole.audio.member or path_of(whole.row)}{text}")


def _is_whole_utterance(entry: Entry, row: Mapping[str, Any]) -> bool:
    """Returns whether an entry has text, and is not one of several spans of a file."""
    has_text = any("text" in label for label in row["supervisions"])
    return has_text and entry.offset == 0 and not entry.cut_id.endswith(span_suffix(0.0, entry.duration))


def _lacks_end_mark(whole: WholeEntry) -> bool:
    content: Any = whole.audio.read()
    if content is not None:
        return ogg.lacks_end_mark(MemoryRanges(content))
    try:
        with open(path_of(whole.row), "rb", buffering=0) as file:
            return ogg.lacks_end_mark(FileRanges(file.fileno(), os.fstat(file.fileno()).st_size))
    except OSError:
        return False

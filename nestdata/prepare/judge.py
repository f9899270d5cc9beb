"""Judges the parts of an entry, and adds notes on an entry that is used.

A part is converted to the rate of the corpus, and decoded if the settings ask for that.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from nestdata.audio import ogg
from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.decode import SILENCE_DB, at_rate, energy, samples_in
from nestdata.audio.lhotse_audio import file_rate, needs_whole_cut
from nestdata.corpus.file_version import path_of
from nestdata.prepare.divide import Part
from nestdata.prepare.found import Cut, Note, Outcome
from nestdata.prepare.inputs.entry import LhotseCut, RejectReason, span_suffix
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.prepare.read import ROUNDING_S, WholeEntry, has_text
from nestdata.prepare.speech import load_up_to_damage
from nestdata.storage import FileVersion

# Samples of all channels that are decoded at a time, in 256 MiB.
_MAX_DECODED = 1 << 26
_DIGEST_BYTES = 8


def judge(whole: WholeEntry, parts: Sequence[Part], config: PrepareConfig) -> list[Outcome]:
    """Returns the parts of an entry as cuts at the rate of the corpus, or why they are not taken; notes come last.

    Modifies the dicts of the parts.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    content = _content_digest(whole, config)
    notes = _notes_of(whole, config)  # now, because judging modifies the cut
    found: list[Outcome] = []
    for part in parts:
        found += _judged(whole, part, config, content) if isinstance(part, dict) else [part]
    return [*found, *notes] if notes and any(isinstance(outcome, Cut) for outcome in found) else found


def _judged(whole: WholeEntry, row: dict[str, Any], config: PrepareConfig, content: int) -> list[Outcome]:
    """Returns a part as a cut, or why it is not taken; modifies `row`.

    A damaged part is used up to the damage, with a note, unless it has a text, which describes more audio.

    Args:
        whole: The entry.
        row: The part as a dict.
        config: The settings.
        content: The `_content_digest` of the entry.
    """
    recording = row["recording"]
    num_samples, rate = samples_in(row["duration"], config.sampling_rate), file_rate(recording)
    if recording["sampling_rate"] != config.sampling_rate:
        recording = at_rate(recording, config.sampling_rate)
        recording["duration"] = recording["num_samples"] / config.sampling_rate
        row["recording"] = recording
    notes: list[Outcome] = []
    if config.probe == "decode":
        num_whole, problem = _decoded(whole, row, num_samples)
        if problem and (
            has_text(row) or num_whole < samples_in(max(config.min_seconds, 1 / rate), config.sampling_rate)
        ):
            return [whole.reject(row, *problem)]
        if problem:
            row["duration"], num_samples = num_whole / config.sampling_rate, num_whole
            labels = [label for label in row["supervisions"] if label["start"] < row["duration"]]
            for label in labels:
                label["duration"] = min(label["duration"], row["duration"] - label["start"])
            row["supervisions"] = labels
            notes = [_note("damaged", whole, f", used up to {row['start'] + row['duration']:.1f} s: {problem[1]}")]
    return [Cut(row, num_samples, rate, whole.audio.member, whole.version, content, whole.row["id"]), *notes]


def _content_digest(whole: WholeEntry, config: PrepareConfig) -> int:
    """Returns a digest of the bytes of the audio file of an entry, by which equal files are found.

    It is 0 if the audio is not decoded anyway.
    """
    if config.probe != "decode":
        return 0
    content = whole.audio.read()
    if content is not None:
        return int.from_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest(), "little")
    return _digest_of_file(path_of(whole.row), whole.version) if whole.version else 0


def _decoded(whole: WholeEntry, row: dict[str, Any], num_samples: int) -> tuple[int, tuple[RejectReason, str] | None]:
    """Decodes a cut from start to end; returns how much of it can be used, and why not all of it can."""
    block, found, num_whole = _samples_at_a_time(row), 0.0, 0
    content, problem = whole.audio.read(), None
    for start in range(0, num_samples, block):
        samples, error = load_up_to_damage(row, start, min(block, num_samples - start), content)
        found, num_whole = found + energy(samples), start + len(samples)
        if error:
            problem = error.reason, str(error)
            if error.reason == "not_finite":  # a file of wrong samples, not a damaged one
                return 0, problem
            break
    if found < 10 ** (SILENCE_DB / 10) * num_whole or not num_whole:
        silent = "silent", f"the level of the whole cut is below {SILENCE_DB:g} dB of full scale"
        return 0, problem or silent
    return num_whole, problem


def _samples_at_a_time(row: dict[str, Any]) -> int:
    """Returns how many samples of a cut may be decoded at a time; all, if each part would need the whole cut."""
    recording = row["recording"]
    if needs_whole_cut(recording):
        return sys.maxsize
    ratio = max(1.0, file_rate(recording) / recording["sampling_rate"])
    return max(1, int(_MAX_DECODED / ratio / max(len(source["channels"]) for source in recording["sources"])))


@lru_cache(maxsize=1024)
def _digest_of_file(path: str, _: FileVersion) -> int:  # another version is another file
    try:
        with open(path, "rb", buffering=0) as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).digest()
    except OSError:
        return 0
    return int.from_bytes(digest, "little")


def _notes_of(whole: WholeEntry, config: PrepareConfig) -> list[Note]:
    """Returns the notes on an entry, in which a header that was not read is assumed to agree with the manifest."""
    notes: list[Note] = []
    entry, row = whole.entry, whole.row
    recording = row["recording"]
    if not isinstance(whole.audio, LhotseCut):
        num_channels, seconds = len(recording["channel_ids"]), recording["duration"]
        if num_channels > 1 and config.channel is None and entry.channel is None:
            notes.append(_note("first_channel", whole, f", which has {num_channels}"))
        if (entry.offset or entry.first_frame) and row["start"] == 0:
            notes.append(_note("clip", whole))
        if row["duration"] < seconds - ROUNDING_S and has_text(row) and entry.offset == 0:
            # The first of several spans of a file says so in its id.
            if not entry.cut_id.endswith(span_suffix(0.0, entry.duration)):
                notes.append(_note("shortened", whole, f", {row['duration']:.3f} of {seconds:.3f} s"))
    if whole.ends_early:
        notes.append(_note("ends_early", whole, f", used up to {row['start'] + row['duration']:.1f} s"))
    if config.probe == "decode" and _lacks_end_mark(whole):
        notes.append(_note("no_end_mark", whole))
    return notes


def _note(kind: str, whole: WholeEntry, text: str = "") -> Note:
    return Note(kind, whole.entry.where, f"{whole.audio.member or path_of(whole.row)}{text}")


def _lacks_end_mark(whole: WholeEntry) -> bool:
    content = whole.audio.read()
    if content is not None:
        return ogg.lacks_end_mark(ByteRanges.of_bytes(content))
    try:
        with open(path_of(whole.row), "rb", buffering=0) as file:
            return ogg.lacks_end_mark(ByteRanges.of_file(file.fileno(), os.fstat(file.fileno()).st_size))
    except OSError:
        return False

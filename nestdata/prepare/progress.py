"""What `prepare_corpus` tells its caller: how far it has come, and a summary of the corpus at the end."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class PrepareProgress(NamedTuple):
    """What has been probed so far. Results that are reused from an interrupted run count, except for their bytes."""

    entries: int
    """Number of entries: lines of manifests, files, members of shards."""

    total_entries: int | None
    """None if it is unknown, as for shards."""

    shards: int = 0
    """Number of shards: tars and Parquet files."""

    total_shards: int = 0
    """0 if no input has shards."""

    bytes_read: int = 0
    """Bytes read from shards and from stores in this run."""

    hours: float = 0.0
    """Hours of the cuts or, where speech is looked for, of the recordings that were searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """Summary of a corpus that was prepared."""

    path: Path
    num_cuts: int
    hours: float
    shortest_s: float
    """Duration of the shortest cut, in seconds."""

    longest_s: float
    """Duration of the longest cut, in seconds."""

    num_resampled: int
    """Number of cuts that are resampled when they are loaded."""

    other_files: dict[str, int] = field(default_factory=dict)
    """Number of files in folders that were not read, by suffix, most frequent first."""

    notes: list[str] = field(default_factory=list)
    """What was checked, and what a person should know about the corpus, in lines."""

    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejects by reason, most frequent first; each reject is a line of `rejected.jsonl`."""

    hours_by_rate: dict[str, float] = field(default_factory=dict)
    """Hours of each sampling rate of the files, such as `16000 Hz`, descending."""

    hours_by_language: dict[str, float] = field(default_factory=dict)
    """Hours of each language, descending; empty if the inputs give none, or more than a hundred thousand."""

    searched_hours: float | None = None
    """Hours of audio that were searched for speech; None if it was not looked for."""

    speech_hours: float | None = None
    """Hours of speech in them, without pauses."""

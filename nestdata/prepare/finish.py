"""The last steps of `prepare_corpus`, when all cuts are written: the sample bank, the HTML report, and `meta.json`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nestdata.columns import ROLES
from nestdata.corpus.addresses import relative_name
from nestdata.corpus.meta import FORMAT_VERSION, meta_content
from nestdata.errors import shortened
from nestdata.prepare.corpus_writer import CorpusStats
from nestdata.prepare.found import NOTES
from nestdata.prepare.inputs.entry import Source
from nestdata.prepare.inputs.formats.folder import other_files, outputs_in
from nestdata.prepare.pool import Pool
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.prepare.prepare_report import write_report
from nestdata.prepare.speech import detector_name
from nestdata.prepare.written_cuts import WrittenCuts, write_bank
from nestdata.redaction import redacted

# Cuts that last longer are counted: few batches have room for them, and they pad the others.
_LONG_SECONDS = 60
_MAX_KINDS = 10
# Inputs that are described one by one, and characters of their paths.
_MAX_SOURCES, _MAX_PATH = 3, 200
_FOUND_BY_DECODING = "files cut off behind their headers, damage, all-zero audio and byte-equal files"


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


def finish_corpus(
    partial: Path,
    output: Path,
    stats: CorpusStats,
    sources: Sequence[Source],
    config: PrepareConfig,
    pool: Pool,
) -> PrepareReport:
    """Writes the sample bank, the HTML report with its audio, and `meta.json`.

    Args:
        partial: The directory that holds the cuts and their index.
        output: Its path once the corpus is in place.
        stats: Size and content of the corpus.
        sources: The sources of the cuts.
        config: Settings of the corpus.
        pool: The processes that decode the cuts for the sample bank.

    Returns:
        A summary of the corpus.
    """
    report = _report(stats, sources, output, config)
    meta = _meta(stats, sources, config, report)
    if config.pcm:
        write_bank(partial, output, meta, pool)
    hours_by = {"rate": report.hours_by_rate, "language": report.hours_by_language}
    write_report(WrittenCuts(partial, output, meta), partial, output.name, meta, hours_by, report.notes)
    # Last, because a directory without it does not open as a corpus.
    (partial / "meta.json").write_bytes(meta_content(meta))
    return report


def _report(stats: CorpusStats, sources: Sequence[Source], output: Path, config: PrepareConfig) -> PrepareReport:
    rate, lengths, others = config.sampling_rate, stats.lengths, other_files(sources)
    notes = [*_read_as(stats, sources), *_notes(stats, config, others)]
    return PrepareReport(
        path=output,
        num_cuts=stats.num_cuts,
        hours=int(lengths.sum()) / rate / 3600,
        shortest_s=int(lengths[0]) / rate,
        longest_s=int(lengths[-1]) / rate,
        num_resampled=stats.num_resampled,
        other_files=others,
        notes=[line if line.isprintable() else repr(line) for line in notes],
        rejected=dict(stats.rejected.most_common()),
        hours_by_rate={name: number / rate / 3600 for name, number in stats.samples_by_rate.most_common()},
        hours_by_language={name: number / rate / 3600 for name, number in stats.samples_by_language.most_common()},
        searched_hours=stats.searched.seconds / 3600 if config.finds_speech else None,
        speech_hours=stats.searched.speech / 3600 if config.finds_speech else None,
    )


def _read_as(stats: CorpusStats, sources: Sequence[Source]) -> list[str]:
    """Returns how the inputs were understood: a line for each of the first ones."""
    lines = []
    for index, source in enumerate(sources[:_MAX_SOURCES]):
        path = shortened(redacted(str(source.path)), _MAX_PATH)
        names = stats.read_as.get(index, {})
        roles = [f"{role} from {' and '.join(names[role])}" for role in ROLES if role in names]
        for what, title in (("labels", "labels"), ("unread", "not read")):
            if what in names:
                roles.append(f"{title}: {_first_of(names[what], _MAX_KINDS)}")
        lines.append(f"{path} read as {source.format}{': ' if roles else ''}{', '.join(roles)}")
    if len(sources) > _MAX_SOURCES:
        lines.append(f"{len(sources) - _MAX_SOURCES:,} more inputs: how they were read is in meta.json")
    if outputs := [shortened(redacted(name), _MAX_PATH) for name in outputs_in(sources)]:
        lines.append(f"left out, as outputs of this program: {_first_of(outputs, _MAX_SOURCES)}")
    return lines


def _first_of(names: Sequence[str], most: int) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _notes(stats: CorpusStats, config: PrepareConfig, others: dict[str, int]) -> list[str]:
    """Returns what a person should know about the corpus, in lines: on the terminal and in the HTML report."""
    notes = [_checked(config)]
    long = stats.lengths[np.searchsorted(stats.lengths, _LONG_SECONDS * config.sampling_rate, "right") :]
    if len(long) and not (config.pcm or config.window_seconds or config.segment):
        hours, cuts = int(long.sum()) / config.sampling_rate / 3600, "cut" if len(long) == 1 else "cuts"
        notes.append(
            f"longer than a minute: {len(long):,} {cuts}, {hours:,.2f} h; --window-seconds 30 divides them, "
            "--segment vad cuts them at pauses"
        )
    if config.finds_speech:
        searched, speech = stats.searched
        notes.append(f"speech found by {detector_name()}: {speech / 3600:,.2f} of {searched / 3600:,.2f} h")
    if others:
        kinds = [f"{number:,} {kind}" for kind, number in others.items()]
        number = sum(others.values())
        what = "file of another kind" if number == 1 else "files of other kinds"
        notes.append(f"not read: {number:,} {what} ({_first_of(kinds, _MAX_KINDS)})")
    for kind, text in NOTES.items():
        if kind in stats.notes:
            notes.append(f"{text}: {stats.notes[kind]:,}, such as {stats.first_notes[kind].detail}; see notes.jsonl")
    return notes


def _checked(config: PrepareConfig) -> str:
    if config.probe == "decode":
        return "checked: all audio was decoded"
    if config.finds_speech:
        return "checked: all audio was searched for speech; --probe decode also finds byte-equal files"
    what = "headers" if config.probe == "all" else "headers of files whose duration the manifest does not give"
    return f"checked: {what} only; --probe decode also finds {_FOUND_BY_DECODING}"


def _meta(
    stats: CorpusStats, sources: Sequence[Source], config: PrepareConfig, report: PrepareReport
) -> dict[str, Any]:
    """Returns the content of `meta.json`."""
    found: dict[str, Any] = {}
    if config.finds_speech:
        hours = {"searched_hours": report.searched_hours, "speech_hours": report.speech_hours}
        found["speech"] = {"detector": detector_name(), **hours}
    if stats.shards is not None:
        # A root in the corpus directory is relative to it, so that the corpus may be moved.
        root = relative_name(stats.shards["root"], str(report.path))
        found |= {"root": root, "shards": stats.shards}
    return {
        "format_version": FORMAT_VERSION,
        "sampling_rate": config.sampling_rate,
        "num_cuts": stats.num_cuts,
        "num_bytes": stats.num_bytes,
        "hours": report.hours,
        "fingerprint": stats.fingerprint,
        "rejected": report.rejected,
        **found,
        "manifests": list(dict.fromkeys(str(source.path) for source in sources)),
        "read_as": [
            {"input": str(source.path), "format": source.format, "names": stats.read_as.get(index, {})}
            for index, source in enumerate(sources)
        ],
        "settings": asdict(config),
    }

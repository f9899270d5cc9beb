"""The last steps of `prepare_corpus`, when all cuts are written: the sample bank, the HTML report, and `meta.json`.

`prepare.run` imports this module, and numpy with it, when a corpus is prepared.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nestdata.corpus.addresses import AddressTable, relative_name
from nestdata.corpus.meta import FORMAT_VERSION, meta_content
from nestdata.prepare.bank_writer import write_bank
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.equal_files import equal_files
from nestdata.prepare.inputs import Source
from nestdata.prepare.inputs.formats.folder import other_files
from nestdata.prepare.notes import notes_of
from nestdata.prepare.pool import Pool
from nestdata.prepare.progress import PrepareReport
from nestdata.prepare.reporting.listening import ListeningConfig, collect_samples
from nestdata.prepare.reporting.report import write_report
from nestdata.prepare.speech.detector import detector_name
from nestdata.prepare.speech.summary import SpeechSummary
from nestdata.prepare.writing.corpus_writer import CorpusStats

_log = logging.getLogger(__name__)


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
    report = _report(stats, output, config, other_files(sources))
    meta = _meta(stats, sources, config, report)
    addresses = AddressTable.open(partial, meta)
    equal = equal_files(partial, addresses, pool) if config.probe == "decode" else None
    notes = notes_of(config, stats, report.other_files, equal)
    report = replace(report, notes=notes, num_equal_files=equal.number if equal else None)
    if config.pcm:
        write_bank(partial, output, pool, addresses)
    listening = None
    if config.report_samples:
        options = ListeningConfig(
            per_group=config.report_samples,
            directory=partial,
            stored_in=output,
            is_probed=config.probe != "missing",
        )
        languages = {name: stats.drawn_cuts.get(name, []) for name in report.hours_by_language}
        listening = collect_samples(options, addresses, languages, stats.drawn_rejects)
    hours_by = {"language": report.hours_by_language, "speaker": report.hours_by_speaker}
    write_report(partial, output.name, meta, hours_by, listening, notes)
    # Last, because a directory without it does not open as a corpus.
    (partial / "meta.json").write_bytes(meta_content(meta))
    return report


def _report(stats: CorpusStats, output: Path, config: PrepareConfig, others: dict[str, int]) -> PrepareReport:
    rate = config.sampling_rate
    hours_by = {
        kind: {name: samples / rate / 3600 for name, samples in counter.most_common() if samples}
        for kind, counter in stats.samples_by.items()
    }
    return PrepareReport(
        path=output,
        num_cuts=stats.num_cuts,
        hours=stats.total_samples / rate / 3600,
        shortest_s=stats.shortest / rate,
        longest_s=stats.longest / rate,
        num_resampled=stats.num_resampled,
        num_long=stats.num_long,
        other_files=others,
        rejected=stats.rejected,
        hours_by_language=hours_by.get("language", {}),
        hours_by_speaker=hours_by.get("speaker", {}),
        speech=SpeechSummary.of(stats.speech) if config.finds_speech else None,
    )


def _meta(
    stats: CorpusStats, sources: Sequence[Source], config: PrepareConfig, report: PrepareReport
) -> dict[str, Any]:
    """Returns the content of `meta.json`."""
    rate = config.sampling_rate
    found: dict[str, Any] = {}
    if speech := report.speech:
        found = {"speech": {"detector": detector_name(), **asdict(speech)}}
        _log.info("%s: %s", ", ".join(str(source.path) for source in sources), speech.text())
    shards: dict[str, Any] = {}
    if stats.shards is not None:
        # A root in the corpus directory is relative to it, so that the corpus may be moved.
        root = relative_name(stats.shards.root, str(report.path))
        shards = {"root": root, "shards": asdict(stats.shards)}
    return {
        "format_version": FORMAT_VERSION,
        "sampling_rate": rate,
        "num_cuts": stats.num_cuts,
        "num_bytes": stats.num_bytes,
        "hours": stats.total_samples / rate / 3600,
        "fingerprint": stats.fingerprint,
        "rejected": stats.rejected,
        **found,
        **shards,
        "manifests": list(dict.fromkeys(str(source.path) for source in sources)),
        "settings": asdict(config),
    }

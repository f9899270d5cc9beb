"""Prepares one corpus directory from one or many inputs.

One process splits the inputs into items in order, any number of processes probe them, and one process writes the
results in order. The corpus therefore does not depend on the number of processes.

numpy and the modules that need it are imported when a corpus is prepared, so that importing this module is fast.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestdata.errors import ManifestError
from nestdata.output import output_directory
from nestdata.prepare.config import PrepareConfig, ProbeMode
from nestdata.prepare.inputs import InputOptions, Source, open_sources
from nestdata.prepare.inputs.jsonl import LhotseManifest
from nestdata.prepare.pool import Pool, open_pool

if TYPE_CHECKING:
    from nestdata.prepare.corpus_writer import CorpusStats, CorpusWriter, ProbedItems
    from nestdata.prepare.probe import Limits

# Items that are sent to a process at a time, unless the source sets a number: fewer in a slower mode, so that all
# processes finish at about the same time.
_ITEMS_PER_TASK: dict[ProbeMode, int] = {"missing": 500, "all": 500, "decode": 25}


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

    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejects by reason, most frequent first; each reject is a line of `rejected.jsonl`."""

    hours_by_language: dict[str, float] = field(default_factory=dict)
    """Hours of each language, descending; empty if the inputs give no languages."""

    hours_by_speaker: dict[str, float] = field(default_factory=dict)
    """Hours of each speaker, descending; empty if the inputs give no speakers or more than a hundred thousand."""


def prepare_corpus(
    manifests: Sequence[str | Path],
    output: str | Path,
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    jobs: int = 1,
    dask: str | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> PrepareReport:
    """Writes one corpus from one or many inputs.

    Args:
        manifests: NeMo, Lhotse or fairseq manifests, Kaldi directories, Hugging Face data sets saved to disk, or
            folders of audio, in any combination.
        output: Path of the corpus directory.
        config: Limits and sampling rate; the defaults if None.
        overwrite: Whether an existing corpus at `output` is replaced. It is replaced in one step, after all work is
            done.
        jobs: Number of processes that probe audio. The corpus does not depend on it.
        dask: Address of a Dask scheduler whose workers probe the audio instead of local processes.
        on_progress: Called with the number of entries probed so far and their total, or None if the total is unknown.

    Returns:
        A summary of the corpus.

    Raises:
        ManifestError: An input cannot be read, no audio can be used, or an entry was rejected with `config.strict`.
            Nothing is left behind.
        OutputError: The target exists, cannot be written, or is being written by another run.
        CorpusError: A worker process ended unexpectedly.
        ConfigError: A required package is not installed, or no Dask scheduler answers.
    """
    from nestdata.prepare.corpus_writer import CorpusWriter

    config = config or PrepareConfig()
    output = Path(output).resolve()
    with output_directory(output, kind="a corpus", overwrite=overwrite, may_replace=_is_corpus) as partial:
        sources = _open_sources(manifests, config, partial, output)
        with open_pool(jobs, dask, preload=_worker_modules(sources, config)) as pool:
            with closing(CorpusWriter(partial)) as writer:
                _probe_sources(sources, config, pool, writer, on_progress)
                stats = writer.finish(sources, config.sampling_rate)
                _check_rejects(writer, stats, sources, config)
            assert stats is not None
            report = _report(stats, output, config.sampling_rate)
            _write_rest(partial, report, _meta(stats, sources, config), config, pool)
    return report


def _is_corpus(directory: Path) -> bool:
    """Returns whether a directory holds a corpus of any format version; other outputs also have a `meta.json`."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
    except (OSError, ValueError):
        return False
    has_keys = isinstance(meta, dict) and {"format_version", "num_cuts"} <= meta.keys()
    return has_keys and (directory / "index.npy").is_file()


@dataclass(frozen=True, slots=True)
class _Task:
    """Consecutive items of a source, to be probed by any process."""

    source: Source
    source_index: int
    first: int
    """Number of the first item, counted from 1."""

    items: list[Any]
    limits: "Limits"


def _probe_items(task: _Task) -> "tuple[int, ProbedItems]":
    """Runs in a worker; returns the index of the source, and the cuts and rejects."""
    from nestdata.prepare.corpus_writer import ItemCollector
    from nestdata.prepare.probe import Reject, probe

    collector = ItemCollector()
    for number, item in enumerate(task.items, start=task.first):
        for entry in task.source.entries(number, item):
            collector.num_entries += 1
            if entry.problem:
                collector.rejects.append(Reject(entry.where, entry.cut_id, *entry.problem))
                continue
            for probed in probe(entry, task.limits):
                if isinstance(probed, Reject):
                    collector.rejects.append(probed)
                else:
                    collector.add(probed, number if entry.number is None else entry.number, entry.where)
    return task.source_index, collector.collected()


def _probe_sources(
    sources: list[Source],
    config: PrepareConfig,
    pool: Pool,
    writer: "CorpusWriter",
    on_progress: Callable[[int, int | None], None] | None,
) -> None:
    counts = [source.count() for source in sources] if on_progress else [None]
    total = None if None in counts else sum(count for count in counts if count is not None)
    for source_index, probed in pool.map(_probe_items, _tasks(sources, config)):
        writer.add(probed, source_index)
        if on_progress:
            on_progress(writer.num_entries, total)


def _tasks(sources: list[Source], config: PrepareConfig) -> Iterator[_Task]:
    from nestdata.prepare.probe import Limits

    limits = Limits(
        sampling_rate=config.sampling_rate,
        channel=config.channel,
        min_seconds=config.min_seconds,
        max_seconds=config.max_seconds,
        min_rate=config.min_rate,
        window_seconds=config.window_seconds,
        mode=config.probe,
    )
    for source_index, source in enumerate(sources):
        items = source.items()
        first = 1
        while batch := list(islice(items, source.items_per_task or _ITEMS_PER_TASK[config.probe])):
            yield _Task(source, source_index, first, batch, limits)
            first += len(batch)


def _worker_modules(sources: list[Source], config: PrepareConfig) -> list[str]:
    """Returns the modules that the workers need, which are imported once and shared by all of them.

    Files are opened with soundfile and, if libsndfile does not know their format, with Lhotse; decoding resamples with
    torchaudio. Lhotse also parses its own manifests.
    """
    modules = ["nestdata.prepare.corpus_writer", "nestdata.prepare.probe", "nestdata.prepare.run"]
    if config.probe != "missing" or config.pcm:
        return [*modules, "nestdata.prepare.bank_writer", "soundfile", "lhotse", "torchaudio"]
    return [*modules, "lhotse"] if any(isinstance(source, LhotseManifest) for source in sources) else modules


def _open_sources(manifests: Sequence[str | Path], config: PrepareConfig, partial: Path, output: Path) -> list[Source]:
    options = InputOptions(
        format=config.format,
        channel=config.channel,
        allow_commands=config.allow_commands,
        extract_to=partial / "audio",
        stored_in=output / "audio",
    )
    return open_sources([Path(manifest) for manifest in manifests], options)


def _check_rejects(
    writer: "CorpusWriter", stats: "CorpusStats | None", sources: list[Source], config: PrepareConfig
) -> None:
    example = writer.first_reject
    why = f"; the first: {example.where}: {example.reason}, {example.detail}" if example else ""
    if stats is None:
        raise ManifestError(
            f"{', '.join(str(source.path) for source in sources)}: no usable cut among {writer.num_entries} "
            f"entries{why}. Check the paths, which are taken relative to the manifest, and the limits on duration."
        )
    if config.strict and example:
        reasons = ", ".join(f"{number} {reason}" for reason, number in writer.rejected.most_common())
        raise ManifestError(
            f"{writer.rejected.total()} of {writer.num_entries} entries cannot be used ({reasons}), and --strict "
            f"allows none{why}. Without --strict they are skipped and listed."
        )


def _write_rest(partial: Path, report: PrepareReport, meta: dict[str, Any], config: PrepareConfig, pool: Pool) -> None:
    """Writes the sample bank, the HTML report and `meta.json`."""
    from nestdata.prepare.report import write_report

    if config.pcm:
        from nestdata.corpus.corpus import open_addresses
        from nestdata.prepare.bank_writer import write_bank

        write_bank(partial, report.path, pool, open_addresses(partial, meta))
    hours_by = {"language": report.hours_by_language, "speaker": report.hours_by_speaker}
    write_report(partial, report.path.name, meta, hours_by)
    # Last, because a directory without it does not open as a corpus.
    (partial / "meta.json").write_text(json.dumps(meta, indent=2, default=str) + "\n")


def _report(stats: "CorpusStats", output: Path, rate: int) -> PrepareReport:
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
        rejected=stats.rejected,
        hours_by_language=hours_by.get("language", {}),
        hours_by_speaker=hours_by.get("speaker", {}),
    )


def _meta(stats: "CorpusStats", sources: list[Source], config: PrepareConfig) -> dict[str, Any]:
    from nestdata.corpus.corpus import FORMAT_VERSION

    rate = config.sampling_rate
    shards = {} if stats.shards is None else {"root": stats.shards.root, "shards": asdict(stats.shards)}
    return {
        "format_version": FORMAT_VERSION,
        "sampling_rate": rate,
        "num_cuts": stats.num_cuts,
        "num_bytes": stats.num_bytes,
        "hours": stats.total_samples / rate / 3600,
        "fingerprint": stats.fingerprint,
        "rejected": stats.rejected,
        **shards,
        "manifests": [str(source.path) for source in sources],
        "settings": asdict(config),
    }

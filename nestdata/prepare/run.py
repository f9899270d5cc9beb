"""Manifests in, one corpus directory out.

Items of the inputs are read in order by one process and looked at by any number of them; one writes what they find, so
that the corpus does not depend on how many there are.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nestdata.corpus.corpus import FORMAT_VERSION
from nestdata.errors import ConfigError, ManifestError
from nestdata.output import output_directory
from nestdata.prepare.bank_writer import write_bank
from nestdata.prepare.corpus_writer import Collector, CorpusWriter, Found, Written
from nestdata.prepare.inputs import InputFormat, InputOptions, Source, common_root, open_source
from nestdata.prepare.pool import Pool, open_pool
from nestdata.prepare.probe import Limits, ProbeMode, Reject, probe
from nestdata.prepare.report import write_report

# Items that are sent to a process at once; fewer where each takes long, so that none is left with much of the work.
_ITEMS_PER_TASK: dict[ProbeMode, int] = {"missing": 500, "all": 500, "decode": 25}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """What a corpus takes in, and how its audio will be read."""

    sampling_rate: int = 16000
    """Rate in Hz at which cuts are loaded; files of another rate are resampled when they are read."""

    channel: int = 0
    """Channel that is read from files with several, counted from 0. Lhotse cuts name their own."""

    min_seconds: float = 0.1
    """Shorter cuts are left out."""

    max_seconds: float | None = None
    """Longer cuts are left out; None keeps all."""

    window_seconds: float | None = None
    """Longer recordings are cut into windows, as few as are no longer than this, all of one length; None keeps them
    whole. Limits on duration are then those of the windows."""

    min_rate: int = 0
    """Files of a lower rate, in Hz, are left out."""

    probe: ProbeMode = "all"
    """How closely audio is looked at. `missing`: not at all where the manifest gives a duration, which is trusted, as
    is that the file has the corpus's rate. `all`: the header of every file. `decode`: every sample."""

    format: InputFormat | None = None
    """What every input is taken for; None tells by looking."""

    allow_commands: bool = False
    """Whether commands that a Kaldi wav.scp pipes from are run."""

    strict: bool = False
    """Whether anything that would be left out is an error."""

    pcm: bool = False
    """Whether all audio is also written to one file of 16-bit samples at the corpus's rate, as for noise that is used
    over and over."""

    def __post_init__(self) -> None:
        if self.sampling_rate < 1:
            raise ConfigError(f"sampling_rate is {self.sampling_rate}: give a rate in Hz, such as 16000.")
        if self.channel < 0:
            raise ConfigError(f"channel is {self.channel}: channels are counted from 0.")
        if self.min_seconds < 0:
            raise ConfigError(f"min_seconds is {self.min_seconds}: a duration cannot be negative.")
        if self.max_seconds is not None and self.max_seconds < self.min_seconds:
            raise ConfigError(
                f"max_seconds ({self.max_seconds:g}) is below min_seconds ({self.min_seconds:g}): no cut would be left."
            )
        if self.min_rate < 0:
            raise ConfigError(f"min_rate is {self.min_rate}: a rate cannot be negative.")
        if self.window_seconds is not None and self.window_seconds < max(self.min_seconds, 1 / self.sampling_rate):
            raise ConfigError(
                f"window_seconds ({self.window_seconds:g}) is below min_seconds ({self.min_seconds:g}): "
                "every window would be left out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """What a run of `prepare` took in and left out."""

    path: Path
    num_cuts: int
    hours: float
    shortest_s: float
    longest_s: float
    num_resampled: int
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejects by reason; each one is a line of `rejected.jsonl`."""

    hours_by_language: dict[str, float] = field(default_factory=dict)
    """Most first; empty where the inputs do not say."""

    hours_by_speaker: dict[str, float] = field(default_factory=dict)
    """The same; empty also where there are more than a hundred thousand."""


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
            folders of audio; they may be mixed.
        output: The corpus directory to make.
        config: Limits and target rate.
        overwrite: Whether an existing corpus at `output` is replaced, which happens at the end and at once.
        jobs: Processes that look at audio. The corpus does not depend on their number.
        dask: Address of a Dask scheduler whose workers look at the audio instead.
        on_progress: Called with the number of entries looked at and their total, or None where that is not known.

    Raises:
        ManifestError: An input cannot be read, or none of the audio can be used, or with `config.strict` any of it.
            Nothing is left behind.
        OutputError: The target exists, cannot be written, or is being written by another run.
    """
    config = config or PrepareConfig()
    output = Path(output).resolve()
    with (
        output_directory(output, kind="a corpus", overwrite=overwrite, may_replace=_is_corpus) as partial,
        open_pool(jobs, dask) as pool,
    ):
        sources = _open_sources([Path(manifest) for manifest in manifests], config, partial, output)
        with closing(CorpusWriter(partial)) as writer:
            _look_at_all(sources, config, pool, writer, on_progress)
            written = writer.finish(sources, config.sampling_rate)
            _check_rejects(writer, written, sources, config)
        assert written is not None
        if config.pcm:
            write_bank(partial, output, pool)
        report, meta = _report(written, output, config.sampling_rate), _meta(written, sources, config)
        by_label = {"language": report.hours_by_language, "speaker": report.hours_by_speaker}
        write_report(partial, output.name, meta, by_label)
        # Last, for without it nothing opens.
        (partial / "meta.json").write_text(json.dumps(meta, indent=2, default=str) + "\n")
    return report


def _is_corpus(directory: Path) -> bool:
    return (directory / "meta.json").is_file()


@dataclass(frozen=True, slots=True)
class _Task:
    """Some items of a source, to be looked at by any process."""

    source: Source
    source_number: int
    first: int
    items: list[Any]
    limits: Limits


def _look_at(task: _Task) -> tuple[int, Found]:
    collector = Collector()
    for number, item in enumerate(task.items, start=task.first):
        entry = task.source.entry(number, item)
        if entry is None:
            continue
        collector.num_entries += 1
        for found in probe(entry, task.limits):
            if isinstance(found, Reject):
                collector.rejects.append(found)
            else:
                collector.add(found, number, entry.where)
    return task.source_number, collector.found()


def _look_at_all(
    sources: list[Source],
    config: PrepareConfig,
    pool: Pool,
    writer: CorpusWriter,
    on_progress: Callable[[int, int | None], None] | None,
) -> None:
    counts = [source.count() for source in sources] if on_progress else [None]
    total = None if None in counts else sum(count for count in counts if count is not None)
    for source_number, found in pool.map(_look_at, _tasks(sources, config)):
        writer.add(found, source_number)
        if on_progress:
            on_progress(writer.num_entries, total)


def _tasks(sources: list[Source], config: PrepareConfig) -> Iterator[_Task]:
    limits = Limits(
        sampling_rate=config.sampling_rate,
        channel=config.channel,
        min_seconds=config.min_seconds,
        max_seconds=config.max_seconds,
        min_rate=config.min_rate,
        window_seconds=config.window_seconds,
        mode=config.probe,
    )
    for source_number, source in enumerate(sources):
        items = source.items()
        first = 1
        while batch := list(islice(items, _ITEMS_PER_TASK[config.probe])):
            yield _Task(source, source_number, first, batch, limits)
            first += len(batch)


def _open_sources(paths: list[Path], config: PrepareConfig, partial: Path, output: Path) -> list[Source]:
    root = common_root(paths)
    sources = []
    for number, path in enumerate(paths):
        options = InputOptions(
            root=root,
            channel=config.channel,
            allow_commands=config.allow_commands,
            extract_to=partial / "audio" / str(number),
            stored_in=output / "audio" / str(number),
        )
        sources.append(open_source(path, options, config.format))
    return sources


def _check_rejects(writer: CorpusWriter, written: Written | None, sources: list[Source], config: PrepareConfig) -> None:
    example = writer.first_reject
    why = f"; the first: {example.where}: {example.reason}, {example.detail}" if example else ""
    if written is None:
        raise ManifestError(
            f"{', '.join(str(source.path) for source in sources)}: no usable cut among {writer.num_entries} "
            f"entries{why}. Check the paths, which are taken relative to the manifest, and the limits on duration."
        )
    if config.strict and example:
        reasons = ", ".join(f"{number} {reason}" for reason, number in writer.rejected.most_common())
        raise ManifestError(
            f"{writer.rejected.total()} of {writer.num_entries} entries cannot be used ({reasons}), and --strict "
            f"allows none{why}. Without --strict they are left out and listed."
        )


def _report(written: Written, output: Path, rate: int) -> PrepareReport:
    hours_by = {
        kind: {name: samples / rate / 3600 for name, samples in counter.most_common() if samples}
        for kind, counter in written.samples_by.items()
    }
    return PrepareReport(
        path=output,
        num_cuts=written.num_cuts,
        hours=written.total_samples / rate / 3600,
        shortest_s=written.shortest / rate,
        longest_s=written.longest / rate,
        num_resampled=written.num_resampled,
        rejected=written.rejected,
        hours_by_language=hours_by.get("language", {}),
        hours_by_speaker=hours_by.get("speaker", {}),
    )


def _meta(written: Written, sources: list[Source], config: PrepareConfig) -> dict[str, Any]:
    rate = config.sampling_rate
    return {
        "format_version": FORMAT_VERSION,
        "sampling_rate": rate,
        "num_cuts": written.num_cuts,
        "num_bytes": written.num_bytes,
        "hours": written.total_samples / rate / 3600,
        "fingerprint": written.fingerprint,
        "rejected": written.rejected,
        "manifests": [str(source.path) for source in sources],
        "settings": asdict(config),
    }

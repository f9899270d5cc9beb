"""Prepares one corpus directory from one or many inputs.

One process splits the inputs into items in order, any number of processes probe them, and one process writes the
results in order. The corpus therefore does not depend on the number of processes. `finish` beside this module writes
what follows from the cuts.

numpy and the modules that need it are imported when a corpus is prepared, so that importing this module is fast.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestdata.errors import ManifestError, OutputError
from nestdata.output import output_directory
from nestdata.prepare.config import PrepareConfig, ProbeMode
from nestdata.prepare.inputs import AudioInputs, InputOptions, Source, audio_inputs
from nestdata.prepare.inputs.formats.detect import open_sources
from nestdata.prepare.inputs.formats.lhotse import CorpusCuts, LhotseManifest, LhotseObjects
from nestdata.prepare.pool import Pool, open_pool
from nestdata.prepare.progress import PrepareProgress, PrepareReport
from nestdata.prepare.reporting.advice import ADVICE
from nestdata.redaction import redacted_url
from nestdata.storage import has_scheme, is_url

if TYPE_CHECKING:
    from nestdata.prepare.tasks import Task, Traffic
    from nestdata.prepare.writing.corpus_writer import CorpusStats, CorpusWriter

_log = logging.getLogger(__name__)
# Subfolders of the corpus directory: the results of tasks, while it is being written, and tars of audio.
_KEPT_RESULTS, _SHARDS = "tasks", "shards"
# Bytes read in an epoch for each byte that the cuts need, above which packing is recommended.
_MAX_OVERHEAD = 4
# Items that are sent to a process at a time, unless the source sets a number: fewer in a slower mode, so that all
# processes finish at about the same time.
_ITEMS_PER_TASK: dict[ProbeMode, int] = {"missing": 500, "all": 500, "decode": 25}
# Recordings that are cut at pauses may last hours, and utterances that are measured seconds.
_RECORDINGS_PER_TASK = 1


def prepare_corpus(
    inputs: AudioInputs,
    output: str | Path,
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    jobs: int = 1,
    dask: str | None = None,
    on_progress: Callable[[PrepareProgress], None] | None = None,
) -> PrepareReport:
    """Writes one corpus from one or many inputs.

    Args:
        inputs: One input or a list of them, in any combination: paths, and URLs as `str`, of audio files, folders,
            tables, lists of paths, manifests and data sets; a `Corpus`; or a `CutSet` or `RecordingSet` of Lhotse.
        output: Path of the corpus directory, which is local.
        config: Limits and sampling rate; the defaults if None.
        overwrite: Whether an existing corpus at `output` is replaced. It is replaced in one step, after all work is
            done.
        jobs: Number of processes that probe audio. The corpus does not depend on it.
        dask: Address of a Dask scheduler whose workers probe the audio instead of local processes.
        on_progress: Called before the first task and after each one, with what has been probed so far.

    Returns:
        A summary of the corpus.

    Raises:
        ManifestError: An input cannot be read, no audio can be used, or an entry was rejected with `config.strict`.
        OutputError: The target exists, is a URL, cannot be written, or is being written by another run.
        CorpusError: A worker process ended unexpectedly.
        ConfigError: A required package is not installed, or no Dask scheduler answers.
        StorageError: A store cannot be read.

    If the call fails or is interrupted, nothing is left behind, except for finished results of shards and of audio at
    URLs: the next call with the same inputs, settings and target takes them from `OUTPUT.partial`.
    """
    from nestdata.prepare.finish import finish_corpus
    from nestdata.prepare.writing.corpus_writer import CorpusWriter

    config = config or PrepareConfig()
    if config.finds_speech:
        from nestdata.prepare.speech.detector import detector_name

        detector_name()  # raises an error now if the detector is not installed
    output = _local_path(output)
    checked = audio_inputs([*config.tars, *audio_inputs(inputs)])[len(config.tars) :]
    resumable = (_KEPT_RESULTS, _SHARDS)
    with ExitStack() as stack:
        partial = stack.enter_context(
            output_directory(output, kind="a corpus", overwrite=overwrite, may_replace=_is_corpus, resumable=resumable)
        )
        stack.enter_context(_keeps_finished_work(partial))
        sources = _open_sources(checked, config, partial, output)
        (partial / _KEPT_RESULTS).mkdir(exist_ok=True)
        pool = stack.enter_context(open_pool(jobs, dask, preload=_worker_modules(sources, config)))
        tasks = _tasks(sources, config, partial, output)
        with closing(CorpusWriter(partial)) as writer:
            traffic = _probe_sources(sources, tasks, pool, writer, config.sampling_rate, on_progress)
            stats = writer.finish(sources, config.sampling_rate)
            _check_rejects(writer, stats, sources, config)
        assert stats is not None
        report = finish_corpus(partial, output, stats, sources, config, pool)
        _remove_work(partial)
    _warn_of_traffic(traffic, report)
    return report


def _local_path(output: str | Path) -> Path:
    if has_scheme(str(output)) or is_url(str(output).replace(":/", "://", 1)):
        raise OutputError(
            f"{redacted_url(str(output))}: a corpus directory is written to a local path, not to a URL. Its audio may "
            "stay in the store."
        )
    return Path(output).resolve()


def _is_corpus(directory: Path) -> bool:
    """Returns whether a directory holds a corpus of any format version; other outputs also have a `meta.json`."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
    except (OSError, ValueError):
        return False
    has_keys = isinstance(meta, dict) and {"format_version", "num_cuts"} <= meta.keys()
    return has_keys and (directory / "index.npy").is_file()


def _probe_sources(
    sources: list[Source],
    tasks: "Iterator[Task]",
    pool: Pool,
    writer: "CorpusWriter",
    sampling_rate: int,
    on_progress: Callable[[PrepareProgress], None] | None,
) -> "Traffic":
    from nestdata.prepare.tasks import Traffic, run_task

    total_entries, total_shards = _totals(sources) if on_progress else (None, 0)
    traffic, num_shards, hours = Traffic(), 0, 0.0
    if on_progress:
        on_progress(PrepareProgress(0, total_entries, 0, total_shards))
    for source_index, probed, more in pool.map(run_task, tasks):
        writer.add(probed, source_index)
        traffic = traffic.plus(more)
        num_shards += sources[source_index].items_per_task is not None
        hours += probed.hours(sampling_rate)
        if on_progress:
            on_progress(
                PrepareProgress(writer.num_entries, total_entries, num_shards, total_shards, traffic.read, hours)
            )
    return traffic


def _totals(sources: list[Source]) -> tuple[int | None, int]:
    """Returns the number of entries, or None if it is unknown, and the number of shards."""
    counts = [(source.items_per_task is None, source.count()) for source in sources]
    has_shards = any(not is_entries for is_entries, _ in counts)
    entries = [count for is_entries, count in counts if is_entries]
    total = None if has_shards or None in entries else sum(count or 0 for count in entries)
    return total, sum(count or 0 for is_entries, count in counts if not is_entries)


def _tasks(sources: list[Source], config: PrepareConfig, partial: Path, output: Path) -> "Iterator[Task]":
    from nestdata.prepare.tasks import Task

    per_task = _ITEMS_PER_TASK["decode" if config.finds_speech else config.probe]
    if config.segment:
        per_task = _RECORDINGS_PER_TASK
    moved = (str(output), str(partial))
    for source_index, source in enumerate(sources):
        items = source.items()
        first = 1
        while batch := list(islice(items, source.items_per_task or per_task)):
            yield Task(
                source=source,
                source_index=source_index,
                first=first,
                items=batch,
                config=config,
                kept_in=str(partial / _KEPT_RESULTS),
                moved=moved,
            )
            first += len(batch)


def _remove_work(partial: Path) -> None:
    """Removes the results of tasks, and tars of audio that no cut refers to."""
    shutil.rmtree(partial / _KEPT_RESULTS, ignore_errors=True)
    if not (partial / _SHARDS).is_dir():
        return
    if not (partial / "shards.jsonl").exists():  # no cut has an address
        shutil.rmtree(partial / _SHARDS)
        return
    with (partial / "shards.jsonl").open("rb") as file:
        used = {os.path.basename(json.loads(line)["name"]) for line in file}
    for path in (partial / _SHARDS).rglob("*"):
        if path.is_file() and path.name not in used:
            path.unlink()


def _warn_of_traffic(traffic: "Traffic", report: PrepareReport) -> None:
    """Warns if the cuts are small parts of what must be read for them."""
    if traffic.needed and traffic.in_epoch > _MAX_OVERHEAD * traffic.needed:
        _log.warning(
            "%s: %.0f bytes are read for each byte of audio that the cuts need, because cuts are parts of long "
            "recordings, which are read whole. `nestdata pack %s` writes each cut as a file of its own",
            report.path,
            traffic.in_epoch / traffic.needed,
            report.path,
        )


@contextmanager
def _keeps_finished_work(partial: Path) -> Iterator[None]:
    """Removes unfinished files, and logs how many results are kept, if the block raises."""
    try:
        yield
    except BaseException:
        for folder in (_KEPT_RESULTS, _SHARDS):
            for path in (partial / folder).rglob("*.tmp"):
                path.unlink(missing_ok=True)
        num_kept = sum(1 for _ in (partial / _KEPT_RESULTS).glob("*"))
        if not num_kept:  # tars without a result would be written again
            shutil.rmtree(partial / _SHARDS, ignore_errors=True)
        else:
            _log.warning(
                "the results of %d finished tasks are kept in %s. The same call goes on from there; remove the "
                "directory to start over",
                num_kept,
                partial,
            )
        raise


def _worker_modules(sources: list[Source], config: PrepareConfig) -> list[str]:
    """Returns the modules that the workers need, which are imported once and shared by all of them.

    Files are opened with soundfile and, if libsndfile does not know their format, with Lhotse; decoding resamples with
    torchaudio. Lhotse also parses its own manifests.
    """
    modules = ["nestdata.prepare.writing.corpus_writer", "nestdata.prepare.probe", "nestdata.prepare.tasks"]
    if config.finds_speech:
        modules.append("torch")
    if config.probe != "missing" or config.pcm:
        return [*modules, "nestdata.prepare.bank_writer", "soundfile", "lhotse", "torchaudio"]
    return (
        [*modules, "lhotse"]
        if any(isinstance(source, (CorpusCuts, LhotseManifest, LhotseObjects)) for source in sources)
        else modules
    )


def _open_sources(inputs: Sequence[Any], config: PrepareConfig, partial: Path, output: Path) -> list[Source]:
    options = InputOptions(
        format=config.format,
        channel=config.channel,
        tars=config.tars,
        write_to=partial,
        stored_in=output,
    )
    return open_sources(inputs, options)


def _check_rejects(
    writer: "CorpusWriter", stats: "CorpusStats | None", sources: list[Source], config: PrepareConfig
) -> None:
    """Raises ManifestError if there is no cut, or if there is a reject and `config.strict` is set."""
    example = writer.first_reject
    why = f"; the first: {example.where}: {example.reason}, {example.detail}" if example else ""
    reasons = ", ".join(f"{number} {reason}" for reason, number in writer.rejected.most_common())
    if stats is None:
        advice = ADVICE[example.reason] if example else "Check the command that wrote it."
        names = [*dict.fromkeys(str(source.path) for source in sources)]
        raise ManifestError(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: no usable cut among {writer.num_entries} "
            f"entries{f' ({reasons})' if reasons else ''}{why}. {advice}"
        )
    if config.strict and example:
        raise ManifestError(
            f"{writer.rejected.total()} of {writer.num_entries} entries cannot be used ({reasons}), and --strict "
            f"allows none{why}. Without --strict they are skipped and listed."
        )

"""Prepares one corpus directory from one or many inputs.

This file holds the sequence of steps. One process splits the inputs into items (`_tasks`). Any number of processes, on
this machine or in a Dask cluster, turn each task into cuts and rejects (`run_task`): they parse its items into entries,
each of which is read, divided and judged (`probe`). The first process writes the results in the order of the tasks
(`prepare_corpus`). The corpus therefore does not depend on the number of processes.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import orjson

from nestdata.columns import parse_columns
from nestdata.errors import ManifestError, OutputError
from nestdata.output import output_directory, path_before_move
from nestdata.prepare.corpus_writer import CorpusStats, CorpusWriter
from nestdata.prepare.divide import divide
from nestdata.prepare.finish import PrepareReport, finish_corpus
from nestdata.prepare.found import KEPT_RESULTS, Collector, Found, KeptResult, Outcome, Reject, Task
from nestdata.prepare.inputs.entry import ADVICE, Entry, Source
from nestdata.prepare.inputs.format import AudioInputs, InputOptions, audio_inputs, is_corpus, open_sources
from nestdata.prepare.inputs.remote import with_members
from nestdata.prepare.judge import judge
from nestdata.prepare.pool import open_pool
from nestdata.prepare.prepare_config import PrepareConfig, ProbeMode
from nestdata.prepare.read import read_entry, reads_audio
from nestdata.prepare.speech import detector_name
from nestdata.redaction import redacted_url
from nestdata.storage import has_scheme, is_url, storage

_log = logging.getLogger(__name__)
# Subfolder of the corpus directory: tars of audio.
_SHARDS = "shards"
# The files and folders of a corpus.
_NAMES = re.compile(
    r"(?:cuts|rejected|notes|shards)\.jsonl|(?:index|addresses|checksums|versions|shards|bank)\.npy|bank\.pcm|meta\.json"
    r"|report(?:\.html)?|shards"
)
# The rejects of a run without a corpus, beside the target.
_REJECTS = ".rejected.jsonl"
# Most items that are sent to a process at a time, unless the source sets a number: fewer in a slower mode, so that all
# processes finish at about the same time. Recordings that are cut at pauses may last hours.
_ITEMS_PER_TASK: dict[ProbeMode, int] = {"missing": 500, "all": 500, "decode": 25}
_RECORDINGS_PER_TASK = 1
# The first tasks are shorter: no task is longer than this part of the items before it, so that progress is shown early.
_SHARE_OF_ITEMS_BEFORE = 8


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
        OutputError: The target exists, is a URL, cannot be written, or is being written by another run; or it holds an
            input or its audio.
        CorpusError: A worker process ended unexpectedly.
        ConfigError: A required package is not installed, or no Dask scheduler answers.
        StorageError: A store cannot be read.

    If the call fails or is interrupted, nothing is left behind, except for finished results of shards, of audio at URLs
    and of audio that was decoded or searched for speech: the next call with the same inputs, settings and target takes
    them from `OUTPUT.partial`. If rejects are the reason, and there are several, they are listed in
    `OUTPUT.rejected.jsonl`.
    """
    config = config or PrepareConfig()
    if config.finds_speech:
        detector_name()  # raises an error now if the detector is not installed
    output = _local_path(output)
    given = audio_inputs([*config.tars, *audio_inputs(inputs)])
    paths = [each.path if is_corpus(each) else each for each in given]
    with ExitStack() as stack:
        partial = stack.enter_context(
            output_directory(
                output,
                kind="a corpus",
                names=_NAMES,
                overwrite=overwrite,
                may_replace=_is_corpus,
                resumable=(KEPT_RESULTS, _SHARDS),
                inputs=[path for path in paths if isinstance(path, Path)],
            )
        )
        replaces = output.exists()
        stack.enter_context(_keeps_finished_work(partial))
        options = InputOptions(
            format=config.format,
            channel=config.chosen_channel,
            columns=parse_columns(config.columns),
            tars=config.tars,
            write_to=partial,
            stored_in=output,
        )
        _remove_list_of_rejects(output.with_name(output.name + _REJECTS))
        sources = open_sources(given[len(config.tars) :], options)
        (partial / KEPT_RESULTS).mkdir(exist_ok=True)
        pool = stack.enter_context(open_pool(jobs, dask, preload=_worker_modules(sources, config)))
        with closing(CorpusWriter(partial)) as writer:
            total_entries, total_shards = _totals(sources) if on_progress else (None, 0)
            progress = PrepareProgress(0, total_entries, 0, total_shards)
            show = on_progress or (lambda _: None)
            show(progress)
            for result in pool.map(run_task, _tasks(sources, config, partial, output)):
                if replaces:
                    _check_audio(result.found, output, partial)
                writer.add(result.found, result.source_index)
                progress = progress._replace(
                    entries=writer.num_entries,
                    shards=progress.shards + (sources[result.source_index].items_per_task is not None),
                    bytes_read=progress.bytes_read + result.bytes_read,
                    hours=progress.hours + result.found.hours(config.sampling_rate),
                )
                show(progress)
            writer.check_names(parse_columns(config.columns))
            stats = writer.finish(sources, config.sampling_rate)
            _check_rejects(writer, stats, sources, config, list_in=output.with_name(output.name + _REJECTS))
        assert stats is not None
        report = finish_corpus(partial, output, stats, sources, config, pool)
        _remove_work(partial)
    return report


def _tasks(sources: list[Source], config: PrepareConfig, partial: Path, output: Path) -> Iterator[Task]:
    """Yields consecutive items of each source."""
    most = (
        _RECORDINGS_PER_TASK if config.segment else _ITEMS_PER_TASK["decode" if config.finds_speech else config.probe]
    )
    number = num_items = 0
    for source_index, source in enumerate(sources):
        items, first = source.items(), 1
        while batch := list(
            islice(items, source.items_per_task or max(1, min(most, num_items // _SHARE_OF_ITEMS_BEFORE)))
        ):
            yield Task(
                number=number,
                source=source,
                source_index=source_index,
                first=first,
                items=batch,
                config=config,
                moved=(str(output), str(partial)),
            )
            number, num_items, first = number + 1, num_items + len(batch), first + len(batch)


class TaskResult(NamedTuple):
    """What a task found."""

    source_index: int
    found: Found
    bytes_read: int
    """Bytes that this process read from shards and stores meanwhile; a kept result has none."""


def run_task(task: Task) -> TaskResult:
    """Finds the cuts of the items of a task, or takes the kept result of an earlier run; runs in any process.

    Raises:
        ManifestError: An item cannot be parsed.
        StorageError: A shard or object cannot be read for a reason that says nothing about its audio.
    """
    kept, bytes_before = KeptResult(task), storage().stats.bytes_read
    found = kept.load()
    if found is None:
        collector = Collector()
        for number, entry in _entries(task):
            collector.add(probe(entry, task.config), number, entry)
        found = collector.collected()
        kept.save(found, collector.audio)
    return TaskResult(task.source_index, found, storage().stats.bytes_read - bytes_before)


def _entries(task: Task) -> Iterator[tuple[int, Entry]]:
    """Yields the entries of the items, with the numbers that `Source.where` knows."""
    numbered = (
        (number if entry.number is None else entry.number, entry)
        for number, item in enumerate(task.items, start=task.first)
        for entry in task.source.entries(number, item)
    )
    return with_members(numbered, lambda entry: reads_audio(entry, task.config))


def probe(entry: Entry, config: PrepareConfig) -> list[Outcome]:
    """Returns the cut of an entry, or its windows or segments, at the rate of the corpus; unusable ones are a `Reject`.

    With `config.probe` "missing", a file is opened only if the manifest gives no duration; "all" reads the header of
    every file; "decode" decodes every cut. If speech is looked for, the result says how much there is. Notes come last.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    whole = read_entry(entry, config)
    if isinstance(whole, Reject):
        return [whole]
    return judge(whole, divide(whole, config), config)


def _check_audio(found: Found, output: Path, partial: Path) -> None:
    """Raises OutputError if the audio of a cut is in the corpus that will be replaced."""
    locations = [shard.location for shard in found.shards]
    if orjson.dumps(f"{output}/")[1:-1] in found.lines:
        rows = map(orjson.loads, found.lines.splitlines())
        locations += [str(source["source"]) for row in rows for source in row["recording"]["sources"]]
    for location in {location.partition("?o=")[0] for location in locations}:  # without places in tars
        before_move = path_before_move(location, output, partial)
        if before_move != location and not os.path.exists(before_move):
            raise OutputError(
                f"{output}: holds audio of the input ({location}), and would be replaced. Choose another path."
            )


def _totals(sources: list[Source]) -> tuple[int | None, int]:
    """Returns the number of entries, or None if it is unknown, and the number of shards."""
    entries = [source.count() for source in sources if source.items_per_task is None]
    shards = [source.count() or 0 for source in sources if source.items_per_task is not None]
    total = None if shards or None in entries else sum(count or 0 for count in entries)
    return total, sum(shards)


def _check_rejects(
    writer: CorpusWriter, stats: CorpusStats | None, sources: list[Source], config: PrepareConfig, *, list_in: Path
) -> None:
    """Raises ManifestError if there is no cut, or if there is a reject and `config.strict` is set.

    Several rejects are first listed in the file `list_in`, unless something else is there.
    """
    example = writer.first_reject
    if stats is not None and not (config.strict and example):
        return
    why = f"; the first: {example.where}: {example.reason}, {example.detail.rstrip('.')}" if example else ""
    if writer.stats.rejected.total() > 1 and not os.path.lexists(list_in):
        writer.copy_rejects(list_in)
        why += f"; all: {list_in}"
    reasons = ", ".join(f"{number} {reason}" for reason, number in writer.stats.rejected.most_common())
    if stats is not None:
        raise ManifestError(
            f"{writer.stats.rejected.total()} of {writer.num_entries} entries cannot be used ({reasons}), and --strict "
            f"allows none{why}. Without --strict they are skipped."
        )
    advice = ADVICE[example.reason] if example else "Check the command that wrote it."
    names = [*dict.fromkeys(str(source.path) for source in sources)]
    raise ManifestError(
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: no usable cut among {writer.num_entries} "
        f"entries{f' ({reasons})' if reasons else ''}{why}. {advice}"
    )


def _remove_list_of_rejects(path: Path) -> None:
    """Removes the rejects of an earlier run without a corpus; a file that is not such a list stays."""
    try:
        with path.open("rb") as file:
            is_list = not path.is_symlink() and orjson.loads(file.readline()).keys() == set(Reject._fields)
    except (OSError, ValueError, AttributeError):
        return
    if is_list:
        path.unlink()


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


def _worker_modules(sources: list[Source], config: PrepareConfig) -> list[str]:
    """Returns the modules that the workers need, which are imported once and shared by all of them.

    Files are opened with soundfile, decoding resamples with torchaudio, and Lhotse applies transforms and parses its
    own manifests.
    """
    modules = ["nestdata.prepare.run", *dict.fromkeys(type(source).__module__ for source in sources)]
    if config.probe != "missing" or config.pcm:
        return [*modules, "soundfile", "lhotse", "nestdata.filters"]
    return [*modules, "lhotse"] if any(source.format == "lhotse" for source in sources) else modules


@contextmanager
def _keeps_finished_work(partial: Path) -> Iterator[None]:
    """Removes unfinished files, and logs how many results are kept, if the block raises."""
    try:
        yield
    except BaseException:
        for folder in (KEPT_RESULTS, _SHARDS):
            for path in (partial / folder).rglob("*.tmp"):
                path.unlink(missing_ok=True)
        num_kept = sum(1 for _ in (partial / KEPT_RESULTS).glob("*"))
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


def _remove_work(partial: Path) -> None:
    """Removes the results of tasks, and tars of audio that no cut refers to."""
    shutil.rmtree(partial / KEPT_RESULTS, ignore_errors=True)
    shards, listed = partial / _SHARDS, partial / "shards.jsonl"  # missing if no cut has an address
    lines = listed.read_bytes().splitlines() if listed.exists() else []
    used = {os.path.basename(json.loads(line)["name"]) for line in lines}
    for path in [*shards.rglob("*.tar")]:
        if path.name not in used:
            path.unlink()
    for folder in (*shards.glob("*"), shards):
        if not any(folder.rglob("*.tar")):
            shutil.rmtree(folder, ignore_errors=True)

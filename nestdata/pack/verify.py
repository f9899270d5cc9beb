"""Checks that the audio of a corpus or a packed set is complete and unchanged: `verify_corpus`."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nestdata.errors import ConfigError
from nestdata.pack.verify_report import Checked, VerifyReport
from nestdata.storage import FileVersion, is_url
from nestdata.storage.location import parse_url

if TYPE_CHECKING:
    from nestdata.corpus.corpus import Corpus


def verify_corpus(
    path: str | Path,
    *,
    checksums: bool = False,
    root: str | None = None,
    set_root: bool = False,
    accept_changed: bool = False,
    jobs: int = 8,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> VerifyReport:
    """Compares a corpus, or a packed set, with the audio that it names.

    The size of every shard is compared, and its ETag if the store gives one. Of cuts that are read from files of their
    own, the files must exist, not be empty, and have the size and the modification time that they had when the corpus
    was prepared, if it knows them. A corpus with a sample bank needs no other audio, and none is checked.

    Args:
        path: A corpus directory, or the folder or URL of a packed set.
        checksums: Whether all audio is read as well. Its bytes are compared with their checksums; the cuts of a corpus
            without checksums are decoded.
        root: Where the folder or bucket of the audio of a corpus is now, if it was moved: a path or a URL. By default,
            the root in its `meta.json`.
        set_root: Whether `root` is written to `meta.json` if no problem was found, so that the corpus is used with it.
        accept_changed: Whether files of cuts that have another size or time are used as they are from now on, if their
            headers give the length, the sampling rate and the number of channels that the corpus has.
        jobs: Number of threads, each of which checks one shard at a time.
            output; only with `checksums`.
        on_progress: Called with the number of shards and groups of files that were checked, and their total.

    Returns:
        The problems found, in the order of the shards.

    Raises:
        CorpusError: The corpus is damaged, or the packed set is incomplete.
        StorageError: The store does not answer or refuses its credentials, which says nothing about the corpus; or the
            root is not a location, or cannot be written.
        ConfigError: `jobs` is below 1, or a root is given for a corpus that has none.
    """
    from nestdata.corpus.packed_set import FOLDER

    if set_root and root is None:
        raise ConfigError("set_root needs a root: give the folder or bucket where the audio is now.")
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give at least 1.")
    location = str(path).rstrip("/") if is_url(str(path)) else str(Path(path).resolve())
    if is_url(location) or Path(location, FOLDER).is_dir():
        from nestdata.pack.verify_packed import packed_tasks

        if root is not None:
            raise ConfigError(f"{location}: is a packed set, which holds its audio. Give the root of a corpus only.")
        report, num_tasks, tasks = packed_tasks(location, checksums)
    else:
        from nestdata.corpus.corpus import Corpus
        from nestdata.pack.verify_named import corpus_tasks

        corpus = Corpus.open(location, root=_checked_root(root))
        if root is not None:
            _check_root_matters(corpus)
        report, num_tasks, tasks = corpus_tasks(corpus, checksums, accept_changed)
    report.reads_audio = checksums
    accepted: list[tuple[int, FileVersion]] = []
    for done, checked in enumerate(_run_all(tasks, jobs), start=1):
        report.num_checked += checked.num_checked
        report.problems += checked.problems
        accepted += checked.accepted
        if on_progress:
            on_progress(done, num_tasks)
    if accepted:
        corpus.write_file_versions(accepted)
        report.num_accepted = len(accepted)
    if set_root and not report.problems:
        corpus.write_root()
        report.new_root = corpus.root
    return report


def _checked_root(root: str | None) -> str | None:
    """Returns a root as an absolute path or a URL.

    Raises:
        StorageError: "invalid": the root is not a URL of an object store, or holds credentials.
    """
    if root is None:
        return None
    if not is_url(root):
        return str(Path(root).resolve())
    parse_url(root)
    return root.rstrip("/")


def _check_root_matters(corpus: "Corpus") -> None:
    if corpus.has_bank:
        raise ConfigError(f"{corpus.path}: its audio is read from its sample bank, so it needs no root.")
    if not corpus.root:
        raise ConfigError(
            f"{corpus.path}: its audio is not relative to a root, so it cannot be moved. Prepare it again where the "
            "audio is now."
        )


def _run_all(tasks: Iterable[Callable[[], Checked]], jobs: int) -> Iterator[Checked]:
    """Runs tasks in threads, and yields their results in order; takes tasks only as fast as they are done."""
    tasks = iter(tasks)
    with ThreadPoolExecutor(jobs) as threads:
        waiting = [threads.submit(task) for task in islice(tasks, 2 * jobs)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting += [threads.submit(task) for task in islice(tasks, 1)]
        finally:
            for future in waiting:
                future.cancel()

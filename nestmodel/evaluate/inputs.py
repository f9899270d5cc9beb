"""What features are computed from: the corpus of the inputs, the labels of its cuts, and the rejected utterances."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from nestdata import AudioInputs, Corpus, PrepareConfig, PrepareProgress, prepare_corpus
from nestmodel.errors import ConfigError

OnProgress = Callable[[int, int | None], None]
"""Called with the number of finished items and their total; the total is None while it is unknown."""

_NOT_LABELS = frozenset({"id", "recording_id", "start", "duration", "channel", "custom", "alignment"})


class RejectedUtterance(NamedTuple):
    """An utterance without features; the fields are those of the rejects of `nestdata prepare`."""

    where: str
    """Path of the audio file; empty if the audio is not in a file of its own."""

    cut_id: str
    reason: str
    """One word, for counting."""

    detail: str
    """What was wrong, with the values that were found."""


class RejectLog:
    """Writes `rejected.jsonl`, one line per rejected input, and counts the inputs by reason.

    Use it as a context manager: the file is open inside the `with` block, and complete after it.

    Args:
        directory: Directory in which the file is created.
        name: Name of the file.
    """

    def __init__(self, directory: Path, name: str = "rejected.jsonl") -> None:
        self._file = (directory / name).open("w", encoding="utf-8")
        self._counts: Counter[str] = Counter()
        self._cut_ids: set[str] = set()
        self.first: RejectedUtterance | None = None
        """The utterance that was added first; None before that."""

    def __enter__(self) -> "RejectLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def counts(self) -> dict[str, int]:
        """Number of rejected inputs by reason, the most frequent reason first."""
        return dict(self._counts.most_common())

    def add(self, rejected: RejectedUtterance) -> None:
        """Adds an utterance, unless it was added before: several passes over a corpus reject the same utterances."""
        if rejected.cut_id in self._cut_ids:
            return
        self._cut_ids.add(rejected.cut_id)
        self.first = self.first or rejected
        self._counts[rejected.reason] += 1
        self._file.write(json.dumps(rejected._asdict()) + "\n")

    def copy_from(self, corpus: Corpus) -> None:
        """Adds the inputs that `prepare_corpus` rejected when it wrote a corpus."""
        self._file.write((corpus.path / "rejected.jsonl").read_text(encoding="utf-8"))
        self._counts.update(corpus.meta["rejected"])


@contextmanager
def open_inputs(
    inputs: AudioInputs,
    sampling_rate: int,
    directory: Path,
    rejects: RejectLog | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[Corpus]:
    """Yields a corpus of the inputs at a sampling rate.

    Args:
        inputs: A `Corpus`, which is used as it is; or anything else that `prepare_corpus` accepts, which is prepared
            into a temporary corpus. That finds broken files. Cuts of any length are accepted.
        sampling_rate: Sampling rate of the model, in Hz.
        directory: Where the temporary corpus is written. It is removed when the context ends.
        rejects: Receives the inputs that the preparation rejects.
        on_progress: Called with the number of prepared entries and their total.

    Raises:
        ConfigError: A corpus was given and its sampling rate is another one.
        NestError: An input cannot be read, or none of its audio can be used.
    """
    if isinstance(inputs, Corpus):
        check_rate(inputs, sampling_rate)
        yield inputs
        return
    temporary = directory / "corpus"
    config = PrepareConfig(sampling_rate=sampling_rate, min_seconds=0.0, probe="all", report_samples=0)
    prepare_corpus(inputs, temporary, config, on_progress=_entries_to(on_progress) if on_progress else None)
    try:
        corpus = Corpus.open(temporary)
        if rejects is not None:
            rejects.copy_from(corpus)
        yield corpus
    finally:
        shutil.rmtree(temporary)


def check_rate(corpus: Corpus, sampling_rate: int) -> None:
    """Raises ConfigError unless a corpus has the sampling rate of a model, in Hz."""
    if corpus.sampling_rate != sampling_rate:
        raise ConfigError(
            f"{corpus.path} is at {corpus.sampling_rate} Hz and the model at {sampling_rate} Hz. "
            f"Prepare it with --sampling-rate {sampling_rate}."
        )


def cut_labels(cut: dict[str, Any]) -> dict[str, Any]:
    """Returns the labels of a cut: its custom fields, and each field that has one value in all its supervisions."""
    labels = dict(cut.get("custom") or {})
    supervisions = [
        {
            **(supervision.get("custom") or {}),
            **{name: value for name, value in supervision.items() if name not in _NOT_LABELS},
        }
        for supervision in cut.get("supervisions") or []
    ]
    for name in dict.fromkeys(name for supervision in supervisions for name in supervision):
        values = [supervision.get(name) for supervision in supervisions]
        if all(value == values[0] for value in values):
            labels[name] = values[0]
    return labels


def audio_path(cut: dict[str, Any]) -> str | None:
    """Returns the path of the file with the audio of a cut; None if the audio comes from another kind of source."""
    sources = cut["recording"]["sources"]
    source = next((source for source in sources if cut["channel"] in source["channels"]), sources[0])
    return str(source["source"]) if source["type"] == "file" else None


def _entries_to(report: Callable[[int, int | None], None]) -> Callable[[PrepareProgress], None]:
    return lambda found: report(found.entries, found.total_entries)

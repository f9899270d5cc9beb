"""What features are computed from: the corpus of the inputs, the labels of its cuts, and the rejected utterances."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nestdata import AudioInputs, Corpus, CorpusError, PrepareConfig, PrepareProgress, prepare_corpus
from nestmodel.errors import ConfigError

_log = logging.getLogger(__name__)
_PREPARED = "corpus"

OnProgress = Callable[[int, int | None], None]
"""Called with the number of finished items and their total; the total is None while it is unknown."""

_NOT_LABELS = frozenset({"id", "recording_id", "start", "duration", "channel", "custom", "alignment"})


class RejectedUtterance(NamedTuple):
    """An utterance without features, with the same fields as the rejects of `nestdata prepare`."""

    where: str
    """Path of the audio file; empty if the audio is not in a file of its own."""

    cut_id: str
    reason: str
    """One word, for counting."""

    detail: str
    """What was wrong, with the values that were found."""


def reject_cut(cut: dict[str, Any], reason: str, detail: str) -> RejectedUtterance:
    """Returns the reject of a cut."""
    return RejectedUtterance(audio_path(cut) or "", cut["id"], reason, detail)


class RejectLog:
    """Utterances without features. Several passes over a corpus reject the same ones, which are listed once."""

    def __init__(self) -> None:
        self._rejected: dict[RejectedUtterance, None] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Number of rejected inputs by reason, the most frequent reason first."""
        return dict(Counter(rejected.reason for rejected in self._rejected).most_common())

    @property
    def last(self) -> RejectedUtterance:
        """The utterance that was added last."""
        return next(reversed(self._rejected))

    def add(self, rejected: RejectedUtterance) -> None:
        """Adds an utterance."""
        self._rejected[rejected] = None

    def write(self, path: Path) -> None:
        """Writes one line of JSON per rejected input."""
        lines = (json.dumps(rejected._asdict()) + "\n" for rejected in self._rejected)
        path.write_text("".join(lines), encoding="utf-8")


@contextmanager
def open_inputs(
    inputs: AudioInputs,
    sampling_rate: int,
    directory: Path,
    on_reject: Callable[[RejectedUtterance], None],
    on_progress: OnProgress | None = None,
) -> Iterator[Corpus]:
    """Yields a corpus of the inputs at a sampling rate.

    Args:
        inputs: A `Corpus`, which is used as it is; or anything else that `prepare_corpus` accepts, which is prepared
            into a temporary corpus. Preparing finds broken files. Cuts of any length are accepted.
        sampling_rate: Sampling rate of the model, in Hz.
        directory: Where the temporary corpus is written. It is removed when the context ends.
        on_reject: Called for each input that the preparation rejects.
        on_progress: Called with the number of prepared entries and their total.

    Raises:
        ConfigError: A corpus was given and its sampling rate is another one.
        NestError: An input cannot be read, or none of its audio can be used.
    """
    if isinstance(inputs, Corpus):
        check_rate(inputs, sampling_rate)
        yield inputs
        return
    temporary = directory / _PREPARED
    config = PrepareConfig(sampling_rate=sampling_rate, min_seconds=0.0, probe="all", report_samples=0)

    def show(found: PrepareProgress) -> None:
        if on_progress:
            on_progress(found.entries, found.total_entries)

    prepare_corpus(inputs, temporary, config, on_progress=show)
    try:
        cut_off = [note["detail"] for note in _lines(temporary / "notes.jsonl") if note["kind"] == "ends_early"]
        if cut_off:
            _log.warning("files that are cut off: %d, such as %s", len(cut_off), cut_off[0])
        for fields in _lines(temporary / "rejected.jsonl"):
            on_reject(RejectedUtterance(*(fields[field] for field in RejectedUtterance._fields)))
        yield Corpus.open(temporary)
    finally:
        shutil.rmtree(temporary)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of JSON lines; empty if there is no such file."""
    return [*map(json.loads, path.read_text(encoding="utf-8").splitlines())] if path.exists() else []


def as_corpus(inputs: AudioInputs, sampling_rate: int) -> AudioInputs:
    """Opens inputs that are the directory of one corpus at a sampling rate, which needs no preparation.

    Returns:
        The corpus, or the inputs if they are anything else.
    """
    (path, *others) = inputs if isinstance(inputs, list | tuple) and inputs else (inputs,)
    if others or not isinstance(path, str | Path) or not Path(path, "meta.json").is_file():
        return inputs
    try:
        corpus = Corpus.open(path)
    except CorpusError:
        return inputs
    return corpus if corpus.sampling_rate == sampling_rate else inputs


def open_prepared(directory: Path) -> Corpus:
    """Returns the corpus that another process has prepared by `open_inputs`, whose block has not ended."""
    return Corpus.open(directory / _PREPARED)


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

"""The corpus that features are computed from, and the labels and audio files of its cuts."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestdata import AudioInputs, Corpus, PrepareConfig, PrepareProgress, prepare_corpus
from nestmodel.errors import ConfigError
from nestmodel.evaluate.features.rejects import RejectLog

OnProgress = Callable[[int, int | None], None]
"""Called with the number of finished items and their total; the total is None while it is unknown."""

_NOT_LABELS = frozenset({"id", "recording_id", "start", "duration", "channel", "custom", "alignment"})


@contextmanager
def open_inputs(
    inputs: AudioInputs,
    sampling_rate: int,
    directory: Path,
    rejects: RejectLog,
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

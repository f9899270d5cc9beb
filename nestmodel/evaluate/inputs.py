"""The corpus that features are computed from, and the labels and audio files of its cuts."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from nestdata import Corpus, PrepareConfig, PrepareProgress, prepare_corpus
from nestmodel.errors import ConfigError
from nestmodel.evaluate.rejects import RejectLog

OnProgress = Callable[[int, int | None], None]
"""Called with the number of finished items and their total; the total is None while it is unknown."""

_NOT_LABELS = frozenset({"id", "recording_id", "start", "duration", "channel", "custom", "alignment"})


@contextmanager
def open_inputs(
    inputs: Corpus | Sequence[str | Path],
    sampling_rate: int,
    directory: Path,
    rejects: RejectLog,
    on_progress: OnProgress | None = None,
    *,
    allow_commands: bool = False,
) -> Iterator[Corpus]:
    """Yields a corpus of the inputs at a sampling rate.

    Args:
        inputs: A corpus, which is used as it is; or paths of manifests, folders and corpora. Paths are prepared into a
            temporary corpus, which finds broken files. Cuts of any length are accepted.
        sampling_rate: Sampling rate of the model, in Hz.
        directory: Where the temporary corpus is written. It is removed when the context ends.
        rejects: Receives the inputs that the preparation rejects.
        on_progress: Called with the number of prepared entries and their total.
        allow_commands: Whether to run the shell commands that inputs other than a corpus give instead of files.

    Raises:
        ConfigError: A corpus was given and its sampling rate is another one.
        NestDataError: An input cannot be read, or none of its audio can be used.
    """
    if isinstance(inputs, Corpus):
        if inputs.sampling_rate != sampling_rate:
            raise ConfigError(
                f"{inputs.path} is at {inputs.sampling_rate} Hz and the model at {sampling_rate} Hz. "
                f"Prepare it with --sampling-rate {sampling_rate}."
            )
        yield inputs
        return
    temporary = directory / "corpus"
    config = PrepareConfig(
        sampling_rate=sampling_rate, min_seconds=0.0, probe="all", report_samples=0, allow_commands=allow_commands
    )
    manifests = [_manifest_path(Path(path), directory / f"moved-{i}.jsonl") for i, path in enumerate(inputs)]
    prepare_corpus(manifests, temporary, config, on_progress=_entries_to(on_progress) if on_progress else None)
    try:
        corpus = Corpus.open(temporary, allow_commands=allow_commands)
        rejects.copy_from(corpus)
        yield corpus
    finally:
        shutil.rmtree(temporary)
        for manifest in directory.glob("moved-*.jsonl"):
            manifest.unlink()


def cut_labels(cut: dict[str, Any]) -> dict[str, Any]:
    """Returns the labels of a cut: its custom fields, and each field that has one value in all its supervisions."""
    labels = dict(cut.get("custom") or {})
    supervisions = [
        {**(one.get("custom") or {}), **{name: value for name, value in one.items() if name not in _NOT_LABELS}}
        for one in cut.get("supervisions") or []
    ]
    for name in dict.fromkeys(name for one in supervisions for name in one):
        values = [one.get(name) for one in supervisions]
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


def _manifest_path(path: Path, new: Path) -> Path:
    """Returns the cut manifest of a corpus directory; any other path is returned unchanged.

    If the audio of the corpus was moved, a manifest with its present location is written to `new`.
    """
    if not (path / "index.npy").is_file():
        return path
    corpus = Corpus.open(path)
    if corpus.has_bank or not corpus.is_moved:
        return path / "cuts.jsonl"
    with new.open("wb") as file:
        for index in corpus.input_order().tolist():
            file.write(orjson.dumps(corpus.line(index), option=orjson.OPT_APPEND_NEWLINE))
    return new

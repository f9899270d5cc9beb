"""Encoder outputs of the utterances of a corpus, each at its own length.

A corpus is read in batches, longest utterance first. The features of an utterance do not depend on the other utterances
of its batch, except for rounding. Each utterance is either yielded or reported with a reason.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata import AudioError, AudioInputs, Corpus
from nestmodel.errors import ConfigError, ExtractError
from nestmodel.evaluate.features.batch import (
    BatchFunction,
    FeatureProblem,
    compute_batch,
    in_eval_mode,
    layer_function,
    resolve_device,
)
from nestmodel.evaluate.features.config import Layers, check_batch_seconds
from nestmodel.evaluate.features.inputs import audio_path, check_rate, open_inputs
from nestmodel.evaluate.features.rejects import RejectedUtterance, RejectLog
from nestmodel.nn.network import NestNetwork

OnReject = Callable[[RejectedUtterance], None]


class Utterance(NamedTuple):
    """The features of one utterance."""

    row: int
    """Index of the utterance in the corpus."""

    line: dict[str, Any]
    """The cut, as in `cuts.jsonl`."""

    values: NDArray[np.float32]
    """Valid frames only, shape (layers, enc_frames, dim); the layers are in the requested order."""

    def __repr__(self) -> str:
        return (
            f"Utterance(row={self.row}, id={self.line.get('id')!r}, values: {' x '.join(map(str, self.values.shape))})"
        )


def iterate_features(
    model: NestNetwork,
    inputs: AudioInputs,
    layers: Layers = "all",
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    on_reject: OnReject | None = None,
) -> Iterator[Utterance]:
    """Yields the encoder features of utterances, longest utterance first.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        inputs: A `Corpus` at the sampling rate of the model; or anything else that `prepare_corpus` accepts, such as a
            file, a folder, a manifest or a `CutSet`, which is prepared into a temporary corpus.
        layers: Numbers of the encoder outputs to return; see `Layers`.
        max_batch_seconds: Seconds of audio in a batch, padding included. A longer utterance is a batch by itself.
        device: A device of PyTorch, such as `cpu`; `auto` is a GPU if there is one, the CPU otherwise.
        rows: Indices of utterances in a `Corpus`; None for all.
        on_reject: Called for each utterance without features. If None, such an utterance raises an error.

    Raises:
        ConfigError: The layers or the device do not exist; the corpus has another sampling rate than the model; or rows
            are given without a `Corpus`.
        NestError: An input cannot be read, or none of its audio can be used.
        ExtractError: A batch does not fit into memory; or an utterance has no features and `on_reject` is None.
    """
    compute, rate = layer_function(model, layers), model.config.features.sampling_rate
    if isinstance(inputs, Corpus):
        check_rate(inputs, rate)
        return iterate_corpus(model, inputs, compute, max_batch_seconds, device, rows=rows, on_reject=on_reject)
    if rows is not None:
        raise ConfigError("rows are indices of a Corpus: open one with Corpus.open, or leave them out.")
    return _iterate_prepared(model, inputs, compute, max_batch_seconds, device, on_reject or _raise_rejected)


def iterate_corpus(
    model: NestNetwork,
    corpus: Corpus,
    compute: BatchFunction,
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    on_reject: OnReject | None = None,
) -> Iterator[Utterance]:
    """Yields the features that a function of a model computes, longest utterance first.

    The corpus has the sampling rate of the model. The other arguments and the errors are those of `iterate_features`.
    """
    torch_device = resolve_device(device)
    check_batch_seconds(max_batch_seconds)
    reject = on_reject or _raise_rejected
    rate = corpus.sampling_rate
    with in_eval_mode(model, torch_device):
        for batch in _batches(corpus, range(len(corpus)) if rows is None else rows, int(max_batch_seconds * rate)):
            loaded = [(row, samples) for row in batch if (samples := _load(corpus, row, reject)) is not None]
            lines = [corpus.line(row) for row, _ in loaded]
            found = compute_batch([samples for _, samples in loaded], rate, compute, torch_device) if loaded else ()
            for (row, _), line, values in zip(loaded, lines, found, strict=True):
                if isinstance(values, FeatureProblem):
                    reject(_rejected(line, *values))
                else:
                    yield Utterance(row, line, values)


def _iterate_prepared(
    model: NestNetwork,
    inputs: AudioInputs,
    compute: BatchFunction,
    max_batch_seconds: float,
    device: str,
    on_reject: OnReject,
) -> Iterator[Utterance]:
    """Does the work of `iterate_corpus` for inputs that are prepared into a temporary corpus."""
    with TemporaryDirectory() as name, RejectLog(Path(name)) as rejects:
        with open_inputs(inputs, model.config.features.sampling_rate, Path(name), rejects) as corpus:
            for line in (corpus.path / "rejected.jsonl").read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                on_reject(RejectedUtterance(*(fields[field] for field in RejectedUtterance._fields)))
            yield from iterate_corpus(model, corpus, compute, max_batch_seconds, device, on_reject=on_reject)


def _batches(corpus: Corpus, rows: Sequence[int], max_samples: int) -> Iterator[list[int]]:
    """Yields batches of utterance indices, longest first; each has at most `max_samples` samples after padding."""
    batch: list[int] = []
    for row in sorted(rows, reverse=True):  # a corpus is sorted by length
        if batch and (len(batch) + 1) * corpus.num_samples_of(batch[0]) > max_samples:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _load(corpus: Corpus, row: int, reject: OnReject) -> NDArray[np.float32] | None:
    try:
        return corpus.load(row)[1]
    except AudioError as error:
        reject(_rejected(corpus.line(row), error.reason, str(error)))
        return None


def _rejected(cut: dict[str, Any], reason: str, detail: str) -> RejectedUtterance:
    return RejectedUtterance(audio_path(cut) or "", cut["id"], reason, detail)


def _raise_rejected(rejected: RejectedUtterance) -> None:
    raise ExtractError(f"cut {rejected.cut_id!r}: {rejected.reason}, {rejected.detail}")

"""Encoder outputs of the utterances of a corpus, each at its own length.

This module iterates over a corpus in batches, longest utterance first. `encode_audio` computes the features of single
files and arrays, `extract` writes features to files, and `probe` fits the linear probe. The features of an utterance do
not depend on the other utterances of its batch, except for rounding. Each utterance is either yielded or reported with
a reason.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from nestdata import AudioError, AudioInputs, Corpus
from nestmodel.errors import ConfigError, ExtractError
from nestmodel.evaluate.inputs import audio_path, check_rate, open_inputs
from nestmodel.evaluate.rejects import RejectedUtterance, RejectLog
from nestmodel.nn.network import NestNetwork
from nestmodel.out_of_memory import is_out_of_memory

Layers = Literal["all", "last"] | Sequence[int]
"""Outputs of an encoder by number: 0 is the input of the first block, i the output of the i-th block."""

OnReject = Callable[[RejectedUtterance], None]

BatchFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps padded audio, shape (batch, samples), and its valid lengths to features, shape (layers, batch, frames, dim), and
their valid lengths."""


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


class FeatureProblem(NamedTuple):
    """Why an utterance has no features."""

    reason: str
    """One word, for counting."""

    detail: str
    """What was wrong, with the values that were found."""


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
    settings = layer_function(model, layers), max_batch_seconds, device, rows, on_reject
    if isinstance(inputs, Corpus):
        check_rate(inputs, model.config.features.sampling_rate)
        return _iterate_corpus(model, inputs, *settings)
    if rows is not None:
        raise ConfigError("rows are indices of a Corpus: open one with Corpus.open, or leave them out.")
    return _iterate_prepared(model, inputs, *settings)


def iterate_log_mels(
    model: NestNetwork,
    corpus: Corpus,
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    on_reject: OnReject | None = None,
) -> Iterator[Utterance]:
    """Yields log-mel frames before normalisation as one layer, shape (1, frames, mels).

    The arguments and errors are those of `iterate_features`.
    """

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        mels, feat_lens = log_mels(model, audio, audio_lens)
        return mels.transpose(1, 2).unsqueeze(0), feat_lens

    return _iterate_corpus(model, corpus, compute, max_batch_seconds, device, rows, on_reject)


def iterate_stacked_mels(
    model: NestNetwork,
    corpus: Corpus,
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    on_reject: OnReject | None = None,
) -> Iterator[Utterance]:
    """Yields the encoder's input as one layer at its frame rate, shape (1, enc_frames, subsampling_factor * mels).

    The log-mel frames are normalised as set, as the encoder reads them. Those of one encoder frame are stacked;
    frames past the end of an utterance are zero. The arguments and errors are those of `iterate_features`.
    """
    factor = model.config.encoder.subsampling_factor

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        feats, feat_lens = model.features(audio, audio_lens)
        stacked = feats.transpose(1, 2).unflatten(1, (-1, factor)).flatten(2)  # (batch, enc_frames, factor * mels)
        return stacked.unsqueeze(0), model.encoder.pre_encode.token_lens(feat_lens)

    return _iterate_corpus(model, corpus, compute, max_batch_seconds, device, rows, on_reject)


def layer_function(model: NestNetwork, layers: Layers) -> BatchFunction:
    """Returns the function that computes outputs of an encoder.

    Raises:
        ConfigError: The layers do not exist.
    """
    selected = resolve_layers(layers, model.config.encoder.num_layers)

    def encode(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        feats, feat_lens = model.features(audio, audio_lens)
        states, _ = model.encoder.hidden_states(feats, feat_lens)
        # With a causal subsampling, an utterance may have one encoder frame more than labels, units and stacked
        # log-mels. The last one is cut off, so that frame t is paired with its label as in training.
        return torch.stack([states[layer] for layer in selected]), model.encoder.pre_encode.token_lens(feat_lens)

    return encode


def log_mels(
    model: NestNetwork, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
    """Returns the log-mel energies of audio, as a model computes them before normalisation, and their valid lengths.

    Dither is added if the model is in training mode. The values of frames past the valid length are undefined.
    """
    return model.features.log_mels(audio, audio_lens)


def parse_layers(text: str) -> Layers:
    """Parses `all`, `last`, or layer numbers separated by commas.

    Raises:
        ConfigError: The text is none of these.
    """
    if text == "all":
        return "all"
    if text == "last":
        return "last"
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"layers is {text!r}: give all, last, or numbers such as 0,4,16.") from None


def resolve_layers(layers: Layers, num_layers: int) -> list[int]:
    """Returns the numbers of the selected outputs of an encoder with `num_layers` blocks.

    Raises:
        ConfigError: A layer does not exist or is given twice, or no layer is given.
    """
    if layers == "all":
        return list(range(num_layers + 1))
    if layers == "last":
        return [num_layers]
    selected = [layer for layer in layers if isinstance(layer, int)]
    if not selected or len(set(selected)) < len(layers) or not all(0 <= layer <= num_layers for layer in selected):
        raise ConfigError(
            f"layers is {','.join(map(str, layers))!r}: give each layer once, from 0 (the input of the first "
            f"block) to {num_layers} (the output of the last block)."
        )
    return selected


def resolve_device(name: str) -> torch.device:
    """Returns the device with a name; `auto` is a GPU if there is one, the CPU otherwise.

    Raises:
        ConfigError: This machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device is {name!r}: this machine has no such device. Give cpu, cuda or auto.") from error
    return device


def frame_rate_hz(model: NestNetwork) -> float:
    """Returns the number of encoder frames per second of audio."""
    features = model.config.features
    return features.sampling_rate / (features.hop_length * model.config.encoder.subsampling_factor)


def check_batch_seconds(max_batch_seconds: float) -> None:
    """Raises ConfigError unless the limit is positive."""
    if not max_batch_seconds > 0:
        raise ConfigError(f"max_batch_seconds is {max_batch_seconds:g}: give a positive number of seconds.")


def _iterate_prepared(
    model: NestNetwork,
    inputs: AudioInputs,
    compute: BatchFunction,
    max_batch_seconds: float,
    device_name: str,
    rows: Sequence[int] | None,
    on_reject: OnReject | None,
) -> Iterator[Utterance]:
    """Does the work of `_iterate_corpus` for inputs that are prepared into a temporary corpus."""
    reject = on_reject or _raise_rejected
    with TemporaryDirectory() as name, RejectLog(Path(name)) as rejects:
        with open_inputs(inputs, model.config.features.sampling_rate, Path(name), rejects) as corpus:
            for line in (corpus.path / "rejected.jsonl").read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                reject(RejectedUtterance(*(fields[field] for field in RejectedUtterance._fields)))
            yield from _iterate_corpus(model, corpus, compute, max_batch_seconds, device_name, rows, on_reject)


def _iterate_corpus(
    model: NestNetwork,
    corpus: Corpus,
    compute: BatchFunction,
    max_batch_seconds: float,
    device_name: str,
    rows: Sequence[int] | None,
    on_reject: OnReject | None,
) -> Iterator[Utterance]:
    device = resolve_device(device_name)
    check_batch_seconds(max_batch_seconds)
    reject = on_reject or _raise_rejected
    rate = corpus.sampling_rate
    with in_eval_mode(model, device):
        for batch in _batches(corpus, range(len(corpus)) if rows is None else rows, int(max_batch_seconds * rate)):
            loaded = [(row, samples) for row in batch if (samples := _load(corpus, row, reject)) is not None]
            lines = [corpus.line(row) for row, _ in loaded]
            found = compute_batch([samples for _, samples in loaded], rate, compute, device) if loaded else ()
            for (row, _), line, values in zip(loaded, lines, found, strict=True):
                if isinstance(values, FeatureProblem):
                    reject(_rejected(line, *values))
                else:
                    yield Utterance(row, line, values)


@contextmanager
def in_eval_mode(model: NestNetwork, device: torch.device) -> Iterator[None]:
    """Moves a model to a device, and switches it to eval mode inside the block."""
    was_training = model.training
    model.eval().to(device)
    try:
        yield
    finally:
        model.train(was_training)


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


def compute_batch(
    utterances: list[NDArray[np.float32]], sampling_rate: int, compute: BatchFunction, device: torch.device
) -> "Iterator[NDArray[np.float32] | FeatureProblem]":
    """Yields the features of each utterance of a batch, shape (layers, frames, dim), or why it has none.

    Args:
        utterances: Audio of each utterance, the longest one first.
        sampling_rate: Sampling rate in Hz, for messages.
        compute: Computes the features.
        device: Device of the audio.

    Raises:
        ExtractError: The batch does not fit into memory, and has several utterances.
    """
    audio = np.zeros((len(utterances), len(utterances[0])), np.float32)
    for i, samples in enumerate(utterances):
        audio[i, : len(samples)] = samples
    audio_lens = torch.tensor([len(samples) for samples in utterances])
    try:
        with torch.no_grad():
            features, num_frames = compute(torch.from_numpy(audio).to(device), audio_lens.to(device))
            values, lens = features.cpu().numpy(), num_frames.tolist()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        seconds = audio.size / sampling_rate
        if len(utterances) > 1:
            raise ExtractError(
                f"a batch of {len(utterances)} utterances, {seconds:.0f} s with padding, does not fit into memory. "
                "Lower --max-batch-seconds."
            ) from error
        detail = f"{seconds:.0f} s of audio do not fit into memory: use a corpus prepared with --window-seconds"
        yield FeatureProblem("out_of_memory", detail)
        return
    for i, samples in enumerate(utterances):
        valid = values[:, i, : lens[i]]
        if not lens[i]:
            detail = f"{len(samples)} samples at {sampling_rate} Hz are less than one encoder frame"
            yield FeatureProblem("too_short", detail)
        elif not np.isfinite(valid).all():
            detail = "its features contain NaN or Inf: check the audio and the weights of the model"
            yield FeatureProblem("not_finite", detail)
        else:
            yield valid


def _rejected(cut: dict[str, Any], reason: str, detail: str) -> RejectedUtterance:
    return RejectedUtterance(audio_path(cut) or "", cut["id"], reason, detail)


def _raise_rejected(rejected: RejectedUtterance) -> None:
    raise ExtractError(f"cut {rejected.cut_id!r}: {rejected.reason}, {rejected.detail}")

"""Encoder features of corpora, of single files and of arrays.

A corpus is read in batches, longest utterance first. The features of an utterance do not depend on the other utterances
of its batch, except for rounding. Each utterance is either yielded or reported with a reason.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from nestdata import AudioError, AudioInputs, Corpus, load_audio
from nestmodel.errors import ConfigError, ExtractError, is_out_of_memory
from nestmodel.evaluate.evaluation_config import Layers, check_batch_seconds, check_window
from nestmodel.evaluate.inputs import RejectedUtterance, check_rate, open_inputs, reject_cut
from nestmodel.evaluate.windows import check_memory, longest_whole_s, needed_bytes, states_in_windows
from nestmodel.formats.weights import load_network
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.nn.encoder_base import check_output, naming_encoder
from nestmodel.nn.network import NestNetwork

Model = NestNetwork | str | Path
"""A network, or a file that `load_network` reads."""

BatchFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps padded audio, shape (batch, samples), and its valid lengths to features, shape (layers, batch, frames, dim), and
their valid lengths."""

OnReject = Callable[[RejectedUtterance], None]

Audio = str | Path | NDArray[Any] | Tensor


class Utterance(NamedTuple):
    """The features of one utterance."""

    row: int
    """Index of the utterance in the corpus."""

    line: dict[str, Any]
    """The cut, as in `cuts.jsonl`."""

    values: NDArray[np.float32]
    """Valid frames only, shape (layers, enc_frames, dim); the layers are in the requested order."""


@dataclass(frozen=True, slots=True, eq=False)
class AudioFeatures:
    """Encoder features of one piece of audio, on the CPU."""

    values: Float[Tensor, "*layers enc_frames dim"]
    """Valid frames: (enc_frames, dim) for one layer, (layers, enc_frames, dim) for several."""

    frame_rate_hz: float
    """Number of encoder frames per second."""


def encode(
    model: Model,
    audio: Audio,
    *,
    sampling_rate: int | None = None,
    layers: Layers = "last",
    window_seconds: float | None = None,
) -> AudioFeatures:
    """Computes the encoder features of an audio file or an array.

    On the same device, `nestmodel features` writes the same values for the file, bit for bit. For a corpus, use
    `iterate_features`, which computes in batches.

    Args:
        model: A network, whose encoder is used in eval mode and on its device; or the path of a file that
            `load_network` reads, which is loaded anew by each call, to a GPU if there is one.
        audio: Path or URL of a file of any sampling rate, whose first channel is read; or samples of shape
            (num_samples,): float32 or float64, usually in [-1, 1], or int16.
        sampling_rate: Rate of an array in Hz; it is resampled to the rate of the model. The rate of a file is in its
            header.
        layers: Numbers of the encoder outputs to return, `last` or `all`; see `iterate_features`.
        window_seconds: Longer audio is encoded in windows of this length; see `ExtractConfig`.

    Raises:
        ConfigError: The layers do not exist, or an array has another shape or type, or no rate.
        WeightsError: The file at the path does not hold a whole model.
        AudioError: The audio cannot be used.
        ExtractError: The audio is shorter than one encoder frame, or does not fit into memory.
        StorageError: A store cannot be read.
    """
    if isinstance(model, str | Path):
        model = load_network(model).to(resolve_device("auto"))
    compute = layer_function(model, layers, window_seconds)
    source = audio.detach().cpu().numpy() if isinstance(audio, Tensor) else audio
    rate, device = model.config.features.sampling_rate, next(model.parameters()).device
    samples = load_audio(source, rate, source_rate=sampling_rate)
    with in_eval_mode(model, device):
        (found,) = _compute_batch([samples], rate, compute, device)
    if isinstance(found, tuple):
        name = str(audio) if isinstance(audio, str | Path) else "the array"
        raise ExtractError(f"{name}: {', '.join(found)}")
    return AudioFeatures(torch.from_numpy(found[0] if len(found) == 1 else found), frame_rate_hz(model))


def iterate_features(
    model: Model,
    inputs: AudioInputs,
    layers: Layers = "all",
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    window_seconds: float | None = None,
    on_reject: OnReject | None = None,
) -> Iterator[Utterance]:
    """Yields the encoder features of utterances, longest utterance first.

    Args:
        model: A network, whose encoder is used in eval mode and moved to the device; or the path of one.
        inputs: A `Corpus` at the sampling rate of the model; or anything else that `prepare_corpus` accepts, such as a
            file, a folder, a manifest or a `CutSet`, which is prepared into a temporary corpus.
        layers: Numbers of the encoder outputs to return; see `Layers`.
        max_batch_seconds: Seconds of audio in a batch, padding included. A longer utterance is a batch by itself.
        device: A device of PyTorch, such as `cpu`; `auto` is a GPU if there is one, the CPU otherwise.
        rows: Indices of utterances in a `Corpus`; None for all.
        window_seconds: Longer utterances are encoded in windows of this length; see `ExtractConfig`.
        on_reject: Called for each utterance without features. If None, such an utterance raises an error.

    Raises:
        ConfigError: The layers or the device do not exist; the corpus has another sampling rate than the model; or rows
            are given without a `Corpus`.
        NestError: The model or an input cannot be read, or none of its audio can be used.
        ExtractError: A batch does not fit into memory; or an utterance has no features and `on_reject` is None.
    """
    model = as_network(model)
    compute = layer_function(model, layers, window_seconds)
    if rows is not None and not isinstance(inputs, Corpus):
        raise ConfigError("rows are indices of a Corpus: open one with Corpus.open, or leave them out.")
    on_reject = on_reject or _raise_rejected
    if isinstance(inputs, Corpus):
        check_rate(inputs, model.config.features.sampling_rate)
        return iterate_corpus(model, inputs, compute, max_batch_seconds, device, rows=rows, on_reject=on_reject)
    return _iterate_inputs(model, inputs, compute, max_batch_seconds, device, on_reject)


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

    The corpus has the sampling rate of the model. Takes the other arguments of `iterate_features`, and
    raises the same errors.
    """
    torch_device = resolve_device(device)
    check_batch_seconds(max_batch_seconds)
    reject = on_reject or _raise_rejected
    with in_eval_mode(model, torch_device):
        for batch in batches_of(corpus, max_batch_seconds, rows):
            yield from encode_batch(corpus, batch, compute, torch_device, reject)


def batches_of(corpus: Corpus, max_batch_seconds: float, rows: Sequence[int] | None = None) -> Iterator[list[int]]:
    """Yields batches of utterance indices, longest first; each has at most `max_batch_seconds` after padding.

    Args:
        corpus: The corpus.
        max_batch_seconds: Seconds of audio in a batch. A longer utterance is a batch by itself.
        rows: Indices of utterances; None for all.
    """
    max_samples = int(max_batch_seconds * corpus.sampling_rate)
    batch: list[int] = []
    # A corpus is sorted by length.
    for row in reversed(range(len(corpus))) if rows is None else sorted(rows, reverse=True):
        if batch and (len(batch) + 1) * corpus.num_samples_of(batch[0]) > max_samples:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def encode_batch(
    corpus: Corpus, batch: Sequence[int], compute: BatchFunction, device: torch.device, reject: OnReject
) -> Iterator[Utterance]:
    """Yields the features of the utterances of one batch, the longest of which comes first.

    Args:
        corpus: The corpus, at the sampling rate of the model.
        batch: Indices of utterances.
        compute: Computes the features.
        device: Device of the audio.
        reject: Called for each utterance without features.

    Raises:
        ExtractError: The batch does not fit into memory.
    """
    loaded = [(row, samples) for row in batch if (samples := _load(corpus, row, reject)) is not None]
    if not loaded:
        return
    found = _compute_batch([samples for _, samples in loaded], corpus.sampling_rate, compute, device)
    for (row, _), values in zip(loaded, found, strict=True):
        line = corpus.line(row)
        if isinstance(values, tuple):
            reject(reject_cut(line, *values))
        else:
            yield Utterance(row, line, values)


def as_network(model: Model) -> NestNetwork:
    """Returns a network as it is; loads it if a path is given.

    Raises:
        WeightsError: The file at the path does not hold a whole model.
    """
    return load_network(model) if isinstance(model, str | Path) else model


def layer_function(model: NestNetwork, layers: Layers, window_seconds: float | None = None) -> BatchFunction:
    """Returns the function that computes outputs of an encoder.

    It raises MemoryError for a batch that would not fit into memory.

    Args:
        model: The network.
        layers: As for `iterate_features`.
        window_seconds: As in `ExtractConfig`.

    Raises:
        ConfigError: A layer does not exist.
    """
    selected = resolve_layers(layers, model.encoder.num_layers)
    check_window(window_seconds)
    if window_seconds is None and not isinstance(model.encoder, ConformerEncoder):
        return _own_layer_function(model, selected)
    encoder, rate = model.conformer, model.config.features.sampling_rate
    longest_s = longest_whole_s(model.config) if window_seconds is None else window_seconds

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        seconds = audio.shape[1] / rate
        check_memory(needed_bytes(model.config, len(audio), seconds, longest_s), audio.device)
        if seconds > longest_s:
            lens = encoder.pre_encode.token_lens(audio_lens // model.config.features.hop_length)
            return _in_windows(model, audio, audio_lens.tolist(), selected, longest_s), lens
        feats, feat_lens = model.features(audio, audio_lens)
        states, _ = encoder.hidden_states(feats, feat_lens)
        # With a causal subsampling, an utterance may have one encoder frame more than labels and stacked log-mels. The
        # last one is cut off, so that frame t is paired with its label as in training.
        return torch.stack([states[layer] for layer in selected]), encoder.pre_encode.token_lens(feat_lens)

    return compute


def _own_layer_function(model: NestNetwork, layers: list[int]) -> BatchFunction:
    """Returns the function that computes outputs of an encoder of another author, always of whole utterances."""
    encoder = model.encoder

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        feats, feat_lens = model.read_features(audio, audio_lens)
        with naming_encoder(encoder, "hidden_states", feats):
            states, lens = encoder.hidden_states(feats, feat_lens)
        if len(states) != encoder.num_layers + 1:
            raise ConfigError(
                f"{type(encoder).__name__}.hidden_states returns {len(states)} outputs: expected num_layers + 1, "
                f"{encoder.num_layers + 1}."
            )
        _, lens = check_output(encoder, (states[-1], lens), feat_lens, feats.shape[-1])
        return torch.stack([states[layer] for layer in layers]), lens

    return compute


def _in_windows(
    model: NestNetwork, audio: Tensor, num_samples: Sequence[int], layers: list[int], window_s: float
) -> Tensor:
    """Returns outputs of the encoder for a batch, one utterance after the other, with zeros behind the shorter ones."""
    utterances = zip(audio.split(1), num_samples, strict=True)
    states = [states_in_windows(model, each[:, :length], layers, window_s) for each, length in utterances]
    longest = max(each.shape[2] for each in states)
    return torch.cat([F.pad(each, (0, 0, 0, longest - each.shape[2])) for each in states], dim=1)


def log_mel_function(model: NestNetwork) -> BatchFunction:
    """Returns the function that computes log-mel frames before normalisation, as one layer of shape (frames, mels).

    Dither is added if the model is in training mode. The values of frames past the valid length are undefined.
    """

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        mels, feat_lens = model.features.log_mels(audio, audio_lens)
        return mels.transpose(1, 2).unsqueeze(0), feat_lens

    return compute


def stacked_mel_function(model: NestNetwork) -> BatchFunction:
    """Returns the function that computes the encoder's input at its frame rate, as one layer.

    The log-mel frames are normalised as set, as the encoder reads them. The frames of one encoder frame are stacked:
    the layer has the shape (enc_frames, stacked * mels). Frames past the end of an utterance are zero.
    """
    factor = model.frame_samples // model.config.features.hop_length

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        feats, feat_lens = model.features(audio, audio_lens)
        stacked = feats.transpose(1, 2).unflatten(1, (-1, factor)).flatten(2)  # (batch, enc_frames, factor * mels)
        return stacked.unsqueeze(0), (feat_lens + factor - 1) // factor

    return compute


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
    if num_layers == 0 and layers != [0] and layers != (0,):
        raise ConfigError(f"layers is {','.join(map(str, layers))!r}: the encoder has one output. Leave it out.")
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


def device_of_rank(name: str, local_rank: int) -> str:
    """Returns the name of the device of one of several ranks on a machine.

    `auto` and `cuda` give each rank a GPU of its own if there are enough. A launcher may show each rank only its own.
    """
    if name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def frame_rate_hz(model: NestNetwork) -> float:
    """Returns the number of encoder frames per second of audio."""
    features = model.config.features
    return features.sampling_rate / model.frame_samples


def _iterate_inputs(
    model: NestNetwork,
    inputs: AudioInputs,
    compute: BatchFunction,
    max_batch_seconds: float,
    device: str,
    on_reject: OnReject,
) -> Iterator[Utterance]:
    """Does the work of `iterate_corpus` for inputs that are prepared into a temporary corpus."""
    rate = model.config.features.sampling_rate
    with TemporaryDirectory() as name, open_inputs(inputs, rate, Path(name), on_reject) as corpus:
        yield from iterate_corpus(model, corpus, compute, max_batch_seconds, device, on_reject=on_reject)


def _load(corpus: Corpus, row: int, reject: OnReject) -> NDArray[np.float32] | None:
    try:
        return corpus.load(row)[1]
    except AudioError as error:
        reject(reject_cut(corpus.line(row), error.reason, str(error)))
        return None


def _compute_batch(
    utterances: list[NDArray[np.float32]], sampling_rate: int, compute: BatchFunction, device: torch.device
) -> Iterator[NDArray[np.float32] | tuple[str, str]]:
    """Yields the features of each utterance of a batch, (layers, frames, dim), or why it has none: reason and details.

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
        detail = f"{seconds:.0f} s of audio do not fit into memory ({error}): lower window_seconds (--window-seconds)"
        yield "out_of_memory", detail
        return
    for i, samples in enumerate(utterances):
        valid = values[:, i, : lens[i]]
        if not lens[i]:
            detail = f"{len(samples)} samples at {sampling_rate} Hz are less than one encoder frame"
            yield "too_short", detail
        elif not np.isfinite(valid).all():
            detail = "its features contain NaN or Inf: check the audio and the weights of the model"
            yield "not_finite", detail
        else:
            yield valid


@contextmanager
def in_eval_mode(model: NestNetwork, device: torch.device) -> Iterator[None]:
    """Moves a model to a device, and switches it to eval mode inside the block."""
    was_training = model.training
    model.eval().to(device)
    try:
        yield
    finally:
        model.train(was_training)


def _raise_rejected(rejected: RejectedUtterance) -> None:
    raise ExtractError(f"cut {rejected.cut_id!r}: {rejected.reason}, {rejected.detail}")

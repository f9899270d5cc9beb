"""Features of one batch of audio: which outputs of a network, on which device, and why an utterance has none.

A `BatchFunction` computes one kind of features: layers of the encoder, log-mels, or log-mels stacked to encoder frames.
`encode` applies it to the utterances of a corpus, and `encode_audio` to single files and arrays.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestmodel.attention_context import Context
from nestmodel.errors import ConfigError, ExtractError
from nestmodel.evaluate.features.config import Layers
from nestmodel.nn.network import NestNetwork
from nestmodel.out_of_memory import is_out_of_memory

BatchFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps padded audio, shape (batch, samples), and its valid lengths to features, shape (layers, batch, frames, dim), and
their valid lengths."""


class FeatureProblem(NamedTuple):
    """Why an utterance has no features."""

    reason: str
    """One word, for counting."""

    detail: str
    """What was wrong, with the values that were found."""


def layer_function(model: NestNetwork, layers: Layers, context: Context | None = None) -> BatchFunction:
    """Returns the function that computes outputs of an encoder.

    Args:
        model: The network.
        layers: Which outputs.
        context: Attention context, one of `att_context_size`; by default the first of them.

    Raises:
        ConfigError: The layers or the context do not exist.
    """
    if context is not None:
        model.config.encoder.with_context(context)
    selected = resolve_layers(layers, model.config.encoder.num_layers)

    def encode(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        feats, feat_lens = model.features(audio, audio_lens)
        states, _ = model.encoder.hidden_states(feats, feat_lens, context)
        # With a causal subsampling, an utterance may have one encoder frame more than labels, units and stacked
        # log-mels. The last one is cut off, so that frame t is paired with its label as in training.
        return torch.stack([states[layer] for layer in selected]), model.encoder.pre_encode.token_lens(feat_lens)

    return encode


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

    The log-mel frames are normalised as set, as the encoder reads them. Those of one encoder frame are stacked: the
    layer has the shape (enc_frames, subsampling_factor * mels). Frames past the end of an utterance are zero.
    """
    factor = model.config.encoder.subsampling_factor

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        feats, feat_lens = model.features(audio, audio_lens)
        stacked = feats.transpose(1, 2).unflatten(1, (-1, factor)).flatten(2)  # (batch, enc_frames, factor * mels)
        return stacked.unsqueeze(0), model.encoder.pre_encode.token_lens(feat_lens)

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


@contextmanager
def in_eval_mode(model: NestNetwork, device: torch.device) -> Iterator[None]:
    """Moves a model to a device, and switches it to eval mode inside the block."""
    was_training = model.training
    model.eval().to(device)
    try:
        yield
    finally:
        model.train(was_training)


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

"""Encoding of audio that arrives in parts, to the same frames as for the whole audio.

The modules of the network cache the earlier samples and frames that later ones read (`extend`). Nothing is encoded
twice, and the caches do not grow.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from nestmodel.attention_context import Context, is_streamable
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError, ExtractError
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.subsampling import SubsamplingCache

_MAX_SECONDS = 10.0
"""Longest part of the audio that is encoded at once. Longer parts are divided, so that memory has a limit."""


class StreamingEncoder:
    """Encodes one stream of audio part by part.

    All frames together equal the frames of the whole audio, up to rounding, however it is split. Frames are returned
    once their chunk of right + 1 frames is complete. Each stream needs an object of its own; they share the weights.

    Args:
        model: The network, in eval mode.
        context: Attention context, one of `att_context_size`; by default the first of them that can be streamed.

    Raises:
        ConfigError: The encoder is not causal, its left context is unlimited, or it has no such context.
    """

    def __init__(self, model: NestNetwork, context: Context | None = None) -> None:
        self.context = streaming_context(model.config, context)
        self._model = model
        self._audio_cache = model.features.start()
        self._subsampling_cache: SubsamplingCache | None = None
        device = self._audio_cache.last.device
        self._block_caches = model.conformer.start(1, device)
        self._waiting = torch.zeros(1, 0, model.config.conformer.d_model, device=device)
        """Frames of a chunk that is not complete, after the subsampling."""

        self._is_closed = False

    @property
    def chunk_s(self) -> float:
        """Seconds of audio of a chunk, whose frames are returned together."""
        return (self.context[1] + 1) * self._model.frame_s

    def feed(self, audio: Tensor | NDArray[Any], sampling_rate: int | None = None) -> Float[Tensor, "enc_frames dim"]:
        """Takes the next samples, and returns the encoder frames of the chunks that they complete.

        Args:
            audio: Any number of samples, float32, shape (samples,), amplitude in [-1, 1].
            sampling_rate: Sampling rate of the audio in Hz; checked if it is given.

        Returns:
            The output of the last block, on the device of the network; often no frame.

        Raises:
            ExtractError: The audio has another type, shape or sampling rate, or a sample is not finite; the network is
                in training mode; or the stream is closed. The stream is as before.
        """
        samples = self._checked(audio, sampling_rate)
        max_samples = int(_MAX_SECONDS * self._model.config.features.sampling_rate)
        return torch.cat([self._encode(part) for part in samples.split(max_samples)])

    def close(self) -> Float[Tensor, "enc_frames dim"]:
        """Ends the stream, and returns its last frames, whose chunk may be incomplete.

        Raises:
            ExtractError: The stream is closed already, or the network is in training mode.
        """
        nothing = self._checked(np.zeros(0, np.float32), None)
        self._is_closed = True
        return self._encode(nothing, is_last=self._audio_cache.num_samples > 0)

    @torch.inference_mode()
    def _encode(self, samples: Float[Tensor, " samples"], *, is_last: bool = False) -> Float[Tensor, "enc_frames dim"]:
        encoder, chunk = self._model.conformer, self.context[1] + 1
        feats, self._audio_cache = self._model.features.extend(samples.unsqueeze(0), self._audio_cache, is_last=is_last)
        new, self._subsampling_cache = encoder.pre_encode.extend(feats, self._subsampling_cache, is_last=is_last)
        waiting = torch.cat([self._waiting, new], dim=1)
        num_ready = waiting.shape[1] if is_last else waiting.shape[1] // chunk * chunk
        self._waiting = waiting[:, num_ready:].clone()
        ready = waiting[:, :num_ready]
        if num_ready > 0:
            ready, self._block_caches = encoder.extend(ready, self._block_caches, self.context)
        return ready[0]

    def _checked(self, audio: Tensor | NDArray[Any], sampling_rate: int | None) -> Float[Tensor, " samples"]:
        """Returns audio as a tensor on the device of the network."""
        expected_rate = self._model.config.features.sampling_rate
        if self._is_closed:
            raise ExtractError("The stream is closed. Create a StreamingEncoder for each stream.")
        if self._model.training:
            raise ExtractError("The network is in training mode, with dropout: call its method eval() first.")
        if sampling_rate is not None and sampling_rate != expected_rate:
            raise ExtractError(
                f"The audio has {sampling_rate} Hz, and the model {expected_rate} Hz: resample it first."
            )
        # An array from a sound card may be read-only or reversed, which torch rejects.
        samples = audio if isinstance(audio, Tensor) else torch.from_numpy(np.array(audio))
        if samples.dtype != torch.float32 or samples.ndim != 1:
            found = f"{str(samples.dtype).removeprefix('torch.')} with the shape {tuple(samples.shape)}"
            raise ExtractError(
                f"The audio is {found}: give float32 with the shape (samples,) and amplitudes in [-1, 1], such as "
                "16-bit samples divided by 32768."
            )
        if not samples.isfinite().all():
            raise ExtractError("The audio contains samples that are infinite or not a number; none of it was encoded.")
        return samples.to(self._audio_cache.last.device)


def streaming_context(config: NestConfig, context: Context | None = None) -> Context:
    """Returns the attention context with which an encoder can be streamed.

    Args:
        config: Configuration of the network.
        context: One of `att_context_size`; by default the first of them that can be streamed.

    Raises:
        ConfigError: No such context exists, or another setting needs audio that has not arrived.
    """
    encoder = config.conformer if context is None else config.conformer.with_context(context)
    if config.features.normalize != "NA":
        raise ConfigError(
            f"model.config.features.normalize is {config.features.normalize}, which needs the whole utterance: only an "
            "encoder that was trained with NA can be streamed."
        )
    if encoder.conv_context[1] > 0:
        raise ConfigError(
            f"model.config.encoder.conv_context_size makes each block read {encoder.conv_context[1]} frames to the "
            "right: only an encoder that was trained with `causal` can be streamed."
        )
    for candidate in encoder.att_context_size:
        if is_streamable(candidate, encoder.att_context_style):
            return candidate
    raise ConfigError(
        f"model.config.encoder.att_context_size {encoder.att_context_size} cannot be streamed: the left side must be "
        "limited, and the right side must be 0, or limited with att_context_style chunked_limited."
    )

"""Export as ONNX graphs from audio to encoder frames: of whole utterances, and of one chunk of a stream.

The graphs compute features and encoder frames of eval mode, for any batch size. The graph for whole utterances takes
any number of samples, and nothing in it depends on the size of the traced example. The graph for a chunk takes caches
of earlier chunks as inputs, and returns the caches for the next one.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestmodel.attention_context import Context
from nestmodel.config import FeatureConfig, NestConfig
from nestmodel.errors import ConfigError
from nestmodel.nn.block import BlockCache
from nestmodel.nn.features import LogMelFeatures, compute_features
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.streaming import streaming_context
from nestmodel.nn.subsampling import halve

OPSET = 18
INPUTS = ("audio", "audio_lens")
OUTPUTS = ("encoded", "enc_lens")


def samples_in_front(config: FeatureConfig) -> int:
    """Returns how many samples a graph reads before the first one of a frame: half a window, plus one for emphasis."""
    return config.n_fft // 2 - (config.n_fft - config.window_length) // 2 + 1


class _TracedFeatures(nn.Module):
    """Log-mel features by a convolution with the windowed sine and cosine waves of the Fourier transform.

    Every runtime has convolutions. Measured with real speech, the features are as close to features in float64 as
    `LogMelFeatures` are.
    """

    def __init__(self, features: LogMelFeatures) -> None:
        super().__init__()
        self.config = replace(features.config, pad_to=1)
        self.mel_weights, window = features.fb, features.window.double()
        self.in_front = samples_in_front(self.config)
        left = (self.config.n_fft - len(window)) // 2
        impulses = F.pad(torch.diag(window), (left, self.config.n_fft - len(window) - left))
        waves = torch.view_as_real(torch.fft.rfft(impulses)).flatten(1)  # (window, frequencies * 2)
        self.waves = waves.T.unsqueeze(1).float()

    def forward(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Computes (batch, mels, frames) and (batch,) of audio that begins `in_front` samples before the first one."""
        sample = torch.arange(1 - self.in_front, audio.shape[1] - self.in_front)
        emphasised = audio[:, 1:] - self.config.preemphasis * audio[:, :-1]
        emphasised = emphasised.masked_fill(sample >= audio_lens.unsqueeze(1), 0.0)
        spectrum = F.conv1d(emphasised.unsqueeze(1), self.waves, stride=self.config.hop_length)
        feat_lens = torch.div(audio_lens, self.config.hop_length, rounding_mode="floor")
        spectrum = spectrum.transpose(1, 2).unflatten(2, (-1, 2))  # (batch, frames, frequencies, 2)
        return compute_features(self.config, self.mel_weights, spectrum, feat_lens), feat_lens


class _TracedEncoder(nn.Module):
    """The encoder without branches on the size of a batch, which a graph cannot hold.

    Attention branches on whether there is a single encoder frame, so one padded frame is appended and removed at the
    end; in eval mode it does not affect valid frames. The subsampling processes the whole batch at once, while
    `ConvSubsampling.forward` splits large batches.
    """

    def __init__(self, network: NestNetwork) -> None:
        super().__init__()
        self.features, self.encoder = _TracedFeatures(network.features), network.conformer
        config, in_front = network.config.features, self.features.in_front
        behind = config.window_length + 1 - in_front + (self.encoder.pre_encode.factor - 1) * config.hop_length
        self.padding = in_front, behind

    def forward(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes (batch, samples) and (batch,) as (batch, enc_frames, dim) and (batch,)."""
        subsampling = self.encoder.pre_encode
        feats, feat_lens = self.features(F.pad(audio, self.padding), audio_lens)
        enc_lens = subsampling.out_lens(feat_lens)
        subsampled = subsampling.out(subsampling.convolve(feats, feat_lens))
        return self.encoder.encode(subsampled, enc_lens)[:, :-1], enc_lens


class _TracedChunk(nn.Module):
    """One chunk of a stream. The caches have fixed sizes, so frames before the start of the stream are empty."""

    def __init__(self, network: NestNetwork, context: Context) -> None:
        super().__init__()
        self.features, self.encoder = _TracedFeatures(network.features), network.conformer
        self.context = context
        self.left, self.chunk = context[0], context[1] + 1

    def start(self, batch: int, num_mels: int) -> dict[str, Tensor]:
        """Returns the caches before the first chunk, by the names of the inputs."""
        config = self.encoder.config
        blocks = self.encoder.start(batch, torch.device("cpu"), self.left)
        caches = {
            "cache_len": torch.zeros(batch, dtype=torch.int64),
            "cache_attention": torch.stack([block.attention for block in blocks]),
            "cache_convolution": torch.stack([block.convolution for block in blocks]),
        }
        channels = 1
        for stage in range(config.subsampling_factor.bit_length() - 1):
            caches[f"cache_subsampling_{stage}"] = torch.zeros(batch, channels, 2, num_mels)
            channels, num_mels = config.subsampling_channels, halve(num_mels, is_causal=True)
        return caches

    def forward(
        self,
        audio: Tensor,
        audio_lens: Tensor,
        cache_len: Tensor,
        attention: Tensor,
        convolution: Tensor,
        *subsampling: Tensor,
    ) -> tuple[Tensor, ...]:
        """Encodes the samples of a chunk as (batch, chunk, dim), and returns the caches in the same order."""
        feats, feat_lens = self.features(audio, audio_lens)
        feat_lens = feat_lens.clamp(max=feats.shape[2])
        x, stages = self.encoder.pre_encode.extend(feats, subsampling, feat_lens=feat_lens)
        enc_lens = self.encoder.pre_encode.out_lens(feat_lens).clamp(0, self.chunk)
        keys = torch.arange(self.left + self.chunk)
        is_empty = (keys < (self.left - cache_len).unsqueeze(1)) | (keys >= (self.left + enc_lens).unsqueeze(1))
        caches = [BlockCache(*pair) for pair in zip(attention.unbind(), convolution.unbind(), strict=True)]
        x, caches = self.encoder.extend(x, caches, self.context, is_empty)
        attention = torch.stack([cache.attention for cache in caches])
        convolution = torch.stack([cache.convolution for cache in caches])
        return x, enc_lens, (cache_len + self.chunk).clamp(max=self.left), attention, convolution, *stages


def write_onnx_chunk(path: Path, network: NestNetwork) -> None:
    """Writes features and encoder as a graph of one chunk of a stream, which has right + 1 encoder frames.

    The inputs are `audio`, float32 (batch, samples), of which `samples_in_front` are before the chunk, zeros at first;
    `audio_lens`, int64 (batch,), the number of samples from the start of the chunk to the end of the stream, possibly
    negative; and the cache of earlier chunks, zeros before the first one: `cache_len`, int64 (batch,), and
    `cache_attention`, `cache_convolution`, `cache_subsampling_0`, ..., float32. The outputs are `encoded`, float32
    (batch, chunk, dim); `enc_lens`, int64 (batch,), which is less than a chunk at the end of a stream; and
    `new_cache_len` and so on, the cache for the next chunk.

    Args:
        path: The file to write.
        network: A network on the CPU with one attention context. Its encoder is switched to eval mode.

    Raises:
        ConfigError: The encoder cannot be streamed, its subsampling is not causal, or the `export` extra is not
            installed.
        OSError: The file cannot be written.
    """
    config = network.config
    context = streaming_context(config)
    if not config.conformer.causal_downsampling:
        raise ConfigError(
            "model.config.encoder.causal_downsampling is off: a chunk of the graph would need frames of the next one. "
            "StreamingEncoder streams such an encoder."
        )
    traced = _TracedChunk(network, context)
    num_feats, features = traced.chunk * config.conformer.subsampling_factor, config.features
    num_samples = (num_feats - 1) * features.hop_length + features.window_length + 1
    caches = traced.start(2, features.num_mels)
    batch_axis = {"cache_attention": 2, "cache_convolution": 1}
    shapes = tuple({batch_axis.get(name, 0): "batch"} for name in (*INPUTS, *caches))
    _export(
        path,
        config,
        traced,
        (torch.zeros(2, num_samples), torch.tensor([num_samples, num_samples - 1]), *caches.values()),
        (*INPUTS, *caches),
        (*OUTPUTS, *(f"new_{name}" for name in caches)),
        (*shapes[:5], shapes[5:]),
    )


def write_onnx(path: Path, network: NestNetwork) -> None:
    """Writes features and encoder as a graph from audio to encoder frames.

    The inputs are `audio`, float32 (batch, samples), amplitudes in [-1, 1], and `audio_lens`, int64 (batch,). The
    outputs are `encoded`, float32 (batch, enc_frames, dim), whose padded frames are meaningless, and `enc_lens`, int64
    (batch,). The configuration is stored as JSON in the metadata of the graph. More than 2 GB of weights are written to
    `<name>.data` beside the file.

    Args:
        path: The file to write.
        network: A network on the CPU. Its encoder is switched to eval mode.

    Raises:
        ConfigError: The `export` extra is not installed.
        OSError: The file cannot be written.
    """
    example = torch.zeros(2, 16000), torch.tensor([16000, 15000])
    shapes = {0: "batch", 1: "samples"}, {0: "batch"}
    _export(path, network.config, _TracedEncoder(network), example, INPUTS, OUTPUTS, shapes)


def _export(
    path: Path,
    config: NestConfig,
    traced: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: tuple[Any, ...],
) -> None:
    try:
        import onnx  # noqa: F401 - torch imports it late, with a less helpful error
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}. Install it: pip install 'nest-pretrain[export]'.") from error
    with _without_warnings(), torch.no_grad():
        program = torch.onnx.export(
            traced.eval(),
            example,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props["nest_config"] = json.dumps(asdict(config))
    program.save(path)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses the exporter's warnings about other packages and about its own deprecated types."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

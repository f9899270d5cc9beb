"""Throughput of training, utilisation of the device, and the share of time spent waiting for data.

Model FLOPs utilisation (MFU) is the counted operations of the encoder over what the device could compute in that time.
Source of the term: PaLM, arXiv:2204.02311, appendix B. Recomputed activations are not counted.
"""

import re
import time
from functools import lru_cache
from typing import Any, cast

import pytorch_lightning as pl
import torch

from nestdata import RemoteStats
from nestmodel.config import EncoderConfig
from nestmodel.nn.network_input import NetworkInput
from nestmodel.nn.subsampling import halve
from nestmodel.training.module import NestModel
from nestmodel.training.run_state import peak_memory_bytes
from nestmodel.training.step_limits import ends_step

PEAK_16_BIT_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A40": 150,
    "A10": 125,
}
"""Dense operations a second in bfloat16 or float16, in 10^12, by words of the name that torch reports; the first match
counts. Source: NVIDIA's data sheets, whose figures with sparsity are halved."""


def peak_of_run(gpu: str, precision: str) -> float | None:
    """Returns the operations a second that a GPU could compute in a precision of Lightning; None if unknown.

    Args:
        gpu: Its name, as torch reports it; empty without a GPU.
        precision: Of the trainer.
    """
    if not precision.startswith(("bf16", "16")):
        return None
    return next((peak * 1e12 for name, peak in PEAK_16_BIT_TFLOPS.items() if re.search(rf"\b{name}\b", gpu)), None)


@lru_cache(maxsize=1024)
def encoder_operations(config: EncoderConfig, num_mels: int, num_cuts: int, num_frames: int) -> int:
    """Returns the operations of forward and backward pass: of matrix products and convolutions, two for each product.

    Args:
        config: Settings of the encoder.
        num_mels: Number of mel bins.
        num_cuts: Number of cuts in the microbatch.
        num_frames: Number of feature frames to which each cut is padded.
    """
    channels, dim, is_causal = config.subsampling_channels, config.d_model, config.causal_downsampling
    frames, mels = (halve(size, is_causal=is_causal) for size in (num_frames, num_mels))
    first_stage = subsampling = frames * mels * channels * 9
    for _ in range(config.subsampling_factor.bit_length() - 2):
        frames, mels = (halve(size, is_causal=is_causal) for size in (frames, mels))
        subsampling += frames * mels * channels * (9 + channels)
    subsampling += frames * channels * mels * dim
    feed_forward = 4 * config.ff_expansion * dim**2
    attention = 4 * dim**2 + dim * (2 * frames + 2 * frames - 1)  # projections; content, values; scores by position
    convolution = 3 * dim**2 + config.conv_kernel_size * dim
    block = frames * (feed_forward + attention + convolution)
    positions = config.num_layers * (2 * frames - 1) * dim**2
    products = num_cuts * (subsampling + config.num_layers * block) + positions
    # The backward pass computes gradients of inputs and of weights; features and encodings of positions need none.
    return 2 * (3 * products - num_cuts * first_stage - positions)


class Throughput(pl.Callback):
    """Logs throughput in seconds of audio per second, utilisation, waiting for data, padding, memory and bad audio.

    The audio of this rank is multiplied by the number of ranks, because all ranks have equal work. The share of
    waiting is the largest of all ranks, as far as it is known. The time of validation and checkpoints is excluded.
    """

    def __init__(self) -> None:
        self._remote: RemoteStats | None = None
        self._reset()
        self._batch_ended: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        """Counts the time since the end of the last batch as waiting for data."""
        self._batch_started = time.perf_counter()
        if self._batch_ended is not None:
            self._waiting_s += self._batch_started - self._batch_ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, batch: NetworkInput, batch_idx: int
    ) -> None:
        """Counts a batch, and logs the rates every `log_every_n_steps` steps."""
        self._batch_ended = time.perf_counter()
        self._working_s += self._batch_ended - self._batch_started
        self._samples += batch.num_samples
        self._padded_samples += batch.audio.numel()
        config = cast(NestModel, pl_module).config
        if isinstance(config.encoder, EncoderConfig):
            num_frames, num_mels = config.features.num_padded_frames(batch.audio.shape[1]), config.features.num_mels
            self._operations += encoder_operations(config.encoder, num_mels, len(batch.audio), num_frames)
        self._replaced += len(batch.bad_cuts)
        self._failed_reads += sum(len(mix.bad_noise) for mix in batch.mixes)
        self._white += sum("white noise" in mix.sources for mix in batch.mixes)
        if batch.remote is not None:
            self._remote = batch.remote + (self._remote or RemoteStats())
        is_step = ends_step(trainer, batch_idx)
        every: int = cast(Any, trainer).log_every_n_steps  # exists, but is missing in Lightning's annotations
        if is_step and trainer.global_step % max(1, every) == 0:
            total_s = self._working_s + self._waiting_s
            model = cast(NestModel, pl_module)
            rate = model.config.features.sampling_rate
            gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
            peak = peak_of_run(gpu, str(trainer.precision))
            utilisation = {} if peak is None or not self._operations else {"mfu": self._operations / total_s / peak}
            remote: dict[str, float] = {}  # what reading from object stores has cost this rank
            if (counted := self._remote) is not None:
                remote["remote_wait"], remote["bytes_fetched"] = counted.wait_s, counted.bytes_fetched
                remote["cache_hits"] = counted.cache_hits
            model.log_numbers(
                {
                    "audio_s_per_s": self._samples / rate / total_s * trainer.world_size,
                    **utilisation,
                    "data_wait": max(self._waiting_s / total_s, model.worst_data_wait or 0.0),
                    "padding": 1 - self._samples / self._padded_samples,
                    "memory_gb": peak_memory_bytes(model.device) / 1e9,
                    "cuts_replaced": self._replaced,
                    "noise_failed_reads": self._failed_reads,
                    "noise_white": self._white,
                    **remote,
                }
            )
            self._reset()

    def on_validation_start(self, *_: Any) -> None:
        """Stops the clock."""
        self._batch_ended = None

    def on_save_checkpoint(self, *_: Any) -> None:
        """Stops the clock."""
        self._batch_ended = None

    def _reset(self) -> None:
        self._working_s = self._waiting_s = 0.0
        self._remote = None
        self._operations = 0
        self._samples = self._padded_samples = self._replaced = self._failed_reads = self._white = 0

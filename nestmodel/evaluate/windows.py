"""Encoding of audio of any length: long audio in windows with context on both sides, which bounds the memory.

The memory of attention grows with the square of the length: a quarter of an hour of audio needs 20 GB in `large`. Audio
that is longer than `longest_whole_s` is therefore encoded in windows of that length. The frames of a window that are
nearer than `CONTEXT_S` to its ends are used as context only. Log-mel features, with their mean and deviation, are
computed from the whole audio; the only difference is that a frame attends to its window instead of the whole audio.
Only the log-mels and the states grow with the length, by 0.1 to 1 MB for each second and layer.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from nestmodel.config import NestConfig
from nestmodel.evaluate.evaluation_config import MIN_WINDOW_S
from nestmodel.memory import available_bytes
from nestmodel.nn.features import normalise
from nestmodel.nn.network import NestNetwork

CONTEXT_S = MIN_WINDOW_S / 4
"""Seconds of context on both sides of the frames that a window yields."""

_WHOLE_BYTES = 4 << 30
"""Memory of attention for the longest audio that is encoded as a whole."""

_SCORES = 4
"""Arrays of the size of the attention scores that a block has in memory at once: three on a CPU, and one for safety."""

_PIECE_S = 300.0
"""Seconds of audio whose log-mel frames are computed at once."""


def longest_whole_s(config: NestConfig) -> float:
    """Returns the length of audio, in seconds, up to which it is encoded as a whole: a function of the model alone."""
    num_frames = math.sqrt(_WHOLE_BYTES / (4 * _SCORES * config.conformer.num_heads))
    return max(num_frames * config.frame_s, 4 * CONTEXT_S)


def needed_bytes(config: NestConfig, num_utterances: int, seconds: float, window_s: float) -> int:
    """Estimates the memory in bytes that encoding takes beside the model: attention scores and states.

    Args:
        config: Configuration of the model.
        num_utterances: Utterances in the batch.
        seconds: Their length, with padding.
        window_s: Longer utterances are encoded in windows of this length, one after the other.
    """
    encoder, at_once = config.conformer, num_utterances if seconds <= window_s else 1
    scores = 4 * _SCORES * encoder.num_heads * (min(seconds, window_s) / config.frame_s) ** 2
    states = 4 * 2 * (encoder.num_layers + 1) * seconds / config.frame_s * encoder.d_model
    return int(at_once * scores + num_utterances * states)


def check_memory(needed: int, device: torch.device) -> None:
    """Raises MemoryError if a device has fewer bytes free than are needed."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_bytes()
    if free and needed > free:
        raise MemoryError(f"about {needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB are free")


@torch.no_grad()
def states_in_windows(
    model: NestNetwork, audio: Float[Tensor, "1 samples"], layers: list[int], window_s: float
) -> Float[Tensor, "layers 1 enc_frames dim"]:
    """Returns outputs of the encoder for one utterance without padding, on the CPU.

    Args:
        model: The network, in eval mode.
        audio: All samples.
        layers: Numbers of the outputs, in the order of the result.
        window_s: Length of a window in seconds, of which `CONTEXT_S` on both sides are context.
    """
    features, factor = model.config.features, model.config.conformer.subsampling_factor
    feats = _whole_features(model, audio)
    per_second = features.sampling_rate / features.hop_length / factor
    context = factor * round(CONTEXT_S * per_second)
    step = max(factor * round(window_s * per_second) - 2 * context, context)
    num_frames = feats.shape[-1]
    parts = []
    for begin in range(0, num_frames, step):
        first, end = max(0, begin - context), min(num_frames, begin + step)
        window = feats[:, :, first : min(num_frames, end + context)].to(audio.device)
        states, _ = model.conformer.hidden_states(window, torch.tensor([window.shape[-1]], device=audio.device))
        kept = slice((begin - first) // factor, -((first - end) // factor))
        parts.append(torch.stack([states[layer] for layer in layers])[:, :, kept].cpu())
    return torch.cat(parts, dim=2)


def _whole_features(model: NestNetwork, audio: Float[Tensor, "1 samples"]) -> Float[Tensor, "1 mels frames"]:
    """Returns the features of the whole audio on the CPU, computed in pieces that overlap."""
    config = model.config.features
    num_frames, hop = audio.shape[1] // config.hop_length, config.hop_length
    margin = config.n_fft // hop + 2  # frames that depend on samples beyond the end of their piece
    per_piece = max(1, round(_PIECE_S * config.sampling_rate / hop))
    pieces = []
    for begin in range(0, num_frames, per_piece):
        first, end = max(0, begin - margin), min(num_frames, begin + per_piece)
        piece = audio[:, first * hop : (end + margin) * hop]
        mels, _ = model.features.log_mels(piece, torch.tensor([piece.shape[1]], device=audio.device))
        pieces.append(mels[:, :, begin - first : end - first].cpu())
    mels = torch.cat(pieces, dim=2)
    return normalise(mels, torch.tensor([num_frames])) if config.normalize == "per_feature" else mels

"""Calibration of an encoder with initial weights: the running statistics of its batch norm, from audio.

Initial statistics, mean 0 and variance 1, turn the convolutions of a new encoder down by an order of magnitude, because
their outputs have a far smaller variance. Such an encoder is not a baseline for what was learned.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nestdata import Corpus
from nestmodel.evaluate.encode import OnReject, iterate_corpus, layer_function
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.nn.network import NestNetwork


def calibrate_batch_norm(
    network: NestNetwork,
    corpus: Corpus,
    rows: Sequence[int],
    max_batch_seconds: float,
    device: str,
    *,
    on_reject: OnReject | None = None,
) -> None:
    """Computes the running statistics of batch norm from the valid frames of utterances, without training.

    One pass computes all statistics: as in training, each batch is normalised by its own statistics on its way to the
    next block. Differs from training: padded frames do not count, there is no dropout, noise or masking, and the result
    is the mean over all frames instead of a moving average over steps. The first block's statistics do not depend on
    the batches, except for rounding. An encoder without batch norm is unchanged. In an encoder of another author,
    padded frames count as well.

    Args:
        network: Moved to the device.
        corpus: The corpus, at the sampling rate of the network.
        rows: Indices of the utterances.
        max_batch_seconds: Seconds of audio in a batch, padding included.
        device: A device of PyTorch, or `auto`.
        on_reject: As for `iterate_features`.
    """
    norms = [module for module in network.encoder.modules() if isinstance(module, StepBatchNorm)]
    if not norms:
        return
    encoder = network.encoder
    is_valid = torch.empty(0)  # of the frames of the current batch, one utterance after the other
    sums = {norm: torch.zeros(2, norm.num_features, dtype=torch.float64) for norm in norms}
    num_frames = dict.fromkeys(norms, 0)

    def encode(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal is_valid
        assert isinstance(encoder, ConformerEncoder)
        x, enc_lens = encoder.pre_encode(*network.features(audio, audio_lens))
        is_valid = (torch.arange(x.shape[1], device=x.device) < enc_lens[:, None]).flatten()
        return encoder.encode(x, enc_lens).unsqueeze(0), enc_lens

    def normalise_by_batch(norm: StepBatchNorm, inputs: tuple[Tensor]) -> None:
        frames = inputs[0].transpose(1, -1).flatten(0, -2)  # (batch, features, frames) -> (frames, features)
        valid = (frames[is_valid] if isinstance(encoder, ConformerEncoder) else frames).double()
        of_batch = torch.stack([valid.sum(dim=0), valid.square().sum(dim=0)])
        sums[norm] += of_batch.cpu()
        num_frames[norm] += len(valid)
        _set_statistics(norm, of_batch, len(valid))

    compute = encode if isinstance(encoder, ConformerEncoder) else layer_function(network, "last")
    hooks = [norm.register_forward_pre_hook(normalise_by_batch) for norm in norms]
    try:
        for _ in iterate_corpus(network, corpus, compute, max_batch_seconds, device, rows=rows, on_reject=on_reject):
            pass
    finally:
        for hook in hooks:
            hook.remove()
    for norm in norms:
        if num_frames[norm]:  # an encoder of another author may have one that this pass does not use
            _set_statistics(norm, sums[norm], num_frames[norm])


def _set_statistics(norm: StepBatchNorm, sums: Tensor, num_frames: int) -> None:
    """Sets mean and variance from the sums of values and of squares, shape (2, features)."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, square = sums / num_frames
    norm.running_mean.copy_(mean)
    norm.running_var.copy_((square - mean.square()).clamp(min=0))

"""Counts a training step of NeMo's NEST models on a GPU that does not exist; count_step.py runs it.

The model has NeMo's default settings, and the optimizer is the fused AdamW that ours has. Masks are given instead of
drawn, because a drawn mask has no values here; the draw is the only part that is not counted. Needs
nemo_toolkit[asr] 3.0.0, but not this package, and starts in the root of the repository.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.counts.count_step import CUTS, SCORED_SHARE, SECONDS, by_part, print_counts, recorded
from benchmarks.counts.fake_gpu import Operation, OperationLog, fake_gpu
from benchmarks.peers.nemo_model import PRESETS, build, section

warnings.filterwarnings("ignore")


class _Log(OperationLog):
    """Gives a boolean index a number of rows, which on a GPU depends on its values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            (mask,) = args[1]
            rows = torch.empty(round(SCORED_SHARE * mask.numel()), dtype=torch.int64, device="cuda")
            args = (args[0], [rows] * mask.dim())
        return super().__torch_dispatch__(func, types, args, kwargs)


def main() -> int:
    """Counts the presets that are the arguments, and prints the counts as JSON."""
    print_counts({preset: by_part(step(preset)) for preset in sys.argv[1:]})
    return 0


def step(preset: str) -> list[Operation]:
    """Returns the operations of a training step."""
    config = section(**PRESETS[preset])
    model = build(config)
    with fake_gpu(torch.bfloat16):
        _make_fake(model)
        num_cuts, num_samples = CUTS[preset], round(16000 * SECONDS)
        audio, lens = torch.empty(2, num_cuts, num_samples), torch.empty(num_cuts, dtype=torch.int64)
        log = _Log()
        log.track(model.preprocessor, "features")
        log.track(model.quantizer, "quantizer")
        log.track(model.encoder.pre_encode, "subsampling")
        for layer in model.encoder.layers:
            log.track(layer, "blocks")
        log.track(model.decoder, "head")
        log.track(model.loss, "loss")

        def loss() -> Tensor:
            clean, feat_lens = model.preprocessor(input_signal=audio[0], length=lens)
            noisy, _ = model.preprocessor(input_signal=audio[1], length=lens)
            _, tokens = model.quantizer(input_signal=clean)
            is_masked = torch.empty(num_cuts, 1, noisy.shape[2], dtype=torch.bool)
            masked = torch.where(is_masked, model.mask_processor.mask_embedding.view(1, -1, 1), noisy)
            encoded, enc_lens = model.encoder(audio_signal=masked, length=feat_lens)
            log_probs = model.decoder(encoder_output=encoded)
            masks = is_masked.expand_as(masked).float()
            found: Tensor = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=enc_lens)
            return found

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return recorded(log, loss, torch.optim.AdamW(trained, 1e-4, fused=True).step)


def _make_fake(model: nn.Module) -> None:
    """Replaces all values of a model by fake ones on the GPU."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


if __name__ == "__main__":
    sys.exit(main())

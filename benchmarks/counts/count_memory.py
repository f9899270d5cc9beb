"""Estimates the memory of a training step for each preset, and prints the `max_batch_seconds` that fit a GPU.

    python -m benchmarks run count_memory [--presets medium large xlarge] [--margin 0.2]

No GPU is needed, and nothing is computed: the blocks and the subsampling run forward and backward under bf16 autocast
on tensors of a GPU that does not exist (`fake_gpu.py`), and the bytes of all live tensors are summed. Prints the tables
of docs/gpu.md. Takes a minute on one core.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.counts.count_step import CUTS, SCORED_SHARE, built, empty_keys
from benchmarks.counts.fake_gpu import OperationLog, backward, fake_gpu
from nestmodel import ConformerEncoder, NestConfig, NestNetwork
from nestmodel.nn.gpu.subsampling import MAX_VALUES_ON_GPU
from nestmodel.nn.loss import masked_nll
from nestmodel.nn.network import MultiSoftmaxDecoder

QUICK = ("--presets", "small")
GPUS_GB = (24, 40, 80)
LENGTHS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 240.0)
LIMITS_S = (60.0, 240.0)
"""Longest cut of a corpus; the first is that of the presets, as in NeMo's configuration of NEST."""

SAMPLE_S = 240.0
"""Seconds of audio of the batches that are counted. Activations are proportional to the number of cuts."""

STATE_BYTES = 20
"""Bytes per trained parameter in float32: weight, gradient, two moments of AdamW, and DDP's buckets.

If each rank takes one microbatch of a step, the gradients are views of the buckets, and 16 bytes are enough."""

_ROUND_BYTES = 512  # torch's allocator rounds sizes up to this


@dataclass(frozen=True)
class Activations:
    """Bytes for one second of audio in a batch of cuts of one length."""

    plain: float
    checkpointed: float


@dataclass(frozen=True)
class Demand:
    """Memory of one preset."""

    preset: str
    state_bytes: int
    chunk_bytes: int
    """Peak of the subsampling, which processes at most one chunk of a batch at a time."""
    activations: dict[float, Activations]
    """By length of the cuts in seconds."""

    def budget(self, gpu_gb: float, longest_s: float, margin: float, *, checkpointed: bool) -> int:
        """Returns the largest `max_batch_seconds` that fits, rounded down to 20 s; 0 if nothing fits."""
        free = 1e9 * gpu_gb * (1 - margin) - self.state_bytes - self.chunk_bytes
        most = max(
            each.checkpointed if checkpointed else each.plain
            for length, each in self.activations.items()
            if length <= longest_s
        )
        return max(0, int(free / most) // 20 * 20)


def main() -> int:
    """Counts and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(CUTS), default=list(CUTS))
    parser.add_argument("--margin", type=float, default=0.2, help="share of the memory that stays free")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    demands = [count(preset) for preset in arguments.presets]
    _print_activations(demands)
    _print_budgets(demands, arguments.margin)
    return 0


def count(preset: str, lengths: tuple[float, ...] = LENGTHS_S) -> Demand:
    """Counts the memory of a preset for batches of cuts of several lengths."""
    config = NestConfig.preset(preset)
    with fake_gpu(), built():
        network = NestNetwork(config)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    chunk_s = MAX_VALUES_ON_GPU // (config.encoder.subsampling_channels * config.features.num_mels // 16) / 100
    _, chunk_bytes = _peak_of_subsampling(config, 1, chunk_s)
    activations = {length: _activations(config, length) for length in lengths}
    return Demand(preset, STATE_BYTES * trained, chunk_bytes, activations)


def _activations(config: NestConfig, length_s: float) -> Activations:
    """Returns the bytes for a second of audio. The blocks are equal: networks of one and of two blocks are counted."""
    num_cuts = round(SAMPLE_S / length_s)
    one, two = (_peak_of_blocks(config, num_blocks, num_cuts, length_s) for num_blocks in (1, 2))
    subsampling_kept, _ = _peak_of_subsampling(config, num_cuts, length_s)
    num_more = config.encoder.num_layers - 1
    kept_input = 4 * config.encoder.d_model * num_cuts * _num_frames(length_s) // 8  # float32 after the last norm
    plain = one + num_more * (two - one) + subsampling_kept
    checkpointed = one + num_more * kept_input + subsampling_kept
    return Activations(plain / SAMPLE_S, checkpointed / SAMPLE_S)


def _peak_of_blocks(config: NestConfig, num_blocks: int, num_cuts: int, length_s: float) -> int:
    """Returns the peak of the blocks, the decoder and the loss, without weights and their gradients."""
    num_frames = _num_frames(length_s) // 8
    with fake_gpu(torch.bfloat16):
        encoder = make_encoder(config, num_blocks)
        decoder = MultiSoftmaxDecoder(
            dim=config.encoder.d_model,
            num_classes=config.quantizer.num_classes,
            num_codebooks=config.quantizer.num_codebooks,
        )
        for parameter in (*encoder.parameters(), *decoder.parameters()):
            parameter.grad = torch.empty_like(parameter)
        x = torch.empty(num_cuts, num_frames, config.encoder.d_model, dtype=torch.bfloat16, requires_grad=True)
        rows = torch.empty(round(SCORED_SHARE * num_cuts * num_frames), dtype=torch.int64)
        lens, keys = torch.empty(num_cuts, dtype=torch.int64), empty_keys(num_blocks)

        def loss() -> Tensor:
            logits = decoder.logits(encoder.encode(x, lens, keys).flatten(0, 1)[rows])
            return masked_nll(logits, rows.unsqueeze(1).expand(-1, config.quantizer.num_codebooks))[0]

        with OperationLog(rounding=_ROUND_BYTES) as log:
            backward(loss())
        peak_bytes: int = log.peak_bytes
        return peak_bytes


def _peak_of_subsampling(config: NestConfig, num_cuts: int, length_s: float) -> tuple[int, int]:
    """Returns the bytes that the subsampling keeps for the backward pass, and its peak."""
    with fake_gpu(torch.bfloat16):
        encoder = make_encoder(config, 1)
        feats = torch.empty(num_cuts, config.features.num_mels, _num_frames(length_s))
        lens = torch.empty(num_cuts, dtype=torch.int64)
        with OperationLog(rounding=_ROUND_BYTES) as forward:
            _kept = encoder.pre_encode(feats, lens)
        with OperationLog(rounding=_ROUND_BYTES) as both:
            backward(encoder.pre_encode(feats, lens)[0].sum())
        return forward.kept_bytes, both.peak_bytes


def make_encoder(config: NestConfig, num_blocks: int) -> ConformerEncoder:
    """Returns an encoder in training mode with the sizes of a preset and a number of blocks."""
    sizes = replace(config.encoder, num_layers=num_blocks, checkpoint_activations=False)
    return ConformerEncoder(sizes, num_mels=config.features.num_mels).train()


def _num_frames(length_s: float) -> int:
    return -(-int(100 * length_s + 1) // 16) * 16


def _print_activations(demands: list[Demand]) -> None:
    print("Activations in MB for a second of audio, without / with checkpointing:\n")
    print("| preset | states and subsampling, GB |", " | ".join(f"cuts of {length:g} s" for length in LENGTHS_S), "|")
    print("|---|---|" + "---|" * len(LENGTHS_S))
    for demand in demands:
        cells = [f"{a.plain / 1e6:.1f} / {a.checkpointed / 1e6:.1f}" for a in demand.activations.values()]
        print(f"| {demand.preset} | {(demand.state_bytes + demand.chunk_bytes) / 1e9:.1f} |", " | ".join(cells), "|")


def _print_budgets(demands: list[Demand], margin: float) -> None:
    columns: list[tuple[int, float]] = [(gpu, longest) for gpu in GPUS_GB for longest in LIMITS_S]
    print(f"\nLargest `max_batch_seconds`, with {100 * margin:.0f} % of the memory left free:\n")
    print("| preset | checkpointed |", " | ".join(f"{gpu} GB, cuts up to {s:g} s" for gpu, s in columns), "|")
    print("|---|---|" + "---|" * len(columns))
    for demand in demands:
        for checkpointed in (False, True):
            budget: Callable[..., int] = demand.budget
            cells = [f"{budget(gpu, s, margin, checkpointed=checkpointed):,}" for gpu, s in columns]
            print(f"| {demand.preset} | {'yes' if checkpointed else 'no'} |", " | ".join(cells), "|")


if __name__ == "__main__":
    sys.exit(main())

"""Counts the operations of a training step for each preset, and prints how much audio a GPU takes in a second.

    python benchmarks/count_operations.py [--seconds 15] [--presets small medium large xlarge]

Counts matrix products, convolutions and attention, forward and backward, with torch's flop counter. Element-wise
operations and the optimizer are not counted. Prints Markdown; nothing is timed, so the result is the same on every
machine.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nestmodel import NestConfig, NestNetwork, loss_stats
from nestmodel.preflight.trial_step import noise_batch

PRESETS = ("small", "medium", "large", "xlarge")

DENSE_BF16_TFLOPS = {"A100": 312, "H100/H200": 989, "B200": 2250}
"""Dense bf16 operations a second, in 10^12, of the SXM modules. Source: NVIDIA's data sheets of these GPUs, which list
twice as much for the last two, with sparsity."""

UTILISATIONS = (0.4, 0.2)
"""Shares of the peak that training reaches."""


@dataclass(frozen=True)
class Demand:
    """What one second of audio costs."""

    preset: str
    gflop_per_audio_s: float

    def audio_s_per_s(self, gpu: str, utilisation: float) -> float:
        """Returns the seconds of audio that a GPU takes in a second."""
        return utilisation * DENSE_BF16_TFLOPS[gpu] * 1000 / self.gflop_per_audio_s


def main() -> int:
    """Counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch.set_num_threads(1)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the cut")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    arguments = parser.parse_args()
    print_demands([count(preset, arguments.seconds) for preset in arguments.presets])
    return 0


def count(preset: str, seconds: float = 15.0) -> Demand:
    """Counts the operations of the forward and backward pass of one cut.

    The blocks of an encoder are equal, so networks of one and of two blocks are counted, and the others are added.
    """
    config = NestConfig.preset(preset)
    one, two = (_flops(replace(config, encoder=replace(config.encoder, num_layers=n)), seconds) for n in (1, 2))
    total = one + (config.encoder.num_layers - 1) * (two - one)
    return Demand(preset, total / seconds / 1e9)


def _flops(config: NestConfig, seconds: float) -> int:
    network = NestNetwork(config).train()
    with FlopCounterMode(display=False, custom_mapping=CUSTOM_FORMULAS) as counter:
        loss_stats(network(noise_batch((1, round(16000 * seconds))))).nll_sum.backward()
    return counter.get_total_flops()


def _backward_of_convolution(grad_out: Any, _x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Returns the operations of the gradients of a convolution, each as many as the forward pass has.

    Torch's own formula counts grouped convolutions as if they had one group.
    """
    output_mask = rest[-1]
    forward: int = 2 * math.prod(grad_out) * math.prod(weight[1:])
    return forward * sum(output_mask[:2])


CUSTOM_FORMULAS = {torch.ops.aten.convolution_backward: _backward_of_convolution}
"""Formulas of torch's flop counter that are replaced."""


def print_demands(demands: list[Demand]) -> None:
    """Prints audio-seconds a second by preset, GPU and utilisation."""
    columns = [(gpu, share) for gpu in DENSE_BF16_TFLOPS for share in UTILISATIONS]
    print(
        "| preset | GFLOP per audio-s | " + " | ".join(f"{gpu}, {100 * share:.0f} %" for gpu, share in columns) + " |"
    )
    print("|---|" + "---|" * (1 + len(columns)))
    for demand in demands:
        rates = " | ".join(f"{demand.audio_s_per_s(gpu, share):,.0f}" for gpu, share in columns)
        print(f"| {demand.preset} | {demand.gflop_per_audio_s:.1f} | {rates} |")


if __name__ == "__main__":
    sys.exit(main())

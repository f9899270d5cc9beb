"""What a step of a default run costs each GPU, for every preset on one and on eight GPUs, from counted microbatches.

A step has the microbatches that the preset sets. Each is as large as its budget allows, with cuts of 15 s, and is
computed in the compiled form, which `model.kernels: auto` takes on a GPU. The gradients are exchanged once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

from benchmarks.counts.count_step import DENSE_BF16_TFLOPS, SECONDS, Count, count, rows_of

NUM_GPUS = (1, 8)
LAUNCHES_PER_OPERATION, LAUNCH_S = 1.35, 37e-6
"""Measured on one H100: 1.24 to 1.45 launches an operation, and at most 37 us of the host for a launch."""

SLOWDOWN = 2.0
"""How much slower kernels are taken to be than good ones. On one H100, those of the plain form were 1.7 to 2.8 times
slower at large microbatches."""

BUS_BYTES_PER_S = 400e9
"""What NCCL's ring reaches among eight H100 of one machine; a rank moves 1.75 times the bytes of the gradients."""

_PEAK = DENSE_BF16_TFLOPS["H100/H200"] * 1e12


@dataclass(frozen=True, kw_only=True)
class DefaultStep:
    """A step of a default run, as one GPU sees it."""

    preset: str
    num_gpus: int
    num_microbatches: int
    cost: Count
    exchange_s: float
    """Seconds of the exchange of gradients, if nothing hid it. DDP hides most of it behind the backward pass."""

    @property
    def host_s(self) -> float:
        """Seconds that the host takes for the launches."""
        return self.cost.operations * LAUNCHES_PER_OPERATION * LAUNCH_S

    def share(self, seconds: float) -> float:
        """Returns the share of an H100's dense bf16 peak in a step that takes this time."""
        return self.cost.flops / seconds / _PEAK


def default_steps(preset: str) -> list[DefaultStep]:
    """Returns the steps of a preset for each of `NUM_GPUS`."""
    from nestmodel import NestConfig, NestNetwork
    from nestmodel.config import preset_path

    plan = cast(dict[str, Any], yaml.safe_load(preset_path(preset).read_text()))["data"]["plan"]
    parts = count(preset, cuts=round(plan["max_batch_seconds"] / SECONDS))
    microbatch = sum((parts[row] for row in rows_of("compiled") if row != "optimizer"), Count())
    update = parts["optimizer"]
    gradient_bytes = 4 * sum(p.numel() for p in NestNetwork(NestConfig.preset(preset)).parameters() if p.requires_grad)
    found = []
    for num_gpus in NUM_GPUS:
        num_microbatches = plan["microbatches_per_step"] // num_gpus
        found.append(
            DefaultStep(
                preset=preset,
                num_gpus=num_gpus,
                num_microbatches=num_microbatches,
                cost=sum([microbatch] * num_microbatches, update),
                exchange_s=0.0 if num_gpus == 1 else 1.75 * gradient_bytes / BUS_BYTES_PER_S,
            )
        )
    return found


def default_table(steps: Sequence[DefaultStep]) -> str:
    """Returns the steps as Markdown."""
    heads = ["preset", "GPUs", "microbatches of a GPU", "operations", "GB", "TFLOP", "floor, ms", "host, ms"]
    heads += ["exchange, ms", "share of the peak at the floor, %", f"kernels {SLOWDOWN:g} times slower, %"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for step in steps:
        cost, floor_s = step.cost, step.cost.floor_s
        cells = [step.preset, step.num_gpus, step.num_microbatches, f"{cost.operations:,}"]
        cells += [f"{cost.num_bytes / 1e9:,.0f}", f"{cost.flops / 1e12:,.1f}", f"{1e3 * floor_s:,.0f}"]
        cells += [f"{1e3 * step.host_s:,.0f}", f"{1e3 * step.exchange_s:.1f}"]
        cells += [f"{100 * step.share(max(floor_s, step.host_s)):.0f}"]
        cells += [f"{100 * step.share(max(SLOWDOWN * floor_s, step.host_s) + step.exchange_s):.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)

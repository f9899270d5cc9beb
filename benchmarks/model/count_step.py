"""Bytes, instructions, launches and operations of a compiled microbatch, and the time expected of an H100.

    python -m benchmarks run count_step [--presets small large] [--before TREE]

Counts the forward and backward pass of a microbatch of each preset, with cuts of 15 s up to its budget, in the default
form of a GPU, and the microbatch's share of the optimizer step. It runs on tensors without values, on any machine:
torch's compiler writes its code for an H100, and each kernel in Triton is compiled for it and disassembled. `--before`
counts another checkout as well, in a process of its own. A preset takes a few minutes, less with warm caches of Triton.
"""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch.nn.utils import clip_grad

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import json_of, own_command
from benchmarks.harness.fake_gpu import Operation, backward, fake_gpu
from benchmarks.harness.fake_h100 import LaunchLog, pretended_h100, recording
from benchmarks.harness.report import Report, table_text, versions
from benchmarks.harness.repository import REPOSITORY
from nestdata import MicrobatchKey, Mix
from nestmodel import NestConfig, NestNetwork, loss_stats, preset_path
from nestmodel.nn.backend import Backend
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.block import KEYS_PER_BLOCK
from nestmodel.nn.network_input import NetworkInput
from nestmodel.training.schedule import build_optimizer, divide_and_clip
from nestmodel.training.step_stats import GradientSums

QUICK = ("--presets", "small", "--cuts", "2")

PRESETS = ("small", "medium", "large", "xlarge")
CUT_S = 15

SCORED_SHARE = 0.3
"""Share of encoder frames that are scored with the masks of the presets."""

BYTES_PER_S, FLOP_PER_S, PEAK_FLOP_PER_S = 3.0e12, 784e12, 989e12
"""Copies and products in bf16 that one H100 reached, and its peak; see benchmarks/results/gpu_forms_h100_2026-11.md."""

ISSUE_SHARE = 0.6
WARP_INSTRUCTIONS_PER_S = 132 * 4 * 1.755e9 * ISSUE_SHARE
"""Multiprocessors, schedulers of each, clock, and the share of these slots in which good kernels issue."""

MEASURED_OVER_COUNTED = 1.33
"""How much longer kernels take than their bytes, FLOP or instructions: with `large`, compiled for one shape at
335d56fa, 98.4 and 73.9 ms. Source: the same result."""

TRIPS: dict[str, Callable[[Any, int], list[tuple[int, int]]]] = {
    **dict.fromkeys(("forward_kernel", "gradient_kernel"), lambda of, _: [(of["num_each"], of["positions"])]),
    **dict.fromkeys(("convolution_kernel", "convolution_gradient_kernel"), lambda of, _: [(of["frames"], of["steps"])]),
    **dict.fromkeys(("split_kernel", "join_kernel"), lambda of, _: [(of["frames"], 1)]),
}
"""Range and step of the loops of our own kernels, from outer to inner ones; see `LaunchLog`."""

NORMS = "norms, residual path, dropout"
IN_BLOCKS = {
    "products": r"^(add)?mm$",
    NORMS: r"layer_norm",
    "convolution module": r"convolution|glu|batch_norm|depthwise",
    "biases' sums": r"triton_red.*_sum",
    "feed-forward": r"silu|sigmoid",
    "attention": r"bmm|attention|(weights|gradients|split|join)_kernel|scores|distance|unbind|stack|unsqueeze|"
    r"^new_zeros|^copy_|^add$",
}
"""Parts of the blocks by names of operations; the first match counts, and other operations belong to `NORMS`."""

NOTES = f"""\
A microbatch is a forward and a backward pass of cuts of {CUT_S} s, up to the budget of the preset, and its share of the
norm of the gradients and of AdamW. Bytes count each operand of a kernel once. Instructions are counted for all warps of
kernels in Triton, the compiler's and our own, without slow paths of divisions; among the configurations from which the
compiler chooses by time, the one with the fewest counts. `roof` adds up, over all kernels, the longer of the times of
bytes at {BYTES_PER_S / 1e12:g} TB/s and of FLOP at {FLOP_PER_S / 1e12:g} TFLOP/s. In `expected`, the time
of instructions counts as well, of which an H100 issues {WARP_INSTRUCTIONS_PER_S / 1e12:.2f} 10^12 a second if good
kernels fill {ISSUE_SHARE:g} of its slots (an assumption). The longest of the three times is multiplied by
{MEASURED_OVER_COUNTED:g}: kernels of `large` took that much longer on [one H100](gpu_forms_h100_2026-11.md). Copies
beside the computing, and times for which the GPU waits for the host, come on top: 11.6 ms there."""


@dataclass(frozen=True)
class Count:
    """What operations cost."""

    launches: float = 0.0
    num_bytes: float = 0.0
    instructions: float = 0.0
    flops: float = 0.0
    roof_s: float = 0.0
    expected_s: float = 0.0

    def __add__(self, other: "Count") -> "Count":
        """Returns the sum."""
        return Count(*map(sum, zip(astuple(self), astuple(other), strict=True)))


Counts = dict[str, Count]
"""Costs by part of the microbatch."""


def main() -> int:
    """Counts and prints the tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--cuts", type=int, help="number of cuts; by default as many as the budget allows")
    parser.add_argument("--before", type=Path, help="root of another checkout")
    parser.add_argument("--kernels", choices=PRESETS, help="lists all kernels of a preset instead")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before and not (arguments.before / "nestmodel").is_dir():
        parser.error(f"--before {arguments.before}: no checkout, because it has no folder nestmodel")
    warnings.simplefilter("ignore")
    if arguments.kernels:
        print(kernels_table(microbatch(arguments.kernels, arguments.cuts)))
        return 0
    if arguments.child:
        (preset,) = arguments.presets
        print(json.dumps({part: astuple(one) for part, one in counted(preset, arguments.cuts).items()}))
        return 0
    trees = {"before": arguments.before.resolve()} if arguments.before else {}
    report = Report(
        "Counts of a microbatch",
        __file__,
        f"counted on tensors without values, {versions('torch', 'triton')}.",
        results=arguments.results,
    )
    report.markdown(NOTES + "\n")
    found = {
        name: {preset: _of_tree(tree, preset, arguments.cuts) for preset in arguments.presets}
        for name, tree in {**trees, "this commit": REPOSITORY}.items()
    }
    _print_tables(report, found, arguments.cuts)
    return 0


def _of_tree(tree: Path, preset: str, cuts: int | None) -> Counts:
    """Returns the counts of a process that imports the packages of a checkout, but this program from here.

    Each preset gets a process, because the compiler writes other code for sizes that it has seen differ.
    """
    _, _, module, *options = own_command(__file__, "--child", "--presets", preset)
    options += ["--cuts", str(cuts)] if cuts else []
    code = f"import sys; sys.path[:0] = [{str(tree)!r}]; import nestdata, nestmodel; sys.path[0] = {str(REPOSITORY)!r}"
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return {part: Count(*one) for part, one in json_of([sys.executable, "-c", f"{code}; {run}", *options]).items()}


def counted(preset: str, cuts: int | None = None) -> Counts:
    """Returns the costs of a microbatch by part."""
    share, found = 1 / _plan(preset)["microbatches_per_step"], dict.fromkeys(_parts(), Count())
    for one in microbatch(preset, cuts):
        part = _part_of(one)
        cost = cost_of(one)
        found[part] += Count(*(share * each for each in astuple(cost))) if part == "optimizer" else cost
    return found


def cost_of(one: Operation) -> Count:
    """Returns the costs of an operation."""
    roof_s = max(one.num_bytes / BYTES_PER_S, one.flops / FLOP_PER_S)
    expected_s = max(roof_s, one.warp_instructions / WARP_INSTRUCTIONS_PER_S) * MEASURED_OVER_COUNTED
    return Count(1, one.num_bytes, one.warp_instructions, one.flops, roof_s, expected_s)


def _parts() -> list[str]:
    return ["features", "quantizer", "subsampling", *IN_BLOCKS, "head", "loss", "gradient sums", "optimizer", "other"]


def _part_of(one: Operation) -> str:
    if one.part != "blocks":
        return one.part
    found = next((part for part, names in IN_BLOCKS.items() if re.search(names, one.name)), None)
    return found or NORMS


def microbatch(preset: str, cuts: int | None = None) -> list[Operation]:
    """Returns the operations of a microbatch, and of the optimizer step after it.

    Args:
        preset: Name of the preset.
        cuts: Number of cuts; by default as many as its budget holds.
    """
    config = NestConfig.preset(preset)
    num_cuts = cuts or _plan(preset)["max_batch_seconds"] // CUT_S
    log = LaunchLog("nestmodel", TRIPS)
    # Torch asks the types of tensors whether one kernel takes a list of them, and does not know fake ones.
    with pretended_h100(), fake_gpu(torch.bfloat16), patch.object(clip_grad, "_has_foreach_support", lambda *_: True):
        with torch.device("cuda"), _built():
            network, batch = NestNetwork(config).train(), _batch(config, num_cuts)
            for module in network.modules():
                if isinstance(module, StepBatchNorm):
                    module.start_collecting()
        network.use_backend(Backend(kernels=True, keeps_subsampling=True, compiled=True))  # as on 80 GB
        run = _step(network, log)
        run(batch)  # compiles, and leaves gradients and moments
        with recording(log):
            run(batch)
    return log.operations


def _step(network: NestNetwork, log: LaunchLog) -> Callable[[NetworkInput], None]:
    """Returns a function that makes a step of one microbatch, as `NestModel` does; its parts are tracked by `log`."""
    encoder, config = network.conformer, network.config
    log.track(network.features, "features")
    log.track(network.quantizer, "quantizer")
    log.track(encoder.pre_encode, "subsampling")
    for layer in encoder.layers:
        log.track(layer, "blocks")
    log.track(network.decoder, "head", method="logits")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(trained, config.optimizer, config.conformer.d_model, torch.device("cuda"))["optimizer"]
    sums = GradientSums(trained)

    def run(batch: NetworkInput) -> None:
        output = network.forward_masked(batch)
        with log.part("loss"):
            loss = loss_stats(output).nll_sum
        sums.set_aside()
        backward(loss)
        with log.part("gradient sums"):
            sums.add()
        with log.part("optimizer"), torch.autocast("cuda", enabled=False), torch.no_grad():
            divide_and_clip(optimizer, torch.ones((), device="cuda"), 1.0, is_last_change=True)
            optimizer.step()

    return run


@contextmanager
def _built() -> Iterator[None]:
    """Lets a network be built without autocast and without the state of generators."""
    with (
        torch.autocast("cuda", enabled=False),
        patch.object(torch.random, "fork_rng", lambda *_, **__: nullcontext()),
        patch("nestmodel.nn.features.mel_filters", lambda num_mels, num_bins, _: torch.empty(num_mels, num_bins)),
    ):
        yield


def _batch(config: NestConfig, cuts: int) -> NetworkInput:
    """Returns a batch of cuts of one length, whose values do not exist."""
    num_samples = CUT_S * config.features.sampling_rate
    num_frames = config.features.num_padded_frames(num_samples)
    num_encoded = num_frames // config.conformer.subsampling_factor
    return NetworkInput(
        audio=torch.empty(cuts, num_samples),
        audio_len=torch.empty(cuts, dtype=torch.int64),
        noisy_audio=torch.empty(cuts, num_samples),
        is_masked=torch.empty(cuts, num_frames, dtype=torch.bool),
        is_scored=torch.empty(cuts, num_encoded, dtype=torch.bool),
        scored_rows=torch.empty(round(SCORED_SHARE * cuts * num_encoded), dtype=torch.int64),
        num_samples=cuts * num_samples,
        dropout_keys=torch.empty(config.conformer.num_layers + 1, KEYS_PER_BLOCK, 2, dtype=torch.int32),
        sample_id=["cut"] * cuts,
        mixes=[Mix(mode="none")] * cuts,
        bad_cuts=[],
        key=MicrobatchKey(0, 0),
    )


def _plan(preset: str) -> dict[str, int]:
    plan: dict[str, int] = yaml.safe_load(preset_path(preset).read_text(encoding="utf-8"))["data"]["plan"]
    return plan


COLUMNS = ("launches", "GB", "10^9 instructions", "TFLOP", "roof, ms", "expected, ms")


def _print_tables(report: Report, found: dict[str, dict[str, Counts]], cuts: int | None) -> None:
    """Prints the microbatches of all presets, and the parts of each."""
    report.section("Microbatches")
    rows, presets = [], list(next(iter(found.values())))
    for preset in presets:
        for name, counts in found.items():
            total = sum(counts[preset].values(), Count())
            audio_s = (cuts or _plan(preset)["max_batch_seconds"] // CUT_S) * CUT_S
            shares = [total.flops / total.expected_s / PEAK_FLOP_PER_S, total.roof_s / total.expected_s]
            rate = f"{audio_s / total.expected_s:,.0f}"
            rows.append([preset, name, *_cells(total), *(f"{100 * share:.1f}" for share in shares), rate])
    report.table(["preset", "", *COLUMNS, "% of the peak", "% of the roof", "audio-s/s"], rows)
    for preset in presets:
        report.section(f"Parts of `{preset}`")
        rows = [
            [part, name, *_cells(counts[preset][part])]
            for part in _parts()
            for name, counts in found.items()
            if counts[preset][part].launches
        ]
        report.table(["part", "", *COLUMNS], rows)


def _cells(one: Count) -> list[str]:
    return [
        f"{one.launches:,.0f}",
        f"{one.num_bytes / 1e9:.1f}",
        f"{one.instructions / 1e9:.2f}",
        f"{one.flops / 1e12:.2f}",
        f"{1e3 * one.roof_s:.1f}",
        f"{1e3 * one.expected_s:.1f}",
    ]


def kernels_table(operations: Sequence[Operation]) -> str:
    """Returns the kernels of a microbatch as Markdown, the longest first."""
    found: dict[tuple[str, str, str], Count] = {}
    for one in operations:
        key = _part_of(one), "backward" if one.is_backward else "forward", one.name
        found[key] = found.get(key, Count()) + cost_of(one)
    rows = sorted(found.items(), key=lambda item: -item[1].expected_s)
    return table_text(["part", "pass", "kernel", *COLUMNS], [[*key, *_cells(cost)] for key, cost in rows])


if __name__ == "__main__":
    sys.exit(main())

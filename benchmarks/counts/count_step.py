"""Counts a training step on a GPU that does not exist: operations, bytes and floating-point operations.

    python -m benchmarks run count_step [--presets small large] [--before TREE] [--nemo-python PYTHON]

Forward pass, backward pass and optimizer step of a preset under bf16 autocast, for the batches of the report on one
H100, part by part: on fake tensors (`fake_gpu.py`), so nothing is computed and nothing is timed, and the result is the
same on every machine. Parameters have gradients already, as in all microbatches of a step but the first one.
`streaming` counts the same with the preset of that name after it, for one attention context of several. `--before`
counts another checkout as well, and `--nemo-python` NeMo 3.0.0, whose settings are its defaults. Last come
the launches of the host if the passes are CUDA graphs, and the audio that a GPU takes in a second. Prints Markdown.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.counts.fake_gpu import Operation, OperationLog, backward, fake_gpu
from benchmarks.counts.step_launches import launches_table, step_launches
from benchmarks.harness.children import run_peer
from benchmarks.harness.repository import REPOSITORY, commit_line

if TYPE_CHECKING:
    from benchmarks.counts.fake_compile import Generated
    from nestmodel import NestConfig
    from nestmodel.nn.batch_norm import StepBatchNorm
    from nestmodel.nn.network_input import NetworkInput

QUICK = ("--presets", "small")
CUTS = {"small": 16, "medium": 266, "large": 133, "xlarge": 53}
"""Number of cuts of each preset in the report on one H100."""

SECONDS = 15.0
"""Length of these cuts."""

BYTES_PER_S, FLOP_PER_S = 2.8e12, 600e12
"""What good kernels reach on an H100, whose peaks are 3.35e12 and 989e12."""

SCORED_SHARE = 0.3
"""Share of encoder frames that are scored with the masks of the presets."""

FORMS = {"compiled": {"features": "compiled", "blocks": "compiled"}}
"""The form of a step that torch's compiler generates, and the rows of the parts that differ from a step without it."""

PARTS = ("features", "quantizer", "subsampling", "blocks", "head", "loss", "optimizer", "other")
"""The optimizer's part contains the sums of gradients over microbatches; the last one contains masks, encodings of
positions, and dropout before the blocks."""

DENSE_BF16_TFLOPS = {"A100": 312, "H100/H200": 989, "B200": 2250}
"""Dense bf16 operations a second, in 10^12, of the SXM modules. Source: NVIDIA's data sheets of these GPUs, which list
twice as much for the last two, with sparsity."""

UTILISATIONS = (0.4, 0.2)
"""Shares of the peak that training reaches."""

_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import nestmodel
sys.path[0] = sys.argv[2]
from benchmarks.counts.count_step import count, print_counts
print_counts({preset: count(preset) for preset in sys.argv[3:]})
"""

NOTES = f"""\
Counted for cuts of {SECONDS:g} s: forward pass, backward pass and optimizer step under bf16 autocast, when
gradients exist already. Operations are calls that launch at least one kernel; on an H100, 1.24 to 1.45 launches [were
measured](gpu_h100_2026-11.md) for each, because some calls launch several. Views and allocations are not counted.
Bytes count each operand of a call once. FLOP are those of matrix products, convolutions and attention. The floor adds
up the time of all operations: that of an operation's bytes at {BYTES_PER_S / 1e12:g} TB/s, or of its FLOP at
{FLOP_PER_S / 1e12:g} TFLOP/s if that is longer. Compiled blocks and features are counted as torch's compiler generates
them for an H100: the kernels that it wrote, its library calls, and the operations outside of the compiled code.
"""


@dataclass(frozen=True, kw_only=True)
class Count:
    """What the operations of a part cost."""

    operations: int = 0
    num_bytes: int = 0
    flops: int = 0

    floor_s: float = 0.0
    """Seconds at `BYTES_PER_S` and `FLOP_PER_S`: the larger of both times of each operation, added up."""

    def __add__(self, other: "Count") -> "Count":
        """Returns the sum."""
        return Count(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


Counts = dict[str, dict[str, Count]]
"""By preset and part."""


def main() -> int:
    """Counts and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=list(CUTS), default=list(CUTS))
    parser.add_argument("--before", type=Path, help="root of another checkout")
    parser.add_argument("--nemo-python", help="Python of an environment with NeMo")
    arguments = parser.parse_args()
    if arguments.before and not (arguments.before / "nestmodel").is_dir():
        parser.error(f"--before {arguments.before}: no checkout, because it has no folder nestmodel")
    torch.set_num_threads(1)
    counts = {
        "this project": {preset: count(preset) for preset in arguments.presets},
        "streaming": {preset: count(f"{preset}+streaming") for preset in arguments.presets},
    }
    commands: dict[str, list[str | Path]] = {}
    if arguments.before:
        commands["before"] = [sys.executable, "-c", _CHILD, arguments.before.resolve(), REPOSITORY]
    if arguments.nemo_python:
        commands["NeMo 3.0.0"] = [arguments.nemo_python, "-m", "benchmarks.peers.nemo_counts"]
    counts |= {name: _run([*command, *arguments.presets]) for name, command in commands.items()}
    host = launches_table({preset: count_launches(preset) for preset in arguments.presets})
    print(_report(counts, [count_demand(preset) for preset in arguments.presets], host))
    print(f"\n## A step of a default run, for each GPU\n\n{_default_runs(arguments.presets)}")
    return 0


def _default_runs(presets: Sequence[str]) -> str:
    from benchmarks.counts.default_runs import default_steps, default_table

    return default_table([one for preset in presets for one in default_steps(preset)])


def _run(command: Sequence[str | Path]) -> Counts:
    """Returns what a child process counted."""
    read = json.loads(run_peer(command, cwd=REPOSITORY).splitlines()[-1])
    return {preset: {part: Count(**one) for part, one in parts.items()} for preset, parts in read.items()}


def print_counts(counts: Counts) -> None:
    """Prints counts as JSON, for a child process."""
    print(json.dumps({preset: {part: asdict(one) for part, one in parts.items()} for preset, parts in counts.items()}))


def count(preset: str, cuts: int | None = None) -> dict[str, Count]:
    """Returns the costs of each part of a step of a number of cuts, and those of its other forms."""
    cuts = cuts or _num_cuts(preset)
    operations = step(preset, cuts)
    found = by_part(operations)
    found[_row("features", "compiled")] = compiled_features(preset, operations, cuts)
    found[_row("blocks", "compiled")] = _compiled_blocks(preset, operations, cuts)
    return found


def rows_of(form: str) -> list[str]:
    """Returns the row of each part of a step in one of `FORMS`, in the order of `PARTS`."""
    return [_row(part, FORMS[form].get(part)) for part in PARTS]


def _row(part: str, form: str | None) -> str:
    """Returns the name of the row of a part; its form is None in a step without the compiler."""
    return part if form is None else f"{part}, {form}"


def step(preset: str, cuts: int | None = None, num_layers: int | None = None) -> list[Operation]:
    """Returns the operations of a training step.

    Args:
        preset: Name of the preset.
        cuts: Number of cuts of the batch; by default that of `CUTS`.
        num_layers: Number of blocks; by default that of the preset.
    """
    from nestmodel import NestNetwork, loss_stats
    from nestmodel.training.schedule import build_optimizer
    from nestmodel.training.step_stats import GradientSums

    config = _config(preset)
    if num_layers is not None:
        config = replace(config, encoder=replace(config.encoder, num_layers=num_layers))
    with fake_gpu(torch.bfloat16):
        with built():
            network = NestNetwork(config).train()
        _start_collecting(network)
        batch = _batch(config, _num_cuts(preset) if cuts is None else cuts)
        log = OperationLog()
        encoder = network.encoder
        log.track(network.features, "features")
        log.track(network.quantizer, "quantizer")
        log.track(encoder.pre_encode, "subsampling")
        for layer in encoder.layers:
            log.track(layer, "blocks")
        log.track(network.decoder, "head", method="logits")

        def loss() -> Tensor:
            output = network.forward_masked(batch)
            with log.part("loss"):
                return loss_stats(output).nll_sum

        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = build_optimizer(trained, config.optimizer, config.encoder.d_model, torch.device("cuda"))[
            "optimizer"
        ]

        sums = GradientSums(trained)

        def add_gradients(loss: Tensor) -> None:
            sums.set_aside()
            backward(loss)
            with log.part("optimizer"):
                sums.add()

        def update() -> None:
            # As NestModel does, which asks torch for the norm; for fake tensors, torch would launch a kernel for each.
            grads = [parameter.grad for parameter in trained if parameter.grad is not None]
            optimizer.grad_scale = torch.ones(())
            torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            optimizer.step()

        return recorded(log, loss, update, add_gradients)


def recorded(
    log: OperationLog,
    loss: Callable[[], Tensor],
    update: Callable[[], object],
    add_gradients: Callable[[Tensor], None] = backward,
) -> list[Operation]:
    """Returns the operations of the second step, before which gradients and moments exist.

    Args:
        log: Knows the parts of the network.
        loss: Computes the loss.
        update: Updates the weights.
        add_gradients: Adds the gradients of a loss to those of the parameters.
    """
    with log:
        for _ in range(2):
            log.operations.clear()
            add_gradients(loss())
            with log.part("optimizer"), torch.autocast("cuda", enabled=False), torch.no_grad():
                update()
    return list(log.operations)


@contextmanager
def built() -> Iterator[None]:
    """Lets a network be built on a GPU that does not exist: without autocast, and without the state of generators."""
    with (
        torch.autocast("cuda", enabled=False),
        patch.object(torch.random, "fork_rng", lambda *_, **__: nullcontext()),
        patch("nestmodel.nn.features.melscale_fbanks", lambda **sizes: torch.empty(sizes["n_freqs"], sizes["n_mels"])),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def _start_collecting(network: nn.Module) -> None:
    """Makes batch norm collect the statistics of a step, as `fit` does."""
    for norm in _norms(network):
        norm.start_collecting()


def _norms(network: nn.Module) -> "list[StepBatchNorm]":
    from nestmodel.nn.batch_norm import StepBatchNorm

    return [module for module in network.modules() if isinstance(module, StepBatchNorm)]


def _config(preset: str) -> "NestConfig":
    """Returns the configuration of a preset, or of two joined by a plus, such as `small+streaming`."""
    from nestmodel import NestConfig

    return NestConfig.preset(*preset.split("+"))


def _num_cuts(preset: str) -> int:
    return CUTS[preset.split("+")[0]]


def _num_samples(config: "NestConfig") -> int:
    return round(config.features.sampling_rate * SECONDS)


def _num_frames(config: "NestConfig") -> int:
    from nestmodel.nn.network import num_padded_frames

    return num_padded_frames(_num_samples(config), config.features)


def _batch(config: "NestConfig", cuts: int) -> "NetworkInput":
    """Returns a batch of cuts of one length, whose values do not exist."""
    from nestdata import MicrobatchKey, Mix
    from nestmodel.nn.network_input import NetworkInput

    num_samples, num_frames = _num_samples(config), _num_frames(config)
    num_encoded = num_frames // config.encoder.subsampling_factor
    return NetworkInput(
        audio=torch.empty(cuts, num_samples),
        audio_len=torch.empty(cuts, dtype=torch.int64),
        noisy_audio=torch.empty(cuts, num_samples),
        is_masked=torch.empty(cuts, num_frames, dtype=torch.bool),
        is_scored=torch.empty(cuts, num_encoded, dtype=torch.bool),
        scored_rows=torch.empty(round(SCORED_SHARE * cuts * num_encoded), dtype=torch.int64),
        num_samples=cuts * num_samples,
        dropout_keys=empty_keys(config.encoder.num_layers),
        sample_id=["cut"] * cuts,
        mixes=[Mix(mode="none")] * cuts,
        bad_cuts=[],
        key=MicrobatchKey(0, 0, 0),
    )


def empty_keys(num_layers: int) -> Tensor:
    """Returns keys of dropout whose values do not exist."""
    from nestmodel.nn.block import KEYS_PER_BLOCK

    return torch.empty(num_layers + 1, KEYS_PER_BLOCK, 2, dtype=torch.int32)


def by_part(operations: Sequence[Operation]) -> dict[str, Count]:
    """Returns the costs of each part."""
    found = dict.fromkeys(PARTS, Count())
    for one in operations:
        found[one.part] += _cost(one)
    return found


def _cost(one: Operation) -> Count:
    seconds = max(one.num_bytes / BYTES_PER_S, one.flops / FLOP_PER_S)
    return Count(operations=1, num_bytes=one.num_bytes, flops=one.flops, floor_s=seconds)


def _compiled_blocks(preset: str, operations: Sequence[Operation], cuts: int) -> Count:
    """Returns the costs of all compiled blocks of an encoder."""
    num_layers, codes = compile_block(preset, cuts)
    of_blocks = [one for one in operations if one.part == "blocks"]
    # Outside of the compiled code are additions to gradients, and the conversion of weights and of their gradients.
    # Library calls take as long as eager ones.
    outside = [one for one in of_blocks if (one.name == "add_" and one.is_backward) or one.name == "_foreach_copy_"]
    return sum(map(_cost, outside), _cost_of_code(codes, of_blocks, num_layers))


def _cost_of_code(codes: "Sequence[Generated]", eager: Sequence[Operation], repeats: int = 1) -> Count:
    """Returns the costs of compiled code whose products are those of eager operations.

    Args:
        codes: The code.
        eager: Operations that the code replaces.
        repeats: How often the code runs.
    """
    products = sum((_cost(one) for one in eager if one.flops), Count())
    triton_bytes = repeats * sum(code.triton_bytes for code in codes)
    return Count(
        operations=repeats * sum(code.num_triton + code.num_library for code in codes),
        num_bytes=triton_bytes + repeats * sum(code.library_bytes for code in codes),
        flops=products.flops,
        floor_s=triton_bytes / BYTES_PER_S + products.floor_s,
    )


def compiled_features(preset: str, operations: Sequence[Operation], cuts: int | None = None) -> Count:
    """Returns the costs of compiled features.

    Args:
        preset: Name of the preset.
        operations: Those of a step with features that are not compiled.
        cuts: Number of cuts of this step; by default that of `CUTS`.
    """
    of_features = [one for one in operations if one.part == "features"]
    # The rest is outside of the compiled code: dither, Fourier transform, and numbers of frames.
    outside = [one for one in of_features if one.name in ("normal_", "_fft_r2c", "floor_divide")]
    return sum(map(_cost, outside), _cost_of_code(_compile_features(preset, cuts or _num_cuts(preset)), of_features))


def _compile_features(preset: str, cuts: int) -> "tuple[Generated, Generated]":
    """Returns the code for what is before the Fourier transform of the features, and after it."""
    from torch._subclasses.fake_tensor import FakeTensor

    from benchmarks.counts.fake_compile import generate_forward
    from nestmodel.nn.features import LogMelFeatures, compute_features, frame_signal

    config = _config(preset)
    with fake_gpu(), torch.no_grad():
        with built():
            module = LogMelFeatures(config.features)
        audio = torch.empty(2 * cuts, _num_samples(config))  # clean and noisy
        lens = torch.empty(len(audio), dtype=torch.int64)
        assert isinstance(audio, FakeTensor)
        before = (module.window, audio, torch.empty_like(audio), lens)
        spectrum = torch.view_as_real(torch.fft.rfft(frame_signal(config.features, *before)))
        return (
            generate_forward(partial(frame_signal, config.features), before, audio.fake_mode),
            generate_forward(partial(compute_features, config.features), (module.fb, spectrum, lens), audio.fake_mode),
        )


def compile_block(preset: str, cuts: int | None = None) -> "tuple[int, tuple[Generated, Generated]]":
    """Returns the number of blocks of a preset, and the code for the forward and the backward pass of one."""
    from torch._subclasses.fake_tensor import FakeTensor

    from benchmarks.counts.fake_compile import generate
    from nestmodel.nn.gpu.block import AcceleratedConformerBlock
    from nestmodel.nn.gpu.fused_attention import GpuFrames, describe_gpu_frames

    config = _config(preset)
    cuts = cuts or _num_cuts(preset)
    encoder = config.encoder
    num_frames = _num_frames(config) // encoder.subsampling_factor
    with fake_gpu(torch.bfloat16):
        with built():
            block = AcceleratedConformerBlock(encoder).train()
        _start_collecting(block)
        x = torch.empty(cuts, num_frames, encoder.d_model, requires_grad=True)
        context = encoder.att_context_size[-1] if encoder.is_limited else None
        lens = torch.empty(cuts, dtype=torch.int64)
        frames = describe_gpu_frames(x.detach(), lens, context, encoder.att_context_style)
        norms = _norms(block)

        def run(
            parameters: dict[str, Tensor],
            weights: Any,
            x: Tensor,
            collected: Sequence[Tensor],
            frames: Sequence[Tensor],
            keys: Tensor,
        ) -> Tensor:
            for norm, sums in zip(norms, collected, strict=True):
                norm._collected = sums
            with patch.object(block, "weights", lambda _: weights):
                found: Tensor = torch.func.functional_call(block, parameters, (x, GpuFrames(*frames), keys))
            return found

        weights = tree_map_only(Tensor, lambda weight: weight.detach().requires_grad_(), block.weights(x))
        collected = [norm._collected for norm in norms]
        assert isinstance(x, FakeTensor)
        inputs = (dict(block.named_parameters()), weights, x, collected, tuple(frames), empty_keys(0)[0])
        return encoder.num_layers, generate(run, inputs, x.fake_mode)


def count_launches(preset: str) -> dict[str, int]:
    """Returns what the host launches in a step of one microbatch whose passes are CUDA graphs, by part."""
    from nestmodel import NestNetwork

    config = _config(preset)
    with fake_gpu(torch.bfloat16):
        with built():
            network = NestNetwork(config).train()
        _start_collecting(network)
        return step_launches(network, _batch(config, _num_cuts(preset)))


def count_demand(preset: str) -> "Demand":
    """Returns what a second of audio costs, in a batch of one cut."""
    return Demand(preset, sum(one.flops for one in step(preset, cuts=1)) / SECONDS / 1e9)


@dataclass(frozen=True)
class Demand:
    """What one second of audio costs."""

    preset: str
    gflop_per_audio_s: float

    def audio_s_per_s(self, gpu: str, utilisation: float) -> float:
        """Returns the seconds of audio that a GPU takes in a second."""
        return utilisation * DENSE_BF16_TFLOPS[gpu] * 1000 / self.gflop_per_audio_s


def demand_table(demands: Sequence[Demand]) -> str:
    """Returns audio-seconds a second by preset, GPU and utilisation, as Markdown."""
    columns = [(gpu, share) for gpu in DENSE_BF16_TFLOPS for share in UTILISATIONS]
    heads = " | ".join(f"{gpu}, {100 * share:.0f} %" for gpu, share in columns)
    lines = [f"| preset | GFLOP per audio-s | {heads} |", f"|---|{'---|' * (1 + len(columns))}"]
    for demand in demands:
        rates = " | ".join(f"{demand.audio_s_per_s(gpu, share):,.0f}" for gpu, share in columns)
        lines.append(f"| {demand.preset} | {demand.gflop_per_audio_s:.1f} | {rates} |")
    return "\n".join(lines)


def _report(counts: dict[str, Counts], demands: Sequence[Demand], host: str) -> str:
    """Returns the tables as Markdown; `host` is that of launches."""
    measured = commit_line()
    ours = next(iter(counts.values()))
    sections = [
        "# Counts of a training step",
        f"Made by `benchmarks/counts/count_step.py` on fake tensors, torch {torch.__version__}.",
        measured,
        NOTES,
        _totals(counts),
        *(f"## {preset}, {_num_cuts(preset)} cuts\n\n{_parts(counts, preset)}" for preset in ours),
        f"## Launches of the host in a step of one microbatch, with CUDA graphs\n\n{host}",
        f"## Audio-seconds that a GPU takes in a second, by the share of its peak\n\n{demand_table(demands)}",
    ]
    return "\n\n".join(section.strip() for section in sections)


def _totals(counts: dict[str, Counts]) -> str:
    lines = ["| preset | | operations | GB | TFLOP | floor, ms |", "|---|---|---|---|---|---|"]
    for preset in next(iter(counts.values())):
        for name, found in counts.items():
            parts = found[preset]
            eager = sum((parts[part] for part in PARTS), Count())
            lines.append(f"| {preset} | {name} | {_cells(eager)} |")
            for form in FORMS:
                rows = rows_of(form)
                if set(rows) <= set(parts):
                    lines.append(
                        f"| {preset} | {name}, {form} | {_cells(sum((parts[row] for row in rows), Count()))} |"
                    )
    return "\n".join(lines)


def _parts(counts: dict[str, Counts], preset: str) -> str:
    heads = " | ".join(f"{name}: operations | GB | TFLOP | floor, ms" for name in counts)
    lines = [f"| part | {heads} |", f"|---|{'---|' * (4 * len(counts))}"]
    forms = {_row(part, form): None for of_parts in FORMS.values() for part, form in of_parts.items()}
    for part in (*PARTS, *forms):
        cells = [_cells(found[preset][part]) if part in found[preset] else " | | |" for found in counts.values()]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(one: Count) -> str:
    return f"{one.operations:,} | {one.num_bytes / 1e9:.1f} | {one.flops / 1e12:.3f} | {1e3 * one.floor_s:.1f}"


if __name__ == "__main__":
    sys.exit(main())

"""Counts what the encoder of a preset would launch on a GPU, and the graphs of a compiled block, beside another tree.

    python benchmarks/count_kernels.py [--before PATH_TO_OTHER_TREE] [--presets small large xlarge] [--quick]

Each tree is counted in a process of its own, with `PYTHONPATH` set to it, by the code of this file: the forward pass
under bf16 autocast in training mode, for 16 cuts of 15 s, on fake tensors of a GPU (`fake_gpu.py`). Nothing is timed
and no GPU is used, so the result is the same on every machine. Prints Markdown.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fake_gpu import OperationLog, fake_gpu
from measured import measured_line
from peer import run_peer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nestmodel import ConformerEncoder, NestConfig

PRESETS = ("small", "large", "xlarge")
SHAPE = (16, 1504)
"""240 s of audio: 16 cuts of 15 s, in feature frames."""

LONG = (1, 24000)
"""240 s of audio: one cut."""


NOTES = """\
Views and allocations are not counted, because they launch no kernel. Nor is the backward pass, which needs a GPU.
Without fused attention, torch computes the attention of a layer in several operations. In `fit`, batch norm collects
the statistics of the step, which is another operation for each layer, and not counted here.
"""


def main() -> int:
    """Counts one or two trees and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="root of another checkout")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--quick", action="store_true", help="two blocks of each encoder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        print(json.dumps(_count(arguments.presets, quick=arguments.quick)))
        return 0
    trees = {"before": arguments.before} if arguments.before else {}
    trees["this tree"] = Path(__file__).parents[1]
    options = ["--presets", *arguments.presets, *(["--quick"] if arguments.quick else [])]
    counts = {name: _run(tree.resolve(), options) for name, tree in trees.items()}
    print("# Kernels of the encoder\n")
    print(f"Counted by `benchmarks/count_kernels.py` on a fake GPU, torch {torch.__version__}.\n")
    print(
        measured_line(
            "benchmarks/count_kernels.py",
            "benchmarks/fake_gpu.py",
            "nestmodel/nn",
            "nestmodel/config.py",
            "nestmodel/presets",
        )
        + "\n"
    )
    print(NOTES)
    print(f"| forward pass under bf16 autocast, 240 s | {' | '.join(counts)} |")
    print(f"|---|{'---|' * len(counts)}")
    for row in next(iter(counts.values())):
        print(f"| {row} | {' | '.join(str(column[row]) for column in counts.values())} |")
    return 0


def _run(tree: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *options]
    counted: dict[str, Any] = json.loads(
        run_peer(command, env={**os.environ, "PYTHONPATH": str(tree)}).splitlines()[-1]
    )
    return counted


def _count(presets: list[str], *, quick: bool) -> dict[str, str | int]:
    """Returns the rows of the table for the tree that is imported."""
    rows: dict[str, str | int] = {}
    for preset in presets:
        log = _forward(preset, SHAPE, quick=quick)
        rows[f"{preset}: operations that launch a kernel"] = log.num_operations
        rows[f"{preset}: conversions (`_to_copy`)"] = log.counts.get("_to_copy", 0)
        rows[f"{preset}: layers with fused attention"] = log.counts.get("_scaled_dot_product_efficient_attention", 0)
        kept = [log, _forward(preset, LONG, quick=quick), _forward(preset, LONG, quick=quick, is_checkpointed=True)]
        for name, each in zip(("16 x 15 s", "1 x 240 s", "1 x 240 s, checkpointed"), kept, strict=True):
            rows[f"{preset}: GB held at the end of the pass, {name}"] = f"{each.kept_bytes / 1e9:.2f}"
    rows["graphs of one block of xlarge under DDP, compiled"] = _graphs_of_a_block()
    return rows


def _forward(preset: str, shape: tuple[int, int], *, quick: bool, is_checkpointed: bool = False) -> OperationLog:
    config = replace(NestConfig.preset(preset).encoder, checkpoint_activations=is_checkpointed)
    with fake_gpu(torch.bfloat16):
        encoder = ConformerEncoder(replace(config, num_layers=2) if quick else config, num_mels=80).train()
        feats, lens = torch.empty(shape[0], 80, shape[1]), torch.empty(shape[0], dtype=torch.int64)
        with OperationLog() as log:
            output = encoder(feats, lens)
        del output  # until here, it keeps what the backward pass needs
    return log


def _graphs_of_a_block() -> int:
    """Returns the number of graphs that torch's compiler backend gets for one block, without dropout."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_with_backend(module: nn.Module, **settings: Any) -> None:
        original(module, backend=backend, **settings)

    original, nn.Module.compile = nn.Module.compile, compile_with_backend  # type: ignore[method-assign]
    no_dropout = {"dropout": 0.0, "dropout_pre_encoder": 0.0, "dropout_att": 0.0}
    config = replace(NestConfig.preset("xlarge").encoder, num_layers=1, **no_dropout)
    with tempfile.TemporaryDirectory() as name:
        torch.distributed.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        encoder = ConformerEncoder(config, num_mels=80).train()
        encoder.compile_blocks(1)
        encoded, _ = DistributedDataParallel(encoder)(torch.randn(1, 80, 64), torch.tensor([64]))
        encoded.sum().backward()
        torch.distributed.destroy_process_group()
    nn.Module.compile = original  # type: ignore[method-assign]
    return len(graphs)


if __name__ == "__main__":
    sys.exit(main())

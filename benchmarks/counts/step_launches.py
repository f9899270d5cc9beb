"""Counts what the host launches in an optimizer step of one microbatch whose passes are CUDA graphs.

Copies to the GPU, kernels and graphs are launches. What is not in a graph runs on fake tensors (`fake_gpu.py`), by the
functions of the project; operations on all parameters are counted by the rule by which torch divides them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from benchmarks.counts.fake_gpu import Operation, OperationLog

if TYPE_CHECKING:
    from nestmodel import LossStats, NestNetwork
    from nestmodel.nn.network_input import NetworkInput

CHUNK, MAX_BLOCKS = 65536, 320
"""Values that a block takes, and blocks of a launch. Source: `MultiTensorApply.cuh` of PyTorch 2.11."""

MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
"""Tensors of a launch, by the number of lists that an operation takes. Source: as above."""

MAX_NORMS = 400
"""Norms that a launch sums up from their blocks. Source: `ForeachReduceOp.cu` of PyTorch 2.11."""

MAX_JOINED = 128
"""Tensors that a launch joins. Source: `CAT_ARRAY_BATCH_SIZE` in `Shape.cu` of PyTorch 2.11."""

NUM_GRAPHS, PER_GRAPH = 2, 3
"""Graphs of a microbatch; and the most launches of each: itself, and two kernels that write seed and offset of the
generator. Source: `CUDAGraph::replay` and `CUDAGeneratorState::replay_prologue` of PyTorch."""


def list_launches(sizes: Sequence[int], num_lists: int) -> int:
    """Returns the launches of an operation on lists of tensors of these sizes.

    A launch ends when it has all blocks that it can have or, after the last block of a tensor, all tensors.
    """
    launches = blocks = tensors = 0
    for size in filter(None, sizes):
        tensors += 1
        for rest in reversed(range(-(-size // CHUNK))):
            blocks += 1
            if blocks == MAX_BLOCKS or (tensors == MAX_TENSORS[num_lists] and rest == 0):
                launches, blocks, tensors = launches + 1, 0, min(rest, 1)
    return launches + (blocks > 0)


def step_launches(network: "NestNetwork", batch: "NetworkInput") -> dict[str, int]:
    """Returns the launches of a step of one microbatch, by part, on a GPU that does not exist.

    Args:
        network: In training mode.
        batch: A microbatch.
    """
    sizes = [parameter.numel() for parameter in network.parameters() if parameter.requires_grad]
    number = len(sizes)
    found = {"copies to the GPU": len(batch.tensors())}
    with OperationLog() as log:
        stats = _stats_of_graph(network, batch, log)
    found["inputs and results of the graphs"] = _launches(log)
    found["graphs"] = NUM_GRAPHS * PER_GRAPH
    found["gradients set to zero"] = list_launches(sizes, 1)
    with OperationLog() as log:
        _end_step(network, batch, stats)
    found["statistics of the step"] = _launches(log)
    # Per block of values and per tensor; their stack; and their norm, divided by the number of tokens.
    found["norm"] = list_launches(sizes, 1) + 1 + -(-number // MAX_NORMS) + -(-number // MAX_JOINED) + 3
    found["AdamW"] = list_launches([1] * number, 1) + list_launches(sizes, 4)
    return found


def _stats_of_graph(network: "NestNetwork", batch: "NetworkInput", log: OperationLog) -> "LossStats":
    """Runs the forward pass of a captured microbatch, without what is in the graph; the log then contains only that."""
    from nestmodel.nn.gpu.step_graph import StepGraphs
    from nestmodel.nn.network import NestOutput

    num_rows, quantizer = len(batch.scored_rows), network.config.quantizer
    logits = torch.ones(num_rows, quantizer.num_classes, quantizer.num_codebooks, requires_grad=True)
    targets = torch.ones(num_rows, quantizer.num_codebooks, dtype=torch.int64)
    encoded = torch.empty(*batch.is_scored.shape, 1)
    output = NestOutput(logits, targets, batch.is_scored, encoded, batch.audio_len)
    graphs = StepGraphs(network, 1, lambda _: lambda: None, num_microbatches=1, num_ranks=1)
    with (
        patch.object(network, "forward_masked", lambda _: output),
        patch("nestmodel.nn.gpu.step_graph.row_capacity", lambda *_: num_rows),
        patch.object(torch.autograd, "grad", lambda _, parameters, **__: [torch.ones_like(p) for p in parameters]),
    ):
        graphs.forward(batch)  # the warm-up, which is not captured
        graphs.backward()
        log.operations.clear()
        stats = graphs.forward(batch)
    assert stats is not None
    return stats


def _end_step(network: "NestNetwork", batch: "NetworkInput", stats: "LossStats") -> None:
    """Computes the statistics of a step as NestModel does."""
    from nestmodel.nn.batch_norm import StepBatchNorm, update_running_stats
    from nestmodel.training.step_stats import DecayedCounts, StepStats, StopRequests

    norms = [module for module in network.modules() if isinstance(module, StepBatchNorm)]
    loss = stats.nll_sum * 1 * 1 / 1
    loss.detach().clone()  # Lightning's
    step = StepStats(norms, network.config.quantizer.num_codebooks)
    step.add(stats, batch)
    totals = step.unflatten(step.flatten(StopRequests()))
    counts = DecayedCounts()
    counts.counts = torch.stack([stats.token_counts, stats.predicted_counts])
    metrics = totals.stats.metrics(counts.plus(totals.stats))
    torch.stack([*totals.counts().values(), *metrics.values(), loss]).cpu()
    update_running_stats(norms, totals.norm_statistics)


def _launches(log: OperationLog) -> int:
    return sum(map(_of_operation, log.operations))


def _of_operation(one: Operation) -> int:
    """Returns the launches of an operation on few or small tensors, at most."""
    if one.name in ("cat", "stack"):
        return -(-len(one.inputs) // MAX_JOINED)
    if one.name.startswith("_foreach"):
        return list_launches([torch.Size(shape.sizes).numel() for shape in one.inputs], 1)
    return 1


def launches_table(found: dict[str, dict[str, int]]) -> str:
    """Returns the launches by part and preset, as Markdown."""
    lines = [f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for part in next(iter(found.values())):
        lines.append(f"| {part} | {' | '.join(str(parts[part]) for parts in found.values())} |")
    lines.append(f"| all | {' | '.join(str(sum(parts.values())) for parts in found.values())} |")
    return "\n".join(lines)

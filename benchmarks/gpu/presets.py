"""Section `presets`: time, launches, share of peak and memory of optimizer steps, compiled or checkpointed or not."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.fake_gpu import CUSTOM_FORMULAS
from benchmarks.gpu.context import RATE, Context
from benchmarks.gpu.report import Row, Section
from nestmodel import Kernels, NestConfig
from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.preflight.memory import PeakMemory
from nestmodel.preflight.trial_step import Shape, TrialStep, noise_batch

PEAK_BF16_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A40": 150,
    "A10": 125,
}
"""Dense bf16 operations a second, in 10^12, by words of the name that torch reports; the first match counts. Source:
NVIDIA's data sheets, whose figures with sparsity are halved."""

_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


@dataclass(frozen=True)
class Case:
    """One combination of model, shape and options."""

    name: str
    config: NestConfig
    shape: Shape
    compiled: bool
    checkpointed: bool

    @property
    def row(self) -> str:
        """Name of the row."""
        options = [text for is_on, text in ((self.compiled, "compiled"), (self.checkpointed, "checkpointed")) if is_on]
        cuts, samples = self.shape
        return ", ".join([self.name, f"{cuts} x {samples / RATE:g} s", *(options or ["eager"])])


def peak_tflops(name: str) -> float | None:
    """Returns the peak of a GPU by its name; None if it is not in the table."""
    return next((peak for part, peak in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def cases(context: Context) -> Iterator[Case]:
    """Yields all cases, those first that decide most."""
    extent = context.extent
    options = [(False, False), (True, False), (False, True), (True, True)]
    for compiled, checkpointed in options if extent.compiles else options[::2]:
        for seconds in extent.cut_seconds:
            for name, config in reversed(extent.models.items()):
                shape = (max(1, int(extent.budgets[name] / seconds)), round(seconds * RATE))
                encoder = replace(config.encoder, checkpoint_activations=checkpointed)
                yield Case(name, replace(config, encoder=encoder), shape, compiled, checkpointed)


def measure_presets(context: Context, section: Section) -> None:
    """Adds a row for each case; halves the number of cuts as long as memory runs out."""
    if not context.extent.compiles:
        section.notes.append("Compiled blocks are measured on a GPU only.")
    for case in cases(context):
        if not context.has_time():
            section.notes.append(f"`{case.row}` and later cases were not measured: the time was over.")
            return
        while True:
            row = _measure(context, case)
            context.free_memory()
            if row is not None or case.shape[0] == 1:
                break
            section.rows.append({"row": case.row, "result": "out of memory"})
            case = replace(case, shape=(case.shape[0] // 2, case.shape[1]))
        section.rows.append(row or {"row": case.row, "result": "out of memory"})


def _measure(context: Context, case: Case) -> Row | None:
    """Returns the row of a case; None if it does not fit into memory."""
    try:
        return _measured(context, case)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _measured(context: Context, case: Case) -> Row:
    torch.compiler.reset()  # torch compiles a function for a limited number of shapes, over all cases
    memory = PeakMemory(context.device)
    step = TrialStep(
        case.config,
        context.single_trainer(),
        kernels=Kernels(blocks="compiled" if case.compiled else "torch"),
        num_shapes=1,
    )
    batch = noise_batch(case.shape)
    step(batch)
    step(batch)
    times = [step(batch) for _ in range(context.extent.num_steps)]
    peak_bytes = memory.peak_bytes()
    seconds = statistics.median(time.total_s for time in times)
    row: Row = {
        "row": case.row,
        "result": "measured",
        "step, ms": 1000 * seconds,
        "optimizer, ms": 1000 * statistics.median(time.optimizer_s for time in times),
        "audio-s/s": case.shape[0] * case.shape[1] / RATE / seconds,
        "reserved, GB" if context.is_cuda else "process, GB": peak_bytes / 1e9,
    }
    if context.is_cuda:
        row["allocated, GB"] = torch.cuda.max_memory_allocated(context.device) / 1e9
    row["launches" if context.is_cuda else "operations"] = _count_launches(context, lambda: step(batch))
    if not case.compiled:
        with FlopCounterMode(display=False, custom_mapping=CUSTOM_FORMULAS) as counter:
            step(batch)
        row["TFLOP"] = counter.get_total_flops() / 1e12
        peak = peak_tflops(torch.cuda.get_device_name(context.device)) if context.is_cuda else None
        row["share of peak"] = None if peak is None else row["TFLOP"] / seconds / peak
    return row


def _count_launches(context: Context, run: Any) -> int:
    """Returns the kernels and copies that the CPU launches in a step; on a CPU, the number of operations."""
    if not context.is_cuda:
        with _OperationCount() as count:
            run()
        return count.number
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith(_LAUNCHES))


class _OperationCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))

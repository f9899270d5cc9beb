"""Times of calls on the host and on the GPU, the kernels behind them, and their number of operations."""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.counts.fake_gpu import CUSTOM_FORMULAS
from benchmarks.gpu.context import Context

GROUPS = {
    "copy": r"^Mem(cpy|set)|\bcopy_$|_to_copy$",
    "triton": r"^triton_|^\w+_kernel$",
    "attention": r"fmha|flash|mem_?eff|attention",
    "softmax": r"softmax",
    "product": r"gemm|gemv|nvjet|cublas|cutlass|split_?k|::(addmm|baddbmm|bmm|mm)$",
    "convolution": r"conv(olution|[123]d|_)|cudnn|[wd]grad",
    "norm": r"(layer|batch)_?norm|GammaBeta",
    "transform": r"fft",
    "optimizer, foreach": r"multi_tensor|foreach|fused_adam",
    "sum": r"reduce|::sum$",
    "element-wise": r"elementwise",
}
"""Groups of kernels by patterns of their names; the first match counts. On a CPU, names are those of operations."""

_RUNTIME_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
_NUM_CALLS = 10


class CallTime(NamedTuple):
    """Milliseconds of one call of a function, of several calls that follow each other."""

    host_ms: float
    """Until the host had launched everything; on a CPU, until it had computed everything."""

    gpu_ms: float | None
    """By events; None on a CPU."""

    @property
    def best_ms(self) -> float:
        """Time of the device."""
        return self.host_ms if self.gpu_ms is None else self.gpu_ms


class Kernel(NamedTuple):
    """All launches of one kernel in a call; on a CPU, all calls of one operation."""

    name: str
    number: int
    milliseconds: float

    @property
    def group(self) -> str:
        """Key of `GROUPS`, or `other`."""
        return next((group for group, words in GROUPS.items() if re.search(words, self.name, re.IGNORECASE)), "other")


class Profile(NamedTuple):
    """What a call launches and how long the device computes."""

    kernels: list[Kernel]
    """The longest first."""

    num_launches: int
    """Kernels, graphs and copies that the host launches; 0 on a CPU."""

    @property
    def busy_ms(self) -> float:
        """Milliseconds for which the device computes."""
        return sum(kernel.milliseconds for kernel in self.kernels)

    def by_group(self) -> dict[str, Kernel]:
        """Returns the sums of each group, the longest first."""
        groups = defaultdict(list)
        for kernel in self.kernels:
            groups[kernel.group].append(kernel)
        sums = [
            Kernel(name, sum(each.number for each in found), sum(each.milliseconds for each in found))
            for name, found in groups.items()
        ]
        return {each.name: each for each in sorted(sums, key=lambda each: -each.milliseconds)}


def time_call(context: Context, run: Callable[[], object]) -> CallTime:
    """Calls a function three times, and then ten times for the result."""
    for _ in range(3):
        run()
    context.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if context.is_cuda else []
    started = time.perf_counter()
    if events:
        events[0].record()
    for _ in range(_NUM_CALLS):
        run()
    if events:
        events[1].record()
    host_ms = 1000 * (time.perf_counter() - started) / _NUM_CALLS
    context.synchronize()
    return CallTime(host_ms, events[0].elapsed_time(events[1]) / _NUM_CALLS if events else None)


def profile_call(context: Context, run: Callable[[], object]) -> Profile:
    """Calls a function once under torch's profiler."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if context.is_cuda else [])
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        context.synchronize()
    averages: Iterable[Any] = profiler.key_averages()
    kernels, num_launches = [], 0
    for each in averages:
        is_kernel = each.device_type == DeviceType.CUDA if context.is_cuda else each.key.startswith("aten::")
        # Annotations have the duration of the kernels within them.
        if is_kernel and not each.is_user_annotation:
            microseconds = each.self_device_time_total if context.is_cuda else each.self_cpu_time_total
            kernels.append(Kernel(each.key, each.count, microseconds / 1000))
        elif each.key.startswith(_RUNTIME_CALLS):
            num_launches += each.count
    return Profile(sorted(kernels, key=lambda kernel: -kernel.milliseconds), num_launches)


def count_tflop(run: Callable[[], object]) -> float:
    """Returns the operations of matrix products, convolutions and attention in a call, in 10^12."""
    with FlopCounterMode(display=False, custom_mapping=CUSTOM_FORMULAS) as counter:
        run()
    num_operations: int = counter.get_total_flops()
    return num_operations / 1e12


def median(values: Iterable[float]) -> float:
    """Returns the median of values that may be computed one by one."""
    return statistics.median(values)


def spread(values: Iterable[float]) -> float:
    """Returns how far values are apart: largest minus smallest, as a share of the median."""
    found = list(values)
    return (max(found) - min(found)) / statistics.median(found)

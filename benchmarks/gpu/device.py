"""Sections `device` and `ceilings`: the GPU, versions and settings; and the rates that no step can exceed."""

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring import time_call
from benchmarks.gpu.report import Section
from benchmarks.harness.repository import commit

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

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING")
_NUM_LAUNCHES = 1000


def peak_tflops(name: str) -> float | None:
    """Returns the peak of a GPU by its name; None if it is not in the table."""
    return next((peak for part, peak in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def identity(context: Context) -> dict[str, str]:
    """Returns what has to be equal for rows of several starts to be in one table."""
    return {
        "device": torch.cuda.get_device_name(context.device) if context.is_cuda else f"none, {platform.machine()}",
        "ranks": str(context.world_size),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": commit(),
    }


def measure_device(context: Context, section: Section) -> None:
    """Adds one row for each fact."""
    facts: dict[str, object] = {
        "ranks": context.world_size,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pytorch-lightning": importlib.metadata.version("pytorch-lightning"),
        "lhotse": importlib.metadata.version("lhotse"),
        "cores of this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{name: os.environ.get(name, "not set") for name in _VARIABLES},
    }
    if context.is_cuda:
        properties = torch.cuda.get_device_properties(context.device)
        facts |= {
            "GPU": properties.name,
            "memory, GB": properties.total_memory / 1e9,
            "free, GB": torch.cuda.mem_get_info(context.device)[0] / 1e9,
            "peak, TFLOP/s in bf16": peak_tflops(properties.name) or "unknown GPU: no share of peak",
            "capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.nccl.is_available([]) else "none",
        }
    else:
        facts["GPU"] = f"none, {platform.machine()}"
    section.rows.clear()
    section.add(*({"row": name, "value": value} for name, value in facts.items()))


def measure_ceilings(context: Context, section: Section) -> None:
    """Adds the rates of a large copy and product, and the times of launches on the host."""
    cases = {
        "copy, TB/s read and written": _copy_rate,
        "product in bf16, TFLOP/s": _product_rate,
        "launch of a kernel that does nothing, us": _empty_launch,
        "x + 1 in a loop, us on the host": _small_operation,
    }
    if not context.is_cuda:
        del cases["launch of a kernel that does nothing, us"]  # a CPU launches nothing
    for name in context.pending(section, cases, str):
        section.add({"row": name, "value": cases[name](context)})


def _copy_rate(context: Context) -> float:
    source = torch.ones(context.extent.copied_bytes, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / 1e9 / time_call(context, lambda: target.copy_(source)).best_ms


def _product_rate(context: Context) -> float:
    size = context.extent.product_size
    # Random values: products of zeros take less power, and so less time.
    first, second = torch.randn(2, size, size, device=context.device).bfloat16()
    return 2 * size**3 / 1e9 / time_call(context, lambda: first @ second).best_ms


def _empty_launch(context: Context) -> float:
    return _host_us(context, lambda: torch.cuda._sleep(0))


def _small_operation(context: Context) -> float:
    x = torch.ones(1, device=context.device)
    return _host_us(context, lambda: x + 1)


def _host_us(context: Context, run: Callable[[], object]) -> float:
    """Returns the microseconds that the CPU needs for a call, without waiting for the device."""
    run()
    context.synchronize()
    started = time.perf_counter()
    for _ in range(_NUM_LAUNCHES):
        run()
    seconds = time.perf_counter() - started
    context.synchronize()
    return 1e6 * seconds / _NUM_LAUNCHES

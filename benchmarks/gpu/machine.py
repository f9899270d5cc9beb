"""Part `machine`: the GPU, its versions, and the rates that no step can exceed."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import Results

_QUERY = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def measure_machine(results: Results, device: torch.device) -> None:
    """Adds the machine, the rates of a product and of copies, and what a launch costs the host."""
    is_cuda = device.type == "cuda"
    results.put(part="machine", **_facts(is_cuda))
    size, count = (8192, 2**31) if is_cuda else (256, 2**20)
    # Random values: products of zeros take less power, and so less time.
    first, second = torch.randn(2, size, size, device=device).bfloat16()
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(count // 8, dtype=torch.uint8, pin_memory=is_cuda)
    small = [torch.ones(8, device=device) for _ in range(2000)]
    leaf = torch.ones(8, device=device, requires_grad=True)

    def launch() -> None:
        for each in small:
            each.add_(1.0)

    def differentiate() -> None:
        y = leaf
        for _ in range(500):
            y = y * 1.0
        y.sum().backward()

    rates: dict[str, tuple[Callable[[], Any], float]] = {
        "product in bf16, TFLOP/s": (lambda: first @ second, 2 * size**3 / 1e12),
        "copy, TB/s read and written": (lambda: target.copy_(source), 2 * count / 1e12),
        "copy from page-locked memory, GB/s": (
            lambda: target[: len(host)].copy_(host, non_blocking=True),
            len(host) / 1e9,
        ),
        "launches of small operations, million/s": (launch, len(small) / 1e6),
        "operations forward and backward, million/s": (differentiate, 500 / 1e6),
    }
    for name, (run, amount) in rates.items():
        results.put(part="machine", what=name, value=amount / _seconds_of(run, is_cuda))


def _facts(is_cuda: bool) -> dict[str, Any]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    facts: dict[str, Any] = {"torch": str(torch.__version__), "cores": os.cpu_count()}
    facts["cpu"] = models[0].partition(":")[2].strip() if models else "unknown"
    if is_cuda:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        facts["nvidia-smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def _seconds_of(run: Callable[[], Any], is_cuda: bool, number: int = 10) -> float:
    def wait() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    for _ in range(2):
        run()
    wait()
    started = time.perf_counter()
    for _ in range(number):
        run()
    wait()
    return (time.perf_counter() - started) / number

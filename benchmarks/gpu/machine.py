"""Part `machine`: the GPU, its versions, and the rates that no step can exceed."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from benchmarks.gpu.results import Results
from benchmarks.harness.repository import commit

_QUERY = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def measure_machine(results: Results, device: torch.device) -> None:
    """Adds the machine, the rates of a product and of copies, and what a launch costs the host."""
    is_cuda = device.type == "cuda"
    facts: dict[str, Any] = {"torch": str(torch.__version__), "cores": os.cpu_count()}
    with suppress(OSError, subprocess.CalledProcessError):  # a copy without git
        facts["commit"] = commit()
    if is_cuda:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        facts["nvidia-smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        facts["cudnn"] = torch.backends.cudnn.version()
    for name, value in facts.items():
        results.put(part="machine", what=name, value=value)
    size, count = (8192, 2**31) if is_cuda else (256, 2**20)
    # Random values: products of zeros take less power, and so less time.
    first, second = torch.randn(2, size, size, device=device).bfloat16()
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(count // 8, dtype=torch.uint8, pin_memory=is_cuda)
    part = target[: len(host)]
    small = [torch.ones(8, device=device) for _ in range(2000)]
    rates: dict[str, tuple[Callable[[], Any], float]] = {
        "product in bf16, TFLOP/s": (lambda: first @ second, 2 * size**3 / 1e12),
        "copy, TB/s read and written": (lambda: target.copy_(source), 2 * count / 1e12),
        "copy from page-locked memory, GB/s": (lambda: part.copy_(host, non_blocking=True), len(host) / 1e9),
        "launches of small operations, million/s": (lambda: [each.add_(1.0) for each in small], len(small) / 1e6),
    }
    for name, (run, amount) in rates.items():
        results.put(part="machine", what=name, value=float(f"{amount / _seconds_of(run, is_cuda):.4g}"))


def _seconds_of(run: Callable[[], Any], is_cuda: bool, number: int = 10) -> float:
    started = 0.0
    for turn in range(2 + number):
        if turn == 2:  # the first two warm up
            if is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
        run()
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / number

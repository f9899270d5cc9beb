"""Measures computations on a CPU or a GPU."""

import time

import torch

from nestmodel.tuning.race import Run, Stopwatch

_WARM_UP_RUNS = 2
_MIN_RUNS = 3


def stopwatch(device: torch.device) -> Stopwatch:
    """Returns a stopwatch for computations on a device. It runs a computation a few times before it measures it."""
    run_once = _run_on_gpu if device.type == "cuda" else _run_on_cpu

    def measure(run: Run, seconds: float) -> list[float]:
        for _ in range(_WARM_UP_RUNS):
            run_once(run)
        times: list[float] = []
        while len(times) < _MIN_RUNS or sum(times) < seconds:
            times.append(run_once(run))
        return times

    return measure


def _run_on_cpu(run: Run) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def _run_on_gpu(run: Run) -> float:
    """Returns the time between the first and the last operation on the GPU, waits for launches included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000.0

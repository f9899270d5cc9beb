"""Part `steps`: time, kernels and memory of optimizer steps in each backend."""

import statistics
import time
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.results import Results
from benchmarks.gpu.trial import RATE, REFERENCE, Trial, batch_of, config_of, cuts_of, free
from benchmarks.harness.fake_gpu import FORMULAS
from nestmodel.training.callbacks.throughput import peak_of_run

_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")


def measure_steps(results: Results, device: torch.device, preset: str, backends: list[str]) -> None:
    """Adds a row for each backend of a preset, and its kernels to `kernels.txt`."""
    where: dict[str, Any] = {"part": "steps", "preset": preset, "cuts": cuts_of(preset, device)}
    backends = [backend for backend in backends if not results.has(**where, backend=backend)]
    if not backends:
        return
    batch, shorter = (batch_of(where["cuts"], device, share=share) for share in (1.0, 0.8))
    # Eight microbatches, as in the presets small and medium on one GPU; on a CPU, fewer.
    trial = Trial(config_of(preset, device), device, per_step=8 if device.type == "cuda" else 2)
    tflop = None
    with results.attempt(**where, backend="operations"):
        tflop = _tflop(trial, batch)
    for backend in backends:
        with results.attempt(**where, backend=backend):
            row = {**_times(trial, backend, batch, shorter), "tflop": tflop}
            row |= _profiled(results, trial, batch, f"{preset}, {where['cuts']} cuts, {backend}")
            peak = peak_of_run(torch.cuda.get_device_name(), "bf16-mixed") if device.type == "cuda" else None
            row["share_of_peak"] = None if peak is None or tflop is None else 1e15 * tflop / row["ms"] / peak
            results.put(**where, backend=backend, **row)
    trial.reset()
    free(device)


def _tflop(trial: Trial, batch: Any) -> float:
    """Returns the operations of matrix products, convolutions and attention in a microbatch, in 10^12."""
    trial.use(REFERENCE)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        trial.microbatch(batch)
    trial.reset()
    return float(counter.get_total_flops()) / 1e12


def _times(trial: Trial, backend: str, batch: Any, shorter: Any) -> dict[str, Any]:
    """Returns the milliseconds of a microbatch in steps without a wait, and the time until the host has launched it."""
    started = time.perf_counter()
    trial.use(backend, shorter)
    trial.step(batch)  # compiles
    trial.wait()
    first_s = time.perf_counter() - started
    microbatch_ms, host_ms = [], []
    for _ in range(2 if trial.device.type == "cuda" else 1):
        started = time.perf_counter()
        trial.step(batch)
        trial.wait()
        microbatch_ms.append(1000 * (time.perf_counter() - started) / trial.per_step)
    for _ in range(3):
        started = time.perf_counter()
        trial.microbatch(batch)
        host_ms.append(1000 * (time.perf_counter() - started))
        trial.wait()
    return {
        "ms": min(microbatch_ms),
        "spread": max(microbatch_ms) / min(microbatch_ms) - 1,
        "audio_s_per_s": 1000 * batch.audio.numel() / RATE / min(microbatch_ms),
        "host_ms": statistics.median(host_ms),
        "first_s": first_s,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if trial.device.type == "cuda" else 0.0,
    }


def _profiled(results: Results, trial: Trial, batch: Any, name: str) -> dict[str, Any]:
    """Returns the time of the kernels of a microbatch, or of its operations on a CPU, and the launches of the host."""
    is_cuda = trial.device.type == "cuda"
    trial.reset()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda], acc_events=True) as profiler:
        trial.microbatch(batch)
        trial.wait()
    trial.reset()
    launches, kernels = 0, []
    for each in profiler.key_averages():
        is_kernel = each.device_type == DeviceType.CUDA if is_cuda else each.key.startswith("aten::")
        # Annotations have the duration of the kernels within them.
        if is_kernel and not each.is_user_annotation:
            microseconds = each.self_device_time_total if is_cuda else each.self_cpu_time_total
            kernels.append((microseconds / 1000, each.count, each.key))
        elif each.key.startswith(_LAUNCHES):
            launches += each.count
    busy_ms = sum(ms for ms, _, _ in kernels)
    lines = [
        f"{ms:9.3f} ms {number:6d} x {1000 * ms / number:9.1f} us  {kernel[:140]}"
        for ms, number, kernel in sorted(kernels, reverse=True)[:60]
    ]
    with (results.folder / "kernels.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join([f"== {name}: busy {busy_ms:.1f} ms", *lines, "", ""]))
    return {"busy_ms": busy_ms, "launches": launches}

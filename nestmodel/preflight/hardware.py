"""What the hardware is asked for before an expensive run: a training step of the largest shape, and collectives."""

import gc
import resource
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from nestdata import AudioNoiseBatch, BatchPlan, MicrobatchKey, Mix
from nestmodel.errors import TrainingError
from nestmodel.preflight.checks import gigabytes, local_world_size
from nestmodel.preflight.report import CheckResult
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel

Shape = tuple[int, int]
"""Cuts in a microbatch, and samples to which each is padded."""

_TIGHT = 0.9  # of the memory; above, what training keeps beside the step may be too much
_POLL_S = 5e-5
_NUM_SMALL, _NUM_LARGE = 20, 5
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def largest_shapes(plan: BatchPlan) -> list[Shape]:
    """Returns the shape with most samples and the one with the longest cuts, which attention may need more for."""
    shapes = [(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets]
    most, longest = max(shapes, key=lambda s: (s[0] * s[1], s[1])), max(shapes, key=lambda s: (s[1], s[0]))
    return list(dict.fromkeys([most, longest]))


def check_step(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> CheckResult:
    """Makes optimizer steps on noise of the largest shapes, with a model of its own, and measures time and memory.

    The gradients are kept from step to step, as they are from microbatch to microbatch.
    """
    rate, expected = data.sampling_rate, model.config.features.sampling_rate
    if rate != expected:
        advice = f"the corpus is at {rate} Hz, the model for {expected} Hz. Prepare it with --sampling-rate {expected}."
        return CheckResult(status="failed", value=f"{rate} Hz", advice=advice)
    plan, device = data.train_dataset.plan, trainer.strategy.root_device
    shapes = largest_shapes(plan)
    with _no_trace(device):
        memory = _Memory(trainer, device)
        tried = _measure(model, data, trainer, shapes)
        if isinstance(tried, str):  # and no longer the error, which holds on to all that had been allocated
            return _too_large(shapes, plan, memory, tried, lambda shape: _measure(model, data, trainer, [shape]))
        seconds, peak = tried, memory.peak()
    if trainer.world_size > 1:
        peak += torch.float32.itemsize * sum(p.numel() for p in model.parameters())  # DDP's copy of the gradients
    listed = " and ".join(f"{cuts} x {samples / rate:.1f} s" for cuts, samples in shapes)
    value = f"{gigabytes(peak)} of {gigabytes(memory.total)}, {seconds:.2f} s, {listed}"
    figures = {"peak_bytes": float(peak), "total_bytes": float(memory.total), "step_seconds": seconds}
    if peak <= _TIGHT * memory.total or not memory.total:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"{100 * peak / memory.total:.0f} % of the memory of {memory.name}: little is left for anything else. Lower "
        f"data.plan.max_batch_seconds (now {plan.config.max_batch_seconds:g})."
    )
    return CheckResult(status="warning", value=value, advice=advice, figures=figures)


def check_collectives(buffers: list[Tensor], timeout_s: float, step_s: float | None) -> CheckResult:
    """Times the sum over ranks of one value, and of as many as there are gradients. All ranks come here together.

    Args:
        buffers: Of one value, and of as many as there are gradients.
        timeout_s: How long a rank waits for the others.
        step_s: What this rank computes in an optimizer step, or None where that is not known.

    Raises:
        TrainingError: A sum was not complete in time.
    """
    medians = []
    for buffer, number in zip(buffers, (_NUM_SMALL, _NUM_LARGE), strict=True):
        medians.append(statistics.median([_time_sum(buffer, timeout_s) for _ in range(number + 1)][1:]))
    small_s, large_s = medians
    value = f"one value {1000 * small_s:.2f} ms, {buffers[1].numel() / 1e6:.1f} M gradients {1000 * large_s:.1f} ms"
    figures = {"gradients_seconds": large_s, "latency_seconds": small_s}
    if step_s is None or large_s <= step_s:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"adding up gradients takes longer than computing them ({step_s:.2f} s a step). Look at the network (with "
        "GPUs, NCCL_DEBUG=INFO says which way it takes), or give each rank more to do: a higher "
        "data.plan.max_batch_seconds or data.plan.microbatches_per_step."
    )
    return CheckResult(status="warning", value=value, advice=advice, figures=figures)


def _measure(model: NestModel, data: NestDataModule, trainer: pl.Trainer, shapes: list[Shape]) -> float | str:
    """Makes steps of each shape; returns the seconds of the slowest, or what was said when memory ran out."""
    try:
        step = _stepper(model, data, trainer)
        # The first one has to allocate the moments, and where blocks are compiled, to compile.
        return max([step(shape) for shape in shapes for _ in range(2)][1::2])
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        if not is_known and not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        return str(error) or "MemoryError"


def _stepper(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> Callable[[Shape], float]:
    """Returns a function that makes a step of a shape, with a model of its own, and returns its seconds."""
    device, precision = trainer.strategy.root_device, trainer.precision_plugin
    own = NestModel(model.config)
    own = cast(NestModel, precision.convert_module(own)).to(device).train()
    own.trainer = trainer
    if model.compile_blocks:
        own.encoder.compile_blocks(data.train_dataset.plan.config.num_shapes)
    own.on_fit_start()
    optimizer = own.configure_optimizers()["optimizer"]

    def step(shape: Shape) -> float:
        before = time.perf_counter()
        with precision.train_step_context():
            loss = own.training_step(_noise_batch(shape).to(device), 0)
        loss.backward()
        optimizer.step()
        own.discard_step()
        if not bool(loss.isfinite()):  # waits for a GPU
            raise TrainingError("the loss of noise is no number. Look at trainer.precision.")
        return time.perf_counter() - before

    return step


def _too_large(
    shapes: list[Shape], plan: BatchPlan, memory: "_Memory", error: str, measure: Callable[[Shape], float | str]
) -> CheckResult:
    """Looks for the number of cuts of each shape that fits, to say how far to go down."""

    def fits(cuts: int, samples: int) -> bool:
        memory.clear()
        return not isinstance(measure((cuts, samples)), str)

    # The least number of cuts that does not fit, less one.
    fitting = [bisect_left(range(1, cuts + 1), True, key=lambda n: not fits(n, samples)) for cuts, samples in shapes]
    now, rate = plan.config.max_batch_seconds, plan.sampling_rate
    seconds = min(cuts * samples / rate for cuts, (_, samples) in zip(fitting, shapes, strict=True))
    longest = max(samples / rate for _, samples in shapes)
    if min(fitting):
        cure = f"Lower data.plan.max_batch_seconds (now {now:g}) to about {_TIGHT * seconds:.3g}"
    else:
        cure = (
            f"Not even one cut of {longest:.1f} s fits: prepare the corpus with a lower --max-seconds, and lower "
            f"data.plan.max_batch_seconds (now {now:g})"
        )
    advice = f"{cure}; or set model.config.encoder.checkpoint_activations. It said: {error.splitlines()[0]}"
    return CheckResult(status="failed", value=f"out of memory, {gigabytes(memory.total)} in all", advice=advice)


def _noise_batch(shape: Shape) -> AudioNoiseBatch:
    num_cuts, num_samples = shape
    audio = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    lens = torch.full((num_cuts,), num_samples)
    return AudioNoiseBatch(
        audio=audio,
        audio_len=lens,
        noise=torch.zeros_like(audio),
        noise_len=torch.zeros_like(lens),
        noisy_audio=audio.clone(),
        noisy_audio_len=lens.clone(),
        sample_id=["noise"] * num_cuts,
        mixes=[Mix(mode="none")] * num_cuts,
        bad_cuts=[],
        key=MicrobatchKey(0, 0, 0),
    )


@contextmanager
def _no_trace(device: torch.device) -> Iterator[None]:
    """Leaves the random state and the device's cache as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Memory:
    """What a step may take and has taken, in bytes: of the GPU, or of this process and the memory left to it."""

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self.name, self.total = str(device), torch.cuda.get_device_properties(device).total_memory
        else:
            own, left = _kilobytes("/proc/self/status", "VmRSS"), _kilobytes("/proc/meminfo", "MemAvailable")
            self.name, self.total = "this machine", 1024 * (own + left // local_world_size(trainer))
        self.clear()

    def clear(self) -> None:
        """Begins to measure anew."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        elif sys.platform == "linux":
            with suppress(OSError):  # in hardened containers; then it is the peak since the process began
                Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Returns the most that was taken since."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return 1024 * (_kilobytes("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _kilobytes(path: str, name: str) -> int:
    """Returns a line of Linux's tables; 0 elsewhere."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _time_sum(buffer: Tensor, timeout_s: float) -> float:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    before = time.perf_counter()
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    while not work.is_completed():
        if time.perf_counter() - before > timeout_s:
            raise TrainingError(
                f"a sum over ranks was not complete after {timeout_s:g} s. Look at the network between the nodes; "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the interface to use."
            )
        time.sleep(_POLL_S)
    work.wait()
    return time.perf_counter() - before

"""The checks of the hardware: time and memory of a training step of the largest shapes, and time of collectives."""

from bisect import bisect_left
from collections.abc import Callable

import pytorch_lightning as pl
import torch
from torch import Tensor

from nestdata import BatchPlan
from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.preflight.checks import local_world_size
from nestmodel.preflight.measure.collectives import time_sums
from nestmodel.preflight.measure.memory import PeakMemory, available_bytes, gigabytes, resident_bytes, usable_bytes
from nestmodel.preflight.measure.trial_step import Shape, clean_up, make_trial_step, noise_batch
from nestmodel.preflight.report import CheckResult
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel

_HIGH_SHARE = 0.9  # of the memory; a run needs some memory besides that of the step


def largest_shapes(plan: BatchPlan) -> list[Shape]:
    """Returns the shape with the most samples and the shape with the longest cuts, once if they are the same.

    The memory of attention grows with the square of the length, so the longest cuts may need more memory.
    """
    shapes = [(bucket.cuts_per_microbatch, bucket.padded_samples) for bucket in plan.buckets]
    most_samples = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    longest = max(shapes, key=lambda shape: (shape[1], shape[0]))
    return list(dict.fromkeys([most_samples, longest]))


def check_step(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> CheckResult:
    """Measures time and memory of optimizer steps on noise of the largest shapes, with a second model.

    Gradients are kept from step to step, as a run keeps them from microbatch to microbatch.
    """
    rate, expected = data.sampling_rate, model.config.features.sampling_rate
    if rate != expected:
        advice = f"the corpus is at {rate} Hz, the model for {expected} Hz. Prepare it with --sampling-rate {expected}."
        return CheckResult(status="failed", value=f"{rate} Hz", advice=advice)
    plan, device = data.train_dataset.plan, trainer.strategy.root_device
    shapes = largest_shapes(plan)
    with clean_up(device):
        memory = _MemoryMeter(trainer, device)
        measured = _measure_steps(model, data, trainer, shapes)
        if isinstance(measured, str):
            measure = lambda shape: _measure_steps(model, data, trainer, [shape])  # noqa: E731
            return _out_of_memory_result(shapes, plan, memory, measured, measure)
        seconds, peak = measured, memory.peak_bytes()
    if trainer.world_size > 1:
        peak += torch.float32.itemsize * sum(p.numel() for p in model.parameters())  # DDP's copy of the gradients
    listed = " and ".join(f"{cuts} x {samples / rate:.1f} s" for cuts, samples in shapes)
    value = f"{gigabytes(peak)} of {gigabytes(memory.total_bytes)}, {seconds:.2f} s, {listed}"
    figures = {"peak_bytes": float(peak), "total_bytes": float(memory.total_bytes), "step_seconds": seconds}
    if peak <= _HIGH_SHARE * memory.total_bytes or not memory.total_bytes:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"the step uses {100 * peak / memory.total_bytes:.0f} % of the memory of {memory.name}, which leaves little "
        f"for the rest of the run. Lower data.plan.max_batch_seconds (now {plan.config.max_batch_seconds:g})."
    )
    return CheckResult(status="warning", value=value, advice=advice, figures=figures)


def check_collectives(buffers: list[Tensor], timeout_s: float, compute_s: float | None) -> CheckResult:
    """Measures the time of summing a single value, and of summing all gradients, over all ranks.

    All ranks must call it together.

    Args:
        buffers: The buffers of `allocate_buffers`.
        timeout_s: How long a rank waits for one sum, in seconds.
        compute_s: Seconds that this rank computes for one optimizer step; None if unknown.

    Raises:
        TrainingError: A sum was not complete in time.
    """
    small_s, large_s = time_sums(buffers, timeout_s)
    value = f"one value {1000 * small_s:.2f} ms, {buffers[1].numel() / 1e6:.1f} M gradients {1000 * large_s:.1f} ms"
    figures = {"gradients_seconds": large_s, "latency_seconds": small_s}
    if compute_s is None or large_s <= compute_s:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"summing the gradients over ranks takes longer than computing them ({compute_s:.2f} s a step). Check the "
        "network (on GPUs, NCCL_DEBUG=INFO shows the transport), or raise data.plan.max_batch_seconds or "
        "data.plan.microbatches_per_step, so that each rank computes more between two sums."
    )
    return CheckResult(status="warning", value=value, advice=advice, figures=figures)


def _measure_steps(model: NestModel, data: NestDataModule, trainer: pl.Trainer, shapes: list[Shape]) -> float | str:
    """Runs two steps of each shape; returns the seconds of the slowest second step, or the out-of-memory message.

    The message is returned instead of the error, because the traceback of the error keeps all tensors alive.
    """
    try:
        step = make_trial_step(model, data, trainer)
        return max([step(noise_batch(shape)).total_s for shape in shapes for _ in range(2)][1::2])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error) or type(error).__name__


def _out_of_memory_result(
    shapes: list[Shape],
    plan: BatchPlan,
    memory: "_MemoryMeter",
    error: str,
    measure: Callable[[Shape], float | str],
) -> CheckResult:
    """Finds the largest number of cuts of each shape that fits, and returns the failed result with that advice."""

    def fits(cuts: int, samples: int) -> bool:
        memory.reset()
        return not isinstance(measure((cuts, samples)), str)

    # One less than the smallest number of cuts that does not fit.
    fitting = [bisect_left(range(1, cuts + 1), True, key=lambda n: not fits(n, samples)) for cuts, samples in shapes]
    now, rate = plan.config.max_batch_seconds, plan.sampling_rate
    seconds = min(cuts * samples / rate for cuts, (_, samples) in zip(fitting, shapes, strict=True))
    longest = max(samples / rate for _, samples in shapes)
    if min(fitting):
        remedy = f"Lower data.plan.max_batch_seconds (now {now:g}) to about {_HIGH_SHARE * seconds:.3g}"
    else:
        remedy = (
            f"Not even one cut of {longest:.1f} s fits: prepare the corpus with a lower --max-seconds, and lower "
            f"data.plan.max_batch_seconds (now {now:g})"
        )
    advice = f"{remedy}; or set model.config.encoder.checkpoint_activations. The error: {error.splitlines()[0]}"
    value = f"out of memory, {gigabytes(memory.total_bytes)} in total"
    return CheckResult(status="failed", value=value, advice=advice)


class _MemoryMeter(PeakMemory):
    """Measures the peak memory of a step: of the GPU, or of this process if the device is a CPU.

    Attributes:
        name: Name of the memory in messages.
        total_bytes: Bytes that a step may use. On a GPU, what torch may reserve. On a CPU, the sum of what this
            process already uses and its share of the available memory of the machine; 0 if unknown.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        super().__init__(device)
        if device.type == "cuda":
            self.name, self.total_bytes = str(device), usable_bytes(device)
        else:
            self.name = "this machine"
            self.total_bytes = resident_bytes() + available_bytes() // local_world_size(trainer)

"""Part `steps`: time, kernels and memory of optimizer steps in each form."""

import math
import statistics
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.forms import FORMS, ORDER, PLAIN, REFERENCE
from benchmarks.gpu.profiling import profile_call
from benchmarks.gpu.results import Results
from benchmarks.gpu.trial import RATE, Trial, batch_of, config_of, cuts_of, free
from nestmodel.training.utilisation import peak_tflops

TRACED_PRESET = "large"


def _backward_of_convolution(grad_out: Any, _x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Returns the operations of the gradients of a convolution, each as many as the forward pass has.

    Torch's own formula counts grouped convolutions as if they had one group.
    """
    output_mask: list[bool] = rest[-1]
    forward: int = 2 * math.prod(grad_out) * math.prod(weight[1:])
    return forward * sum(output_mask[:2])


FORMULAS = {torch.ops.aten.convolution_backward: _backward_of_convolution}
"""Formulas of torch's flop counter that are replaced; they take shapes instead of tensors."""


def measure_steps(results: Results, device: torch.device, preset: str, forms: list[str]) -> None:
    """Adds a row for each form of a preset."""
    forms = [form for form in ORDER if form in forms]
    _Steps(results, device, preset, cuts_of(preset, device)).measure(forms)


class _Steps:
    def __init__(self, results: Results, device: torch.device, preset: str, num_cuts: int) -> None:
        self._results, self._device, self._preset = results, device, preset
        self._is_cuda = device.type == "cuda"
        # Eight, as in the presets small and medium on one GPU; on a CPU, fewer.
        self._per_step, self._num_steps = (8, 2) if self._is_cuda else (2, 1)
        self._where: dict[str, Any] = {"part": "steps", "preset": preset, "cuts": num_cuts}
        self._batch = batch_of(num_cuts, device)
        self._shorter = batch_of(num_cuts, device, share=0.8)

    def measure(self, forms: list[str]) -> None:
        wanted = [form for form in forms if not self._results.has(**self._where, form=form)]
        if not wanted:
            return
        trial = Trial(config_of(self._preset, self._device), self._device, per_step=self._per_step)
        tflop = None
        with self._results.attempt(**self._where, form="operations"):
            tflop = self._tflop(trial)
        for form in wanted:
            with self._results.attempt(**self._where, form=form):
                self._results.put(**self._where, form=form, **self._row(trial, form, tflop))
        trial.reset()
        free(self._device)

    def _tflop(self, trial: Trial) -> float:
        """Returns the operations of matrix products, convolutions and attention in a microbatch, in 10^12."""
        trial.use(REFERENCE)
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            trial.microbatch(self._batch)
        trial.reset()
        return float(counter.get_total_flops()) / 1e12

    def _row(self, trial: Trial, form: str, tflop: float | None) -> dict[str, Any]:
        trial.use(form)
        started = time.perf_counter()
        if FORMS[form].has_varying_shapes:
            trial.microbatch(self._shorter)
            trial.reset()
        trial.step(self._batch)  # compiles
        trial.wait()
        first_s = time.perf_counter() - started
        microbatch_s = [self._timed(trial) for _ in range(self._num_steps)]
        host_s = statistics.median(self._host(trial) for _ in range(3))
        trial.check_form()
        memory = self._memory()
        trial.reset()
        found = profile_call(
            lambda: trial.microbatch(self._batch), trial.wait, is_cuda=self._is_cuda, trace=self._trace(form)
        )
        trial.reset()
        with (self._results.folder / "kernels.txt").open("a", encoding="utf-8") as file:
            head = f"== {self._preset}, {self._where['cuts']} cuts, {form}: busy {found.busy_ms:.1f} ms"
            file.write("\n".join([head, *found.lines(), "", ""]))
        seconds = min(microbatch_s)
        peak = peak_tflops(torch.cuda.get_device_name()) if self._is_cuda else None
        return {
            "ms": 1000 * seconds,
            "spread": max(microbatch_s) / seconds - 1,
            "audio_s_per_s": self._batch.audio.numel() / RATE / seconds,
            "tflop": tflop,
            "share_of_peak": None if peak is None or tflop is None else tflop / seconds / peak,
            "busy_ms": found.busy_ms,
            "host_ms": 1000 * host_s,
            "launches": found.num_launches,
            "kernels": sum(kernel.number for kernel in found.kernels),
            **memory,
            "first_s": first_s,
        }

    def _timed(self, trial: Trial) -> float:
        """Returns the seconds of a microbatch, in a step whose microbatches follow each other without a wait."""
        started = time.perf_counter()
        trial.step(self._batch)
        trial.wait()
        return (time.perf_counter() - started) / self._per_step

    def _host(self, trial: Trial) -> float:
        """Returns the seconds until the host has launched a microbatch, from an idle device."""
        trial.wait()
        started = time.perf_counter()
        trial.microbatch(self._batch)
        return time.perf_counter() - started

    def _memory(self) -> dict[str, float]:
        if not self._is_cuda:
            return {}
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {"reserved_gb": reserved / 1e9, "allocated_gb": allocated / 1e9}

    def _trace(self, form: str) -> Any:
        """Returns the file of the trace of the plain and of the default form of one preset; None for others."""
        is_traced = self._is_cuda and self._preset == TRACED_PRESET and form in (PLAIN, "compiled")
        return self._results.folder / f"trace-{form}.json.gz" if is_traced else None

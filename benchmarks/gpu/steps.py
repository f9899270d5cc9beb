"""Sections `steps`, `kernels`, `budgets` and `presets`: time, kernels, memory and energy of training steps."""

import re
import time

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.device import peak_tflops
from benchmarks.gpu.energy import energy_counter
from benchmarks.gpu.forms import BASE, FORMS, Case, StepSample, Trial, best_form, case_of, fitting
from benchmarks.gpu.measuring import Profile, count_tflop, median, profile_call
from benchmarks.gpu.report import Row, Section
from nestdata import AudioNoiseBatch
from nestmodel.preflight.measure.memory import PeakMemory
from nestmodel.preflight.measure.trial_step import noise_batch

_NUM_NAMED = 25
"""Kernels of a model that get a row each; the others share one."""

_NAME_LENGTH = 100
_ENERGY_S = 2.0
"""Least time over which energy is measured; the driver updates its counter several times a second."""


def measure_steps(context: Context, section: Section) -> None:
    """Adds a row for each model: time on the host, time on the GPU, and where the GPU's time goes."""
    seconds = context.extent.cut_seconds[0]
    cases = [case_of(context, model, seconds) for model in reversed(context.extent.models)]
    for case in context.pending(section, cases, lambda case: case.row):
        section.add(*fitting(context, case, _step_row))
    section.notes.append(
        "`host`: until forward and backward are launched. It contains waiting where a GPU is far behind; `host alone` "
        "is that of a single cut of the same length. `busy`: the sum of all kernels, which the groups add up to."
    )


def measure_kernels(context: Context, section: Section) -> None:
    """Adds the longest kernels of a step of each model; on a CPU, operations."""
    names = [name for name in reversed(context.extent.models) if name != "medium"]  # between `small` and `large`
    for model in context.pending(section, names, lambda model: f"{model}, all"):
        section.add(*_kernel_rows(context, model))


def _kernel_rows(context: Context, model: str) -> list[Row]:
    case = case_of(context, model, context.extent.cut_seconds[0])
    trial, batch = Trial(context, context.extent.models[model], FORMS[BASE]), noise_batch(case.shape)
    trial.warm_up(batch)
    found = profile_call(context, lambda: trial(batch))
    rows: list[Row] = [
        {
            "row": f"{model}, {_short(kernel.name)}",
            "group": kernel.group,
            "number": kernel.number,
            "ms": kernel.milliseconds,
            "us each": 1000 * kernel.milliseconds / kernel.number,
        }
        for kernel in found.kernels[:_NUM_NAMED]
    ]
    number = sum(kernel.number for kernel in found.kernels)
    return [*rows, {"row": f"{model}, all", "number": number, "ms": found.busy_ms}]


def _short(name: str) -> str:
    """Returns the name of a kernel without what most names share, up to a length."""
    return re.sub(r"^void |\bat::native::|\(anonymous namespace\)::", "", name)[:_NAME_LENGTH]


def measure_budgets(context: Context, section: Section) -> None:
    """Adds a row for each `max_batch_seconds` of the smallest model."""
    model, seconds = next(iter(context.extent.models)), context.extent.cut_seconds[0]
    form = best_form(context, model)
    cases = [case_of(context, model, seconds, form, budget) for budget in context.extent.more_budgets]
    for case in context.pending(section, cases, lambda case: case.row):
        section.add(*fitting(context, case, _measured_row))


def measure_presets(context: Context, section: Section) -> None:
    """Adds a row for each model and length of cuts, in the best form that section `forms` has found."""
    forms = {model: best_form(context, model) for model in context.extent.models}
    cases = [
        case_of(context, model, seconds, forms[model])
        for seconds in context.extent.cut_seconds
        for model in reversed(context.extent.models)
    ]
    for case in context.pending(section, cases, lambda case: case.row):
        section.add(*fitting(context, case, _measured_row))


def _step_row(context: Context, case: Case) -> Row:
    row, found = _measure(context, case)
    trial, batch = Trial(context, context.extent.models[case.model], FORMS[case.form]), noise_batch((1, case.shape[1]))
    trial.warm_up(batch)
    row["host alone, ms"] = median(trial(batch).host_ms for _ in range(context.extent.num_steps))
    for name, kernel in found.by_group().items():
        row[f"{name}, ms (number)"] = f"{kernel.milliseconds:.3g} ({kernel.number})"
    return row


def _measured_row(context: Context, case: Case) -> Row:
    return _measure(context, case)[0]


def _measure(context: Context, case: Case) -> tuple[Row, Profile]:
    memory = PeakMemory(context.device)
    config, batch = context.extent.models[case.model], noise_batch(case.shape)
    trial = Trial(context, config, FORMS[case.form])
    trial.warm_up(batch)
    samples = [trial(batch) for _ in range(context.extent.num_steps)]
    peak_bytes, allocated = memory.peak_bytes(), torch.cuda.max_memory_allocated() if context.is_cuda else None
    step_ms = median(sample.step_ms for sample in samples)
    found = profile_call(context, lambda: trial(batch))
    joules = _joules(context, trial, batch)
    if case.form != BASE:  # torch does not count the operations of compiled code, nor those of graphs
        del trial
        trial = Trial(context, config, FORMS[BASE])
    tflop = count_tflop(lambda: trial(batch))
    peak = peak_tflops(torch.cuda.get_device_name(context.device)) if context.is_cuda else None
    row = {
        "row": case.row,
        "result": "measured",
        "step, ms": step_ms,
        "host, ms": median(sample.host_ms for sample in samples),
        "GPU, ms": _median_gpu(samples),
        "busy, ms": found.busy_ms,
        "optimizer, ms": median(sample.optimizer_ms for sample in samples),
        "audio-s/s": 1000 * case.audio_seconds / step_ms,
        "TFLOP": tflop,
        "share of peak": None if peak is None else 1000 * tflop / step_ms / peak,
        "launches": found.num_launches or None,
        "kernels" if context.is_cuda else "operations": sum(kernel.number for kernel in found.kernels),
        "reserved, GB" if context.is_cuda else "process, GB": peak_bytes / 1e9,
        "allocated, GB": None if allocated is None else allocated / 1e9,
        "J per audio-s": None if joules is None else joules / case.audio_seconds,
    }
    return row, found


def _median_gpu(samples: list[StepSample]) -> float | None:
    found = [sample.gpu_ms for sample in samples if sample.gpu_ms is not None]
    return median(found) if found else None


def _joules(context: Context, trial: Trial, batch: AudioNoiseBatch) -> float | None:
    """Returns the energy of a step; None if the device does not count it."""
    counter = energy_counter(context.device)
    if counter is None:
        return None
    number, started, before = 0, time.monotonic(), counter()
    while time.monotonic() - started < _ENERGY_S:
        trial(batch)
        number += 1
    return (counter() - before) / number

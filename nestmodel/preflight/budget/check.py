"""The check of the training step: its time and memory, and the largest budget that fits if memory runs out."""

from functools import partial

import pytorch_lightning as pl

from nestmodel.preflight.budget.search import RESOLUTION_S, BudgetSearch
from nestmodel.preflight.budget.shapes import critical_shapes, describe_shapes
from nestmodel.preflight.checks import local_world_size
from nestmodel.preflight.measure.memory import MEMORY_MARGIN, PeakMemory, gigabytes, usable_bytes
from nestmodel.preflight.measure.trial import TrialResult, run_shapes
from nestmodel.preflight.measure.trial_step import Shape, clean_up, make_trial_step
from nestmodel.preflight.report import CheckResult
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel


def wrong_sampling_rate(model: NestModel, data: NestDataModule) -> str:
    """Returns what to do if the corpus and the model are for different sampling rates; empty if they are not."""
    rate, expected = data.sampling_rate, model.config.features.sampling_rate
    if rate == expected:
        return ""
    return f"the corpus is at {rate} Hz, the model for {expected} Hz. Prepare it with --sampling-rate {expected}."


def check_step(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> CheckResult:
    """Measures time and memory of optimizer steps on noise of the critical shapes, with a second model.

    Gradients are kept from step to step, as a run keeps them from microbatch to microbatch.
    """
    if problem := wrong_sampling_rate(model, data):
        return CheckResult(status="failed", value=f"{data.sampling_rate} Hz", advice=problem)
    plan, device = data.train_dataset.plan, trainer.strategy.root_device
    shapes, budget_s = critical_shapes(plan), plan.config.max_batch_seconds
    total = usable_bytes(device, local_world_size(trainer))

    def run(shapes: list[Shape], *, allowed_bytes: int) -> TrialResult:
        make_step = partial(make_trial_step, model, data, trainer)
        with_ddp = trainer.world_size > 1
        return run_shapes(make_step, shapes, device=device, allowed_bytes=allowed_bytes, with_ddp=with_ddp)

    allowed = round((1 - MEMORY_MARGIN) * total)
    with clean_up(device):
        found = run(shapes, allowed_bytes=0)
        if found.too_large:
            # If the peak cannot be reset, it remains that of the failed step, and only failed allocations count.
            limit = allowed if PeakMemory(device).reset() else 0
            search = BudgetSearch(data, str(device), partial(run, allowed_bytes=limit))
            advice = f"{_remedy(model, budget_s, search)}. The error: {found.error.splitlines()[0]}"
            return CheckResult(status="failed", value=f"out of memory, {gigabytes(total)} in total", advice=advice)
    peak, seconds = found.peak_bytes, max(time.total_s for time in found.times)
    listed = describe_shapes(shapes, data.sampling_rate)
    value = f"{gigabytes(peak)} of {gigabytes(total)}, {seconds:.2f} s, {listed}"
    figures = {"peak_bytes": float(peak), "total_bytes": float(total), "step_seconds": seconds}
    if peak <= allowed or not total:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"the step uses {100 * peak / total:.0f} % of the memory of "
        f"{device if device.type == 'cuda' else 'this machine'}, which leaves little for the rest of the run. Lower "
        f"data.plan.max_batch_seconds (now {budget_s:g})."
    )
    return CheckResult(status="warning", value=value, advice=advice, figures=figures)


def _remedy(model: NestModel, budget_s: float, search: BudgetSearch) -> str:
    """Searches a budget that fits, and says what to change if the steps of `budget_s` do not."""
    largest, longest = search.largest_below(budget_s), search.longest
    setting = f"data.plan.max_batch_seconds (now {budget_s:g})"
    shorter = f"prepare {longest.source} with a lower --max-seconds"
    if largest is not None:
        remedy = f"Lower {setting} to about {largest * RESOLUTION_S}"
    elif search.last_too_large:
        cuts, samples = search.last_too_large
        seconds = samples / search.sampling_rate
        fewer = f"set data.plan.max_cuts below {cuts}, or {shorter}"
        change = fewer if cuts > 1 else f"prepare data.corpus with --max-seconds below {seconds:.1f}"
        remedy = (
            f"{setting} does not fit, nor does {search.lowest * RESOLUTION_S}, the lowest that the longest cut of "
            f"{longest.source} ({longest.seconds:.1f} s) allows: a batch of {cuts} x {seconds:.1f} s is too large. "
            f"Lower it, and {change}"
        )
    else:
        needed = f"the longest cut of {longest.source} needs {longest.budget_seconds:.1f} s"
        remedy = f"{setting} cannot be much lower, because {needed}: set data.plan.max_cuts, or {shorter}"
    has_checkpoints = model.config.encoder.checkpoint_activations
    return remedy if has_checkpoints else f"{remedy}; or set model.config.encoder.checkpoint_activations"

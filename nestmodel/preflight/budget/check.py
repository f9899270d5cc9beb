"""The check of the training step: its time and memory, and the largest budget that fits if memory runs out."""

from functools import partial

import pytorch_lightning as pl

from nestmodel.preflight.budget.search import RESOLUTION_S, BudgetSearch
from nestmodel.preflight.budget.shapes import critical_shapes, describe_shapes
from nestmodel.preflight.checks import local_world_size
from nestmodel.preflight.measure.memory import MEMORY_MARGIN, gigabytes, usable_bytes
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
            search = BudgetSearch(data, str(device), partial(run, allowed_bytes=allowed))
            largest = search.largest_below(budget_s)
            advice = f"{_remedy(model, data, largest)}. The error: {found.error.splitlines()[0]}"
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


def _remedy(model: NestModel, data: NestDataModule, largest: int | None) -> str:
    """Says what to change if steps do not fit; `largest` is the largest budget that fits in units, None without one."""
    plan = data.train_dataset.plan
    now = f"data.plan.max_batch_seconds (now {plan.config.max_batch_seconds:g})"
    if largest is None:
        longest_s = max(bucket.padded_samples for bucket in plan.buckets) / plan.sampling_rate
        remedy = f"No batch with a cut of {longest_s:.1f} s fits: prepare the corpus with a lower --max-seconds, and "
        remedy += f"lower {now}"
    else:
        remedy = f"Lower {now} to about {largest * RESOLUTION_S}"
    has_checkpoints = model.config.encoder.checkpoint_activations
    return remedy if has_checkpoints else f"{remedy}; or set model.config.encoder.checkpoint_activations"

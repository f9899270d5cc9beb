"""Section `races`: the race in which a run chooses the form of each part, held twice for each model."""

import os
from unittest.mock import patch

from benchmarks.gpu.context import RATE, Context
from benchmarks.gpu.forms import case_of
from benchmarks.gpu.report import Row, Section
from nestdata import BatchPlan, PlanConfig
from nestmodel import Kernels
from nestmodel.nn.gpu.kernel_choice import PARTS
from nestmodel.training.starting import kernel_race
from nestmodel.tuning.cache import Result


def measure_races(context: Context, section: Section) -> None:
    """Adds a row for each model, with the forms that both races took, and a row for each form of the first race."""
    if not kernel_race.raced_parts(context.device, Kernels()):
        section.notes.append("Races are held on a GPU only.")
        return
    for model in context.pending(section, reversed(context.extent.models), str):
        # Not into the cache of the user: the shape is not that of a run.
        with patch.dict(os.environ, {"XDG_CACHE_HOME": str(context.directory)}):
            first, again = (_race(context, model) for _ in range(2))
        section.add(*_rows(model, first, again))


def _race(context: Context, model: str) -> Result:
    num_cuts, num_samples = case_of(context, model, context.extent.cut_seconds[0]).shape
    config = PlanConfig(max_batch_seconds=num_cuts * num_samples / RATE, microbatches_per_step=1, num_shapes=1)
    plan = BatchPlan([num_samples] * num_cuts, RATE, config)
    trainer = context.single_trainer()
    return kernel_race.race(Kernels(), context.extent.models[model], trainer, plan, reads_cache=False)


def _rows(model: str, first: Result, again: Result) -> list[Row]:
    found: list[Row] = [
        {
            "row": model,
            "result": "equal" if first.kernels == again.kernels else "not equal",
            **{part: f"{getattr(first.kernels, part)}, {getattr(again.kernels, part)}" for part in PARTS},
        }
    ]
    for row in first.rows:
        form: Row = {"row": f"{model}, {row.part}, {row.form}", "result": f"{row.verdict} {row.reason}".strip()}
        numbers = {
            "ms": None if row.seconds is None else 1000 * row.seconds,
            "error": row.error,
            "allowed": row.allowed,
        }
        found.append(form | {name: number for name, number in numbers.items() if number is not None})
    return found

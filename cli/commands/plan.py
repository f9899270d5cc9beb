"""`nestdata plan`: summarises an epoch without reading audio."""

import inspect
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from nestdata import ConfigError, PlanConfig

from ..arguments.field_options import option_parameter, replacing
from ..arguments.options import AsJson, ConfigFiles, CorpusArguments, PlanSeed, WorldSize, setting_option
from ..arguments.settings import SETTINGS
from ..output import console, print_json

if TYPE_CHECKING:
    from nestdata import PlanSummary

_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.strip("[]").split(","))
    except ValueError:
        raise ConfigError(f"--weights is {text!r}: give one number per corpus, separated by commas.") from None


def _plan_options() -> Iterator[inspect.Parameter]:
    """Yields the options of the plan that the table of settings has."""
    hints = get_type_hints(PlanConfig)
    for row in SETTINGS:
        name = row.key.removeprefix("data.plan.")
        if name != row.key:
            parser = _numbers if row.kind == "numbers" else None
            yield option_parameter(name, hints[name] | None, setting_option(row.option, parser=parser))


@replacing("plan", _plan_options(), dict)
def plan_command(
    corpora: CorpusArguments = None,
    config: ConfigFiles = None,
    world_size: WorldSize = 1,
    *,
    plan: dict[str, Any],
    seed: PlanSeed = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the plan to this PNG, SVG or PDF file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the steps, padding and buckets of an epoch without reading audio."""
    from nestdata import BatchPlan, Corpora, draw_plan, summarise_plan
    from nestdata.plan.summary import left_out_text

    from ..arguments.run_config import RunData

    if picture and picture.suffix not in _PICTURE_SUFFIXES:
        raise ConfigError(f"--picture is {str(picture)!r}: expected a name that ends in .png, .svg or .pdf.")
    run = RunData.read(config)
    plan_config = run.plan_config(seed=seed, **plan)
    paths = run.corpus_paths(corpora)
    opened = Corpora.open(paths)
    batch_plan = BatchPlan.of(opened, plan_config)
    batch_plan.microbatches_of(0, world_size)  # raises if the ranks cannot share a step
    summary = summarise_plan(batch_plan, opened.num_samples)
    if picture:
        draw_plan(summary, picture)
    if as_json:
        print_json(asdict(summary))
    else:
        _print_summary(summary, paths)
        if text := left_out_text(batch_plan):
            console().print(f"left out: {text}")


def _print_summary(summary: "PlanSummary", paths: list[Path]) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{summary.steps_per_epoch:,} steps per epoch, {summary.num_positions:,} cuts, {summary.hours:,.2f} h")
    out.print(f"padding {100 * summary.padding:.2f} %, budget used {100 * summary.budget_used:.1f} %")
    out.print(f"{summary.num_shapes} shapes, {summary.num_repeats} cuts repeated to fill the last step")
    has_first_mixture = not summary.stages or summary.stages[0].from_step > 0
    if len(summary.corpora) > 1 and has_first_mixture:
        for path, corpus in zip(paths, summary.corpora, strict=True):
            out.print(f"  {path}: {100 * corpus.share:.1f} % of the hours, each cut {corpus.repeats_per_epoch:g} times")
    for stage in summary.stages:
        out.print(f"from step {stage.from_step:,} on")
        for path, corpus, seen in zip(paths, stage.corpora, stage.seen_before, strict=True):
            out.print(
                f"  {path}: {100 * corpus.share:.1f} % of the hours, each cut {corpus.repeats_per_epoch:g} times in "
                f"{summary.hours:,.2f} h, {seen:.2f} times before"
            )
    table = Table("from, s", "to, s", "cuts per microbatch", "steps", "hours", "padding")
    for column in table.columns:
        column.justify = "right"
    for bucket in summary.buckets:
        shares = (f"{bucket.num_steps:,}", f"{bucket.hours:,.2f}", f"{100 * bucket.padding:.2f} %")
        table.add_row(f"{bucket.shortest_s:.2f}", f"{bucket.longest_s:.2f}", str(bucket.cuts_per_microbatch), *shares)
    out.print(table)

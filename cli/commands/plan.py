"""`nestdata plan`: summarises an epoch without reading audio."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nestdata import ConfigError, PlanConfig

from ..options import AsJson, ConfigNames, CorpusArguments, RunSeed, WorldSize
from ..output import console, print_json
from ..parsing import UsageError, option

if TYPE_CHECKING:
    from nestdata import PlanSummary

_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def plan_command(
    corpora: CorpusArguments,
    *,
    config: ConfigNames = (),
    world_size: WorldSize = 1,
    plan: Annotated[PlanConfig, option(name="data.plan", help="How cuts are grouped.")],
    seed: RunSeed,
    picture: Annotated[Path | None, option(help="Also draw the plan to this PNG, SVG or PDF file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the steps, padding and buckets of an epoch without reading audio."""
    from nestdata import BatchPlan, Corpora, draw_plan, summarise_plan
    from nestdata.plan.summary import few_steps_text, left_out_text

    del config  # its values are the defaults
    if not corpora:
        raise UsageError("no corpus: give CORPUS, or a configuration with data.corpus.")
    if picture and picture.suffix not in _PICTURE_SUFFIXES:
        raise ConfigError(f"--picture is {str(picture)!r}: expected a name that ends in .png, .svg or .pdf.")
    opened = Corpora.open(list(corpora))
    batch_plan = BatchPlan.of(opened, replace(plan, seed=seed))
    batch_plan.microbatches_of(0, world_size)  # raises if the ranks cannot share a step
    summary = summarise_plan(batch_plan, opened.num_samples)
    if picture:
        draw_plan(summary, picture)
    if as_json:
        return print_json(asdict(summary))
    _print_summary(summary, corpora)
    if text := left_out_text(batch_plan):
        console().print(f"left out: {text}")
    if text := few_steps_text(batch_plan, summary):
        console().print(f"few steps: {text}")


def _print_summary(summary: "PlanSummary", paths: Sequence[Path]) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{summary.steps_per_epoch:,} steps per epoch, {summary.num_positions:,} cuts, {summary.hours:,.2f} h")
    out.print(
        f"{summary.seconds_per_step:,.0f} s of audio per step, {summary.seconds_asked:,g} s asked for: budget used "
        f"{100 * summary.budget_used:.1f} %, padding {100 * summary.padding:.2f} %"
    )
    out.print(f"steps of neighbouring lengths: {summary.num_mixed_steps:,}; shapes: {summary.num_shapes}")
    out.print(f"{100 * summary.pairs_kept:.1f} % of the pairs in a microbatch are together in the next epoch as well")
    if summary.num_repeats:
        out.print(f"{summary.num_repeats} cuts repeated to fill the last step")
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
    table = Table("from, s", "to, s", "cuts per microbatch", "microbatches", "hours", "padding")
    for column in table.columns:
        column.justify = "right"
    for bucket in summary.buckets:
        shares = (f"{bucket.num_microbatches:,}", f"{bucket.hours:,.2f}", f"{100 * bucket.padding:.2f} %")
        table.add_row(f"{bucket.shortest_s:.2f}", f"{bucket.longest_s:.2f}", str(bucket.cuts_per_microbatch), *shares)
    out.print(table)

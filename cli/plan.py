"""`nestdata plan`: summarises an epoch without reading audio."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestdata import ConfigError

from .options import (
    AsJson,
    ConfigFiles,
    CorpusArguments,
    MicrobatchesPerStep,
    MicrobatchSeconds,
    PlanSeed,
    WorldSize,
    setting_option,
)
from .output import console, print_json

if TYPE_CHECKING:
    from nestdata import PlanSummary

_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def plan_command(
    corpora: CorpusArguments = None,
    config: ConfigFiles = None,
    world_size: WorldSize = 1,
    microbatches_per_step: MicrobatchesPerStep = None,
    max_batch_seconds: MicrobatchSeconds = None,
    min_audio_seconds: Annotated[float | None, setting_option("min-audio-seconds")] = None,
    quadratic_seconds: Annotated[float | None, setting_option("quadratic-seconds")] = None,
    max_cuts: Annotated[int | None, setting_option("max-cuts")] = None,
    bucket_width: Annotated[float | None, setting_option("bucket-width")] = None,
    num_shapes: Annotated[int | None, setting_option("num-shapes")] = None,
    weights: Annotated[str | None, setting_option("weights")] = None,
    temperature: Annotated[float | None, setting_option("temperature")] = None,
    mixed_lengths: Annotated[bool | None, setting_option("mixed-lengths")] = None,
    seed: PlanSeed = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the plan to this PNG, SVG or PDF file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the steps, padding and buckets of an epoch without reading audio."""
    from nestdata import BatchPlan, Corpora, draw_plan, summarise_plan

    from .run_config import RunData

    if picture and picture.suffix not in _PICTURE_SUFFIXES:
        raise ConfigError(f"--picture is {str(picture)!r}: expected a name that ends in .png, .svg or .pdf.")
    run = RunData.read(config)
    plan_config = run.plan_config(
        microbatches_per_step=microbatches_per_step,
        max_batch_seconds=max_batch_seconds,
        min_audio_seconds=min_audio_seconds,
        quadratic_seconds=quadratic_seconds,
        max_cuts=max_cuts,
        bucket_width=bucket_width,
        num_shapes=num_shapes,
        weights=_numbers(weights),
        temperature=temperature,
        mixed_lengths=mixed_lengths,
        seed=seed,
    )
    paths = run.corpus_paths(corpora)
    opened = Corpora.open(paths)
    summary = summarise_plan(BatchPlan.of(opened, plan_config), opened.num_samples, world_size)
    if picture:
        draw_plan(summary, picture)
    if as_json:
        print_json(asdict(summary))
    else:
        _print_summary(summary, paths)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return tuple(float(number) for number in text.strip("[]").split(",")) if text is not None else None
    except ValueError:
        raise ConfigError(f"--weights is {text!r}: give one number per corpus, separated by commas.") from None


def _print_summary(summary: "PlanSummary", paths: list[Path]) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{summary.steps_per_epoch:,} steps per epoch, {summary.num_positions:,} cuts, {summary.hours:,.2f} h")
    out.print(
        f"padding {100 * summary.padding:.2f} %, budget used {100 * summary.budget_used:.1f} %, "
        f"slowest rank over mean {summary.cost_spread:g}"
    )
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

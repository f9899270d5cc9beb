"""`nestdata plan`: what an epoch will look like, without reading audio."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestdata import BatchPlan, ConfigError, Corpora, PlanConfig, PlanSummary, draw_plan, summarise_plan


def plan_command(
    corpora: Annotated[list[Path], typer.Argument(metavar="CORPUS...", help="As `nestdata prepare` writes them.")],
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks that share a step.")] = 1,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches in a step. [default: the world size]")] = None,
    max_batch_seconds: Annotated[float, typer.Option(help="Most audio in a microbatch.")] = 240.0,
    min_audio_seconds: Annotated[float, typer.Option(help="Shorter cuts are lengthened to it.")] = 1.0,
    quadratic_seconds: Annotated[float | None, typer.Option(help="q of the cost d + d²/q.")] = None,
    max_cuts: Annotated[int | None, typer.Option(help="Most cuts in a microbatch.")] = None,
    num_shapes: Annotated[int | None, typer.Option(help="Round lengths up to so many.")] = None,
    weights: Annotated[str | None, typer.Option(help="Share of hours of each corpus, as in 0.7,0.3.")] = None,
    temperature: Annotated[float, typer.Option(help="Above 1, small corpora are seen more often.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Where a picture (PNG, SVG or PDF) goes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Show steps, padding, use of the budget and what each bucket holds."""
    config = PlanConfig(
        max_batch_seconds=max_batch_seconds,
        microbatches_per_step=world_size if microbatches is None else microbatches,
        min_audio_seconds=min_audio_seconds,
        quadratic_seconds=quadratic_seconds,
        max_cuts=max_cuts,
        num_shapes=num_shapes,
        weights=_numbers(weights),
        temperature=temperature,
        seed=seed,
    )
    opened = Corpora.open(corpora)
    summary = summarise_plan(BatchPlan.of(opened, config), opened.num_samples, world_size)
    if picture:
        draw_plan(summary, picture)
    if as_json:
        print(json.dumps(asdict(summary), indent=2))
    else:
        _print(summary, corpora)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return tuple(float(number) for number in text.split(",")) if text is not None else None
    except ValueError:
        raise ConfigError(f"--weights is {text!r}: give one number for each corpus, with commas between.") from None


def _print(summary: PlanSummary, paths: list[Path]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{summary.steps_per_epoch:,} steps an epoch, {summary.num_positions:,} cuts, {summary.hours:,.2f} h")
    out.print(f"padding {100 * summary.padding:.2f} %, budget used {100 * summary.budget_used:.1f} %, ", end="")
    out.print(f"slowest rank over mean {summary.cost_spread:g}")
    out.print(f"{summary.num_shapes} shapes, {summary.num_repeats} cuts repeated to fill up the last step")
    if len(summary.corpora) > 1:
        for path, corpus in zip(paths, summary.corpora, strict=True):
            out.print(
                f"  {path}: {100 * corpus.share:.1f} % of the hours, each cut seen {corpus.repeats_per_epoch:g} times"
            )
    table = Table("from, s", "to, s", "cuts in a microbatch", "steps", "hours", "padding")
    for column in table.columns:
        column.justify = "right"
    for bucket in summary.buckets:
        shares = (f"{bucket.num_steps:,}", f"{bucket.hours:,.2f}", f"{100 * bucket.padding:.2f} %")
        table.add_row(f"{bucket.shortest_s:.2f}", f"{bucket.longest_s:.2f}", str(bucket.cuts_per_microbatch), *shares)
    out.print(table)

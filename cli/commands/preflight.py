"""What `nestmodel preflight` runs, and how it prints the result."""

import sys
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestmodel import (
    BudgetConfig,
    BudgetReport,
    PreflightConfig,
    PreflightReport,
    RunConfig,
    find_budget,
    run_preflight,
)
from nestmodel.run import build_run
from nestmodel.training.starting.run_summary import few_steps_rows, left_out_rows, print_rows

from ..output import print_json

_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
_MIN_WIDTH = 100
"""Columns of the table where stdout is not a terminal."""


def run_checks(config: RunConfig, checks: PreflightConfig, *, as_json: bool) -> int:
    """Checks the ranks, data and hardware of a run; returns the exit code."""
    run = build_run(config, "fit")
    print_rows(run, [*left_out_rows(run.data), *few_steps_rows(run.data)])
    show = _print_table if not as_json else lambda report: print_json(report.as_dict())
    return int(run_preflight(run.model, run.data, run.trainer, checks, show).has_failed)


def run_budget(config: RunConfig, limits: BudgetConfig, *, as_json: bool) -> None:
    """Finds the largest batches that fit, and prints them."""
    run = build_run(config, "fit")
    say = partial(print, file=sys.stderr, flush=True)
    report = find_budget(run.model, run.data, run.trainer, limits, say)
    if as_json:
        print_json({**report.as_dict(), "yaml": report.yaml()})
    else:
        _print_budget(report)


def _print_budget(report: BudgetReport) -> None:
    table = Table(
        title=f"batch budgets on {report.device}, {_gigabytes(report.allowed_bytes)} a rank", title_justify="left"
    )
    for name in ("max_batch_seconds", "peak memory", "audio-s/s", ""):
        table.add_column(name, justify="left" if not name else "right")
    for trial in report.trials:
        found = "fits" if trial.fits else f"{trial.too_large} does not fit"
        marks = [found]
        marks += ["largest"] if trial.max_batch_seconds == report.largest_seconds else []
        table.add_row(
            f"{trial.max_batch_seconds:g}",
            "" if trial.peak_bytes is None else _gigabytes(trial.peak_bytes),
            "" if trial.audio_s_per_s is None else f"{trial.audio_s_per_s:,.1f}",
            ", ".join(marks),
        )
    console = _console()
    console.print(table)
    if report.is_limited_by_corpus:
        console.print("A larger budget would not change the batches of this corpus.", soft_wrap=True)
    print(f"\n{report.yaml()}", end="")


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.2f} GB"


def _print_table(report: PreflightReport) -> None:
    ranks = "rank" if report.world_size == 1 else "ranks"
    table = Table(title=f"preflight on {report.world_size} {ranks}, {report.device}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in report.checks:
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), check.summary)
    console = _console()
    console.print(table)
    for line in [*report.problems(), *report.notes()]:
        console.print(line, soft_wrap=True)


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, _MIN_WIDTH)
    return console

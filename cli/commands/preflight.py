"""`nestmodel preflight`: checks a distributed run before it starts, with the flags of `nestmodel fit`."""

import sys
from collections.abc import Callable

from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestmodel import (
    BudgetConfig,
    BudgetReport,
    ConfigError,
    NestDataModule,
    NestModel,
    PreflightConfig,
    PreflightReport,
    find_budget,
    run_preflight,
)

from ..output import print_json

_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
_MIN_WIDTH = 100
"""Columns of the table where stdout is not a terminal."""

_DEFAULTS = PreflightConfig()
_BUDGET = BudgetConfig()


class PreflightTrainer(Trainer):
    """Lightning's `Trainer`, extended by preflight checks.

    The parameters of the method `preflight` become flags of the command.
    """

    exit_code = 0

    def preflight(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        num_batches: int = _DEFAULTS.num_batches,
        timeout_s: float = _DEFAULTS.timeout_s,
        find_budget: bool = False,
        memory_limit: str | None = _BUDGET.memory_limit,
        memory_margin: float = _BUDGET.memory_margin,
        json: bool = False,
        ckpt_path: str | None = None,  # noqa: ARG002 - accepted because the files and flags of fit may set it
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Check ranks, disks, audio, object stores, memory and network before a run.

        Args:
            model: The model to train.
            datamodule: The data to train on.
            num_batches: Number of batches that each rank reads.
            timeout_s: Seconds that ranks wait for each other in each check, and for one step with find_budget.
            find_budget: Instead of the checks, find the largest data.plan.max_batch_seconds that fits.
            memory_limit: Memory of one rank with find_budget, such as 8GiB; required on a CPU.
            memory_margin: Share of the memory that find_budget leaves free.
            json: Print the result as JSON.
            ckpt_path: As for fit. Preflight only checks that the file exists.
            weights_only: As for fit. Preflight does not use it.
        """
        assert isinstance(model, NestModel)
        assert isinstance(datamodule, NestDataModule)
        if find_budget:
            limits = BudgetConfig(memory_limit=memory_limit, memory_margin=memory_margin, timeout_s=timeout_s)
            _find_budget(model, datamodule, self, limits, json)
            return
        if memory_limit is not None:
            raise ConfigError("--memory_limit has no effect without --find_budget: add it, or leave both out.")
        show: Callable[[PreflightReport], None] = _print_json if json else _print_table
        config = PreflightConfig(num_batches=num_batches, timeout_s=timeout_s)
        self.exit_code = int(run_preflight(model, datamodule, self, config, show).has_failed)


def _find_budget(model: NestModel, data: NestDataModule, trainer: Trainer, limits: BudgetConfig, json: bool) -> None:
    report = find_budget(model, data, trainer, limits, lambda line: print(line, file=sys.stderr, flush=True))
    if json:
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


def _print_json(report: PreflightReport) -> None:
    print_json(report.as_dict())


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

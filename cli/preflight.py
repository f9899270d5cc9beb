"""`nestmodel preflight`: checks a distributed run before it starts, with the flags of `nestmodel fit`."""

from collections.abc import Callable

from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestmodel import NestDataModule, NestModel, PreflightConfig, PreflightReport, run_preflight

from .output import print_json

_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
_MIN_WIDTH = 100
"""Columns of the table where stdout is not a terminal."""

_DEFAULTS = PreflightConfig()


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
        json: bool = False,
        ckpt_path: str | None = None,  # noqa: ARG002 - accepted because the files and flags of fit may set it
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Check ranks, disks, audio, memory and network before a run.

        Args:
            model: The model to train.
            datamodule: The data to train on.
            num_batches: Number of batches that each rank reads.
            timeout_s: Seconds that ranks wait for each other in each check.
            json: Print the result as JSON.
            ckpt_path: As for fit. Preflight only checks that the file exists.
            weights_only: As for fit. Preflight does not use it.
        """
        assert isinstance(model, NestModel)
        assert isinstance(datamodule, NestDataModule)
        show: Callable[[PreflightReport], None] = _print_json if json else _print_table
        config = PreflightConfig(num_batches=num_batches, timeout_s=timeout_s)
        self.exit_code = int(run_preflight(model, datamodule, self, config, show).has_failed)


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
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, _MIN_WIDTH)
    console.print(table)
    for line in report.problems():
        console.print(line, soft_wrap=True)

"""`nestmodel preflight`: what one runs before the expensive run, with the flags of `nestmodel fit`."""

import json as json_format
from collections.abc import Callable

from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from nestmodel import NestDataModule, NestModel, PreflightConfig, PreflightReport, run_preflight

_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
_LEAST_WIDTH = 100
_DEFAULTS = PreflightConfig()


class PreflightTrainer(Trainer):
    """A trainer with one more thing to do, from whose signature Lightning's command line takes the flags."""

    exit_code = 0

    def preflight(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        num_batches: int = _DEFAULTS.num_batches,
        timeout_s: float = _DEFAULTS.timeout_s,
        json: bool = False,
        ckpt_path: str | None = None,  # noqa: ARG002 - taken, so that the flags and files of fit can be
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> None:
        """Check ranks, disks, audio, memory and network before a run.

        Args:
            model: What is to be trained.
            datamodule: What it is to be trained on.
            num_batches: Batches that each rank reads.
            timeout_s: How long ranks wait for each other, in each check.
            json: Whether the report is printed as JSON.
            ckpt_path: As for fit; only looked at for whether it is there.
            weights_only: As for fit; not used.
        """
        assert isinstance(model, NestModel)
        assert isinstance(datamodule, NestDataModule)
        show: Callable[[PreflightReport], None] = _print_json if json else _print_table
        config = PreflightConfig(num_batches=num_batches, timeout_s=timeout_s)
        self.exit_code = int(run_preflight(model, datamodule, self, config, show).has_failed)


def _print_json(report: PreflightReport) -> None:
    print(json_format.dumps(report.as_dict(), indent=2))


def _print_table(report: PreflightReport) -> None:
    ranks = "rank" if report.world_size == 1 else "ranks"
    table = Table(title=f"preflight on {report.world_size} {ranks}, {report.device}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in report.checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", check.summary)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)
    for line in report.problems():
        console.print(line, markup=False, soft_wrap=True)

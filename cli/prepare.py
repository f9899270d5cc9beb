"""`nestdata prepare`: manifests in, one corpus directory out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestdata import ConfigError, PrepareConfig, PrepareReport, prepare

from .progress import progress


def prepare_command(
    manifests: Annotated[
        list[Path], typer.Argument(metavar="MANIFEST...", help="NeMo JSONL, Lhotse cuts, or folders of audio.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The corpus to make; NAME.corpus for one manifest NAME.json.")
    ] = None,
    sampling_rate: Annotated[int, typer.Option(help="Rate in Hz at which cuts will be loaded.")] = 16000,
    channel: Annotated[int, typer.Option(help="Channel read from files with several, from 0.")] = 0,
    min_seconds: Annotated[float, typer.Option(help="Leave out shorter cuts.")] = 0.1,
    max_seconds: Annotated[float | None, typer.Option(help="Leave out longer cuts. [default: keep all]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing corpus at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make one corpus from one or many manifests."""
    if output is None:
        if len(manifests) > 1:
            raise ConfigError("several manifests, and no name for the corpus: give one with -o NAME.corpus")
        output = Path(manifests[0].name.split(".")[0] + ".corpus")
    config = PrepareConfig(
        sampling_rate=sampling_rate, channel=channel, min_seconds=min_seconds, max_seconds=max_seconds
    )
    with progress("looking at audio") as on_progress:
        report = prepare(manifests, output, config, overwrite=overwrite, on_progress=on_progress)
    if as_json:
        print(json.dumps({**asdict(report), "path": str(report.path)}, indent=2))
    else:
        _print_summary(report)


def _print_summary(report: PrepareReport) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{report.path}: {report.num_cuts} cuts, {report.hours:.2f} h, {report.shortest_s:.2f} to ", end="")
    out.print(f"{report.longest_s:.2f} s")
    if report.num_resampled:
        out.print(f"  {report.num_resampled} will be resampled when they are read")
    if report.rejected:
        reasons = ", ".join(f"{number} {reason}" for reason, number in report.rejected.items())
        out.print(f"  left out: {reasons}; see {report.path / 'rejected.jsonl'}")

"""`nestdata prepare`: inputs in, one corpus directory out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestdata import ConfigError, InputFormat, PrepareConfig, PrepareReport, ProbeMode, prepare_corpus

from .progress import progress


def prepare_command(
    manifests: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="NeMo, Lhotse or fairseq manifests, Kaldi directories, Hugging Face data sets on disk, or folders.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The corpus to make; NAME.corpus for one input NAME.json.")
    ] = None,
    form: Annotated[
        InputFormat | None, typer.Option("--format", help="What every input is. [default: tell by looking]")
    ] = None,
    probe: Annotated[
        ProbeMode, typer.Option(help="Look at audio without a duration, at all headers, or decode everything.")
    ] = "all",
    strict: Annotated[bool, typer.Option("--strict", help="Fail where anything would be left out.")] = False,
    window: Annotated[float | None, typer.Option(help="Cut longer recordings into windows of at most so long.")] = None,
    sampling_rate: Annotated[int, typer.Option(help="Rate in Hz at which cuts will be loaded.")] = 16000,
    min_rate: Annotated[int, typer.Option(help="Leave out files of a lower rate.")] = 0,
    channel: Annotated[int, typer.Option(help="Channel read from files with several, from 0.")] = 0,
    min_seconds: Annotated[float, typer.Option(help="Leave out shorter cuts.")] = 0.1,
    max_seconds: Annotated[float | None, typer.Option(help="Leave out longer cuts. [default: keep all]")] = None,
    pcm: Annotated[bool, typer.Option("--pcm", help="Also decode all into one 16-bit file, as for noise.")] = False,
    allow_commands: Annotated[bool, typer.Option("--allow-commands", help="Run the commands of a wav.scp.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes that look at audio.")] = 1,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler that does it instead.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing corpus at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make one corpus from one or many inputs."""
    if output is None:
        if len(manifests) > 1:
            raise ConfigError("several inputs, and no name for the corpus: give one with -o NAME.corpus")
        output = Path(manifests[0].resolve().name.split(".")[0] + ".corpus")
    config = PrepareConfig(
        sampling_rate=sampling_rate,
        channel=channel,
        min_seconds=min_seconds,
        max_seconds=max_seconds,
        window_seconds=window,
        min_rate=min_rate,
        probe=probe,
        format=form,
        allow_commands=allow_commands,
        strict=strict,
        pcm=pcm,
    )
    with progress("looking at audio") as on_progress:
        report = prepare_corpus(
            manifests, output, config, overwrite=overwrite, jobs=jobs, dask=dask, on_progress=on_progress
        )
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
    out.print(f"  pictures: {report.path / 'report.html'}")

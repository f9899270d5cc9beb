"""`nestmodel features`: a model and inputs in, a directory of encoder features out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestmodel import (
    ExtractConfig,
    ExtractReport,
    FeatureType,
    FileFormat,
    extract_features,
    load_network,
    parse_layers,
)

from .progress import progress


def features_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint of `nestmodel fit`, or another model.")],
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT...", help="What `nestdata prepare` reads: manifests, folders; or corpora."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to make.")],
    layers: Annotated[
        str, typer.Option(help="all, last, or numbers such as 0,4,16; 0 is the input of the first block.")
    ] = "last",
    form: Annotated[FileFormat, typer.Option("--format", help="Kind of the files.")] = "npy",
    dtype: Annotated[FeatureType, typer.Option(help="Precision of the files.")] = "float32",
    max_batch_seconds: Annotated[float, typer.Option(help="Audio in a batch, padding included.")] = 120.0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:1; auto takes a GPU where there is one.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing features at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write what the encoder makes of audio, one file per utterance."""
    config = ExtractConfig(
        layers=parse_layers(layers), format=form, dtype=dtype, max_batch_seconds=max_batch_seconds, device=device
    )
    with progress("utterances") as on_progress:
        report = extract_features(
            load_network(model),
            inputs,
            output,
            config,
            overwrite=overwrite,
            model_name=str(model),
            on_progress=on_progress,
        )
    if as_json:
        print(json.dumps({**asdict(report), "path": str(report.path)}, indent=2))
    else:
        _print_summary(report)


def _print_summary(report: ExtractReport) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False)
    layers = "layer" if len(report.layers) == 1 else "layers"
    out.print(
        f"{report.path}: {report.num_utterances} utterances, {report.hours:.2f} h, {report.num_frames} frames at "
        f"{report.frame_rate_hz:g} Hz, {layers} {','.join(map(str, report.layers))} of dim {report.dim}"
    )
    if report.left_out:
        reasons = ", ".join(f"{number} {reason}" for reason, number in report.left_out.items())
        out.print(f"  left out: {reasons}; see {report.path / 'rejected.jsonl'}")
    out.print(f"  index: {report.path / 'index.jsonl'}")

"""`nestmodel features`: writes a directory of encoder features from a model and inputs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestcli.arguments.options import (
    AllowCommands,
    AsJson,
    AttentionContext,
    BatchSeconds,
    Device,
    InputArguments,
    ModelArgument,
    Overwrite,
    chosen_context,
)
from nestcli.output import console, print_json, rejected_text
from nestcli.progress import progress
from nestmodel import FeatureType, FileFormat

if TYPE_CHECKING:
    from nestmodel import ExtractReport


def features_command(
    model: ModelArgument,
    inputs: InputArguments,
    output: Annotated[Path, typer.Option("--output", "-o", help="Feature directory to write.")],
    layers: Annotated[
        str,
        typer.Option(
            help="Layers to keep: all, last, or numbers such as 0,4,16, where 0 is the input of the first block."
        ),
    ] = "last",
    form: Annotated[FileFormat, typer.Option("--format", help="Format of the feature files.")] = "npy",
    dtype: Annotated[FeatureType, typer.Option(help="Precision of the feature files.")] = "float32",
    context: AttentionContext = None,
    max_batch_seconds: BatchSeconds = 120.0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    allow_commands: AllowCommands = False,
    as_json: AsJson = False,
) -> None:
    """Extract encoder features, one file per utterance."""
    from nestmodel import ExtractConfig, extract_features, load_network, parse_layers

    config = ExtractConfig(
        layers=parse_layers(layers),
        format=form,
        dtype=dtype,
        max_batch_seconds=max_batch_seconds,
        device=device,
        allow_commands=allow_commands,
    )
    with progress("utterances") as on_progress:
        report = extract_features(
            load_network(model, chosen_context(context)),
            inputs,
            output,
            config,
            overwrite=overwrite,
            model_name=str(model),
            on_progress=on_progress,
        )
    if as_json:
        print_json(asdict(report))
    else:
        _print_summary(report)


def _print_summary(report: "ExtractReport") -> None:
    out = console()
    layers = "layer" if len(report.layers) == 1 else "layers"
    out.print(
        f"{report.path}: {report.num_utterances} utterances, {report.hours:.2f} h, {report.num_frames} frames at "
        f"{report.frame_rate_hz:g} Hz, {layers} {','.join(map(str, report.layers))} of dim {report.dim}"
    )
    if report.left_out:
        out.print(f"  {rejected_text(report.left_out, report.path)}")
    out.print(f"  index: {report.path / 'index.jsonl'}")

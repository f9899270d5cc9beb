"""`nestmodel export`: a model in, a file or directory for another tool out."""

from pathlib import Path
from typing import Annotated

import typer

from nestmodel import ExportFormat, WeightParts, export_model


def export_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint of `nestmodel fit`, or another model.")],
    to: Annotated[
        ExportFormat, typer.Option("--to", help="NeMo and safetensors can hold all, the others the encoder.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="What to make; NAME with the ending of the format.")
    ] = None,
    parts: Annotated[
        WeightParts | None, typer.Option(help="Of safetensors: all, or the encoder. [default: encoder]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there at the end.")] = False,
) -> None:
    """Write a model for NeMo, Hugging Face or ONNX, or its weights as safetensors."""
    print(export_model(model, to, output, parts=parts, overwrite=overwrite))

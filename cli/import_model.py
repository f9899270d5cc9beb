"""`nestmodel import`: another tool's model in, a checkpoint out."""

from pathlib import Path
from typing import Annotated

import typer

from nestmodel import import_model


def import_command(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="A .nemo file, or safetensors of a whole model.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The checkpoint; NAME.ckpt for NAME.nemo.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file at the end.")] = False,
) -> None:
    """Turn a model of NeMo into a checkpoint."""
    print(import_model(source, output, overwrite=overwrite))

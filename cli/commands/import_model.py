"""`nestmodel import`: converts a model of another tool to a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from ..arguments.options import Overwrite


def import_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A .nemo file, a safetensors file with a whole model, or a repository on the Hugging Face hub: "
            "hf://OWNER/NAME, hf://OWNER/NAME@REVISION/FILE.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Checkpoint to write. [default: NAME.ckpt for NAME.nemo]")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a NeMo or safetensors model, on disk or on the Hugging Face hub, to a checkpoint."""
    from nestmodel import import_model

    print(import_model(model, output, overwrite=overwrite))

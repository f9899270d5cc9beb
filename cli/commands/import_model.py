"""`nestmodel import`: converts a model of another tool to a checkpoint."""

from pathlib import Path
from typing import Annotated

from ..options import Overwrite
from ..parsing import Positionals, option


def import_command(
    model: Annotated[
        Path,
        Positionals,
        option(
            metavar="MODEL",
            help="A .nemo file, a safetensors file with a whole model, or a repository on the Hugging Face hub: "
            "hf://OWNER/NAME, hf://OWNER/NAME@REVISION/FILE.",
        ),
    ],
    *,
    output: Annotated[
        Path | None, option("-o", help="Checkpoint to write; by default NAME.ckpt for NAME.nemo.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a NeMo or safetensors model, on disk or on the Hugging Face hub, to a checkpoint."""
    from nestmodel import import_model

    print(import_model(model, output, overwrite=overwrite))

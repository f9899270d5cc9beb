"""`nestmodel average`: writes the mean of several checkpoints."""

from pathlib import Path
from typing import Annotated

from ..options import Overwrite
from ..parsing import Positionals, option


def average_command(
    models: Annotated[
        tuple[Path, ...], Positionals, option(metavar="MODEL", help="Checkpoints of one run, such as its last five.")
    ],
    *,
    output: Annotated[Path, option("-o", help="Checkpoint to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of several checkpoints."""
    from nestmodel import average_models

    print(average_models(models, output, overwrite=overwrite))

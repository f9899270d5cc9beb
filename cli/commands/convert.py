"""`nestmodel average`, `import` and `export`: model files made from other model files."""

from pathlib import Path
from typing import Annotated

from nestmodel import ExportFormat, WeightParts

from ..options import ModelArgument, Overwrite, chosen_context
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


def export_command(
    model: ModelArgument,
    *,
    to: Annotated[
        ExportFormat,
        option(
            help="Format to write. nemo holds the whole model, huggingface and onnx the encoder, onnx-streaming the "
            "encoder for one chunk, safetensors either."
        ),
    ],
    output: Annotated[
        Path | None,
        option("-o", help="File or directory to write; by default MODEL's name with a new suffix."),
    ] = None,
    parts: Annotated[
        WeightParts | None, option(help="Parts of the model in a safetensors file; by default the encoder.")
    ] = None,
    context: Annotated[
        str | None,
        option(
            metavar="LEFT,RIGHT",
            help="Attention context that the result keeps, of an encoder that was trained with several; by default, "
            "onnx keeps the first, onnx-streaming the first that can be streamed, and the other formats keep all.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a model to NeMo, Hugging Face, safetensors or ONNX."""
    from nestmodel import export_model

    print(export_model(model, to, output, parts=parts, context=chosen_context(context), overwrite=overwrite))

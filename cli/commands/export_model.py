"""`nestmodel export`: writes a model in the format of another tool."""

from pathlib import Path
from typing import Annotated

from nestmodel import ExportFormat, WeightParts

from ..options import ModelArgument, Overwrite, chosen_context
from ..parsing import option


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

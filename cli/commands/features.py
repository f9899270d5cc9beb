"""`nestmodel features`: writes a directory of encoder features from a model and inputs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nestmodel import ExtractConfig

from ..options import (
    AsJson,
    AttentionContext,
    InputArguments,
    ModelArgument,
    Overwrite,
    chosen_context,
)
from ..output import console, print_json, rejected_text
from ..parsing import Unprefixed, option
from ..progress import progress

if TYPE_CHECKING:
    from nestmodel import ExtractReport


def features_command(
    model: ModelArgument,
    inputs: InputArguments,
    *,
    output: Annotated[Path, option("-o", help="Feature directory to write.")],
    config: Annotated[ExtractConfig, Unprefixed] = ExtractConfig(),
    context: AttentionContext = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Extract encoder features, one file per utterance."""
    from nestmodel.training.starting.ranks import check_single_process

    check_single_process("features")
    from nestmodel import extract_features, load_network

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

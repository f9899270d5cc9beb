"""`nestmodel probe`: scores a linear probe on the encoder layers of a model, from labelled inputs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, BatchSeconds, Device, InputArguments, ModelArgument, Overwrite
from .output import console, print_json, rejected_text
from .progress import progress

if TYPE_CHECKING:
    from nestmodel import ProbeReport, ProbeScore


def probe_command(
    model: ModelArgument,
    inputs: InputArguments,
    label: Annotated[
        str, typer.Option(help="Label to predict: language, speaker, or any other field of the manifest.")
    ],
    held_out: Annotated[float, typer.Option(help="Share of each class that is held out for scoring.")] = 0.25,
    held_out_where: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE", help="Hold out the utterances with this value instead, such as split=test."
        ),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Keep utterances with the same value of this field, such as speaker, on one side of the split.",
        ),
    ] = None,
    train_per_class: Annotated[
        int | None, typer.Option(help="Maximum number of training utterances per class. [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the untrained encoder.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Directory for probe.json, probe.png and rejected.jsonl. [default: only print]"
        ),
    ] = None,
    max_batch_seconds: BatchSeconds = 120.0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a linear probe per encoder layer, beside an untrained encoder."""
    from nestmodel import ProbeConfig, load_network, run_probe

    config = ProbeConfig(
        label=label,
        held_out=held_out,
        held_out_where=held_out_where,
        group_by=group_by,
        train_per_class=train_per_class,
        seed=seed,
        max_batch_seconds=max_batch_seconds,
        device=device,
    )
    with progress("probing") as on_progress:
        report = run_probe(
            load_network(model),
            inputs,
            config,
            output,
            overwrite=overwrite,
            model_name=str(model),
            on_progress=on_progress,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        _print_summary(report, output)


def _print_summary(report: "ProbeReport", output: Path | None) -> None:
    from rich.table import Table

    out = console()
    table = Table("layer", "trained, %", "untrained, %")
    for layer, (trained, untrained) in enumerate(zip(report.trained, report.untrained, strict=True)):
        table.add_row(str(layer), _percent(trained), _percent(untrained))
    table.add_row("all together", _percent(report.trained_together), _percent(report.untrained_together))
    out.print(table)
    out.print(f"log-mel statistics: {_percent(report.log_mel)}   chance: {_percent(report.chance)}   (95 % intervals)")
    out.print(
        f"{report.config.label}: {len(report.classes)} classes, {report.num_train} training utterances, "
        f"{report.num_held_out} held out"
    )
    if report.num_unlabelled:
        out.print(f"without the label or its group: {report.num_unlabelled} utterances")
    for name, reason in report.excluded_classes.items():
        out.print(f"excluded class: {name}: {reason}")
    if report.left_out:
        out.print(rejected_text(report.left_out, output))
    if output is not None:
        out.print(f"picture: {output / 'probe.png'}")


def _percent(score: "ProbeScore") -> str:
    return f"{100 * score.accuracy:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"

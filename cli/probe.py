"""`nestmodel probe`: a model and labelled inputs in, accuracy of a linear probe out."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestmodel import ProbeConfig, ProbeReport, ProbeScore, load_network, run_probe

from .progress import progress


def probe_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint of `nestmodel fit`, or another model.")],
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT...", help="What `nestdata prepare` reads: manifests, folders; or corpora."),
    ],
    label: Annotated[str, typer.Option(help="What is predicted: language, speaker, or any field of the manifest.")],
    held_out: Annotated[float, typer.Option(help="Share of each class that is scored.")] = 0.25,
    held_out_where: Annotated[
        str | None, typer.Option(help="A field and its value, such as split=test: what is scored instead of a share.")
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(help="A field, such as speaker, each value of which stays on one side of the split.")
    ] = None,
    train_per_class: Annotated[
        int | None, typer.Option(help="At most so many utterances of a class to train on. [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split and of the untrained encoder.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory for probe.json, probe.png and rejected.jsonl.")
    ] = None,
    max_batch_seconds: Annotated[float, typer.Option(help="Audio in a batch, padding included.")] = 120.0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:1; auto takes a GPU where there is one.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier probe at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Tell how well a line reads a label off the encoder's layers, trained and not."""
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
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_summary(report, output)


def _print_summary(report: ProbeReport, output: Path | None) -> None:
    out = Console(highlight=False, markup=False)
    table = Table("layer", "trained, %", "untrained, %")
    for layer, (trained, untrained) in enumerate(zip(report.trained, report.untrained, strict=True)):
        table.add_row(str(layer), _percent(trained), _percent(untrained))
    table.add_row("all together", _percent(report.trained_together), _percent(report.untrained_together))
    out.print(table)
    lines = [
        f"log-mel statistics: {_percent(report.log_mel)}   chance: {_percent(report.chance)}   (95 % intervals)",
        f"{report.config.label}: {len(report.classes)} classes, {report.num_train} utterances to train on, "
        f"{report.num_held_out} held out",
    ]
    if report.num_unlabelled:
        lines.append(f"without the label or its group: {report.num_unlabelled} utterances")
    for name, why in report.excluded_classes.items():
        lines.append(f"class left out: {name}: {why}")
    if report.left_out:
        reasons = ", ".join(f"{number} {reason}" for reason, number in report.left_out.items())
        lines.append(f"left out: {reasons}" + ("" if output is None else f"; see {output / 'rejected.jsonl'}"))
    if output is not None:
        lines.append(f"picture: {output / 'probe.png'}")
    for line in lines:
        out.print(line, soft_wrap=True)


def _percent(score: ProbeScore) -> str:
    return f"{100 * score.accuracy:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"

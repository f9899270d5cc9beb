"""`nestmodel probe`: measures what the encoder of a model has learned, beside baselines.

The tasks share one command; an option of another task is refused. Defaults that differ between tasks are those of the
configurations, so their options are None here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nestcli.arguments.errors import UsageError
from nestcli.arguments.options import (
    AllowCommands,
    AsJson,
    AttentionContext,
    BatchSeconds,
    Device,
    InputArguments,
    ModelArgument,
    Overwrite,
    chosen_context,
)
from nestcli.output import print_json
from nestcli.progress import progress

from .probe_summary import print_ctc_summary, print_frame_summary, print_label_summary

ProbeTask = Literal["labels", "ctc", "frames"]
FrameUnits = Literal["mfcc", "characters"]

OPTIONS: dict[ProbeTask, frozenset[str]] = {
    "labels": frozenset({"label", "held_out", "held_out_where", "group_by", "train_per_class"}),
    "ctc": frozenset(
        {
            *("test", "held_out", "group_by", "baselines", "labels_per_frame", "learning_rates", "max_epochs"),
            *("patience", "probe_seeds", "hidden", "each_layer"),
        }
    ),
    "frames": frozenset({"test", "held_out", "group_by", "max_epochs", "patience", "units", "num_units"}),
}
"""Options of each task that another task lacks: fields of its configuration, and `test`."""

_NEEDED: dict[ProbeTask, str] = {"labels": "label", "ctc": "test", "frames": "test"}


def probe_command(
    model: ModelArgument,
    inputs: InputArguments,
    task: Annotated[
        ProbeTask,
        typer.Option(
            help="What is predicted: labels of utterances, characters by CTC, or acoustic units of single frames."
        ),
    ] = "labels",
    label: Annotated[
        str | None, typer.Option(help="labels: label to predict: language, speaker, or any field of the manifest.")
    ] = None,
    test: Annotated[
        list[Path] | None,
        typer.Option(metavar="INPUT", help="ctc, frames: utterances to score, of other recordings. May be repeated."),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Share that is held out: of each class for scoring with labels, of the training utterances for the "
            "choice of learning rate and epoch otherwise. [default: with labels 0.25, else 0.1]"
        ),
    ] = None,
    held_out_where: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE", help="labels: hold out the utterances with this value instead, such as split=test."
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
        int | None, typer.Option(help="labels: maximum number of training utterances per class. [default: all]")
    ] = None,
    baselines: Annotated[
        str | None,
        typer.Option(help="ctc: what the encoder is compared with, or none. [default: untrained,log_mel]"),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="ctc: width of a hidden layer of the heads. [default: none, a linear map]")
    ] = None,
    each_layer: Annotated[
        bool | None,
        typer.Option("--each-layer", help="ctc: score each layer as well, by heads of its own. [default: off]"),
    ] = None,
    labels_per_frame: Annotated[
        int | None,
        typer.Option(help="ctc: labels predicted from each encoder frame. [default: as few as give 25 per second]"),
    ] = None,
    learning_rates: Annotated[
        str | None, typer.Option(help="ctc: learning rates to choose from. [default: 0.005,0.02,0.08]")
    ] = None,
    max_epochs: Annotated[
        int | None, typer.Option(help="ctc, frames: maximum number of epochs. [default: ctc 30, frames 10]")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="ctc, frames: epochs without improvement. [default: ctc 30, frames 3]")
    ] = None,
    probe_seeds: Annotated[str | None, typer.Option(help="ctc: seeds of the heads. [default: 0,1,2]")] = None,
    units: Annotated[
        FrameUnits | None,
        typer.Option(help="frames: units of MFCCs, or characters by alignment of the texts. [default: mfcc]"),
    ] = None,
    num_units: Annotated[
        int | None, typer.Option(help="frames: number of k-means clusters, and of units of MFCCs. [default: 100]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the untrained encoder.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Directory for the report, its picture and the rejects. [default: only print]"
        ),
    ] = None,
    context: AttentionContext = None,
    max_batch_seconds: BatchSeconds = 120.0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    allow_commands: AllowCommands = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate what the encoder has learned, beside an untrained encoder and log-mels."""
    given: dict[str, Any] = {
        "label": label,
        "test": test,
        "held_out": held_out,
        "held_out_where": held_out_where,
        "group_by": group_by,
        "train_per_class": train_per_class,
        "baselines": _baseline_names(baselines),
        "hidden": hidden,
        "each_layer": each_layer,
        "labels_per_frame": labels_per_frame,
        "learning_rates": _numbers("learning-rates", learning_rates, float),
        "max_epochs": max_epochs,
        "patience": patience,
        "probe_seeds": _numbers("probe-seeds", probe_seeds, int),
        "units": units,
        "num_units": num_units,
    }
    options = _options_of(task, {name: value for name, value in given.items() if value is not None})
    settings = {
        "seed": seed,
        "max_batch_seconds": max_batch_seconds,
        "device": device,
        "allow_commands": allow_commands,
    }
    _run(task, model, context, inputs, {**options, **settings}, output, overwrite=overwrite, as_json=as_json)


def _run(
    task: ProbeTask,
    model: Path,
    context: str | None,
    inputs: list[Path],
    settings: dict[str, Any],
    output: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    from nestmodel import (
        CtcProbeConfig,
        FrameProbeConfig,
        ProbeConfig,
        load_network,
        run_ctc_probe,
        run_frame_probe,
        run_probe,
    )

    tasks: dict[ProbeTask, tuple[type[Any], Callable[..., Any], Callable[[Any, Path | None], None]]] = {
        "labels": (ProbeConfig, run_probe, print_label_summary),
        "ctc": (CtcProbeConfig, run_ctc_probe, print_ctc_summary),
        "frames": (FrameProbeConfig, run_frame_probe, print_frame_summary),
    }
    config, run, print_summary = tasks[task]
    sides = [inputs, settings.pop("test")] if "test" in settings else [inputs]
    network = load_network(model, chosen_context(context))
    with progress("probing") as on_progress:
        report = run(
            *(network, *sides, config(**settings), output),
            overwrite=overwrite,
            model_name=str(model),
            on_progress=on_progress,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        print_summary(report, output)


def _options_of(task: ProbeTask, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that were given.

    Raises:
        UsageError: An option belongs to another task, or one is missing.
    """
    for name in given:
        if name not in OPTIONS[task]:
            tasks = " or ".join(other for other, names in OPTIONS.items() if name in names)
            raise UsageError(f"{_flag(name)} belongs to --task {tasks}, and the task is {task}.")
    if _NEEDED[task] not in given:
        raise UsageError(f"--task {task} needs {_flag(_NEEDED[task])}.")
    return dict(given)


def _numbers(name: str, text: str | None, kind: type[int] | type[float]) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(kind(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} is {text!r}: give numbers separated by commas.") from None


def _baseline_names(text: str | None) -> tuple[str, ...] | None:
    names = None if text is None else () if text == "none" else tuple(text.split(","))
    if names and not set(names) <= {"untrained", "log_mel"}:
        raise UsageError(f"--baselines is {text!r}: give untrained, log_mel, both with a comma between them, or none.")
    return names


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

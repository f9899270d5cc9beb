"""`nestmodel probe`: measures what the encoder of a model has learned, beside baselines; one command for each task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nestmodel import CtcProbeConfig, ProbeConfig

from ..options import AsJson, AttentionContext, InputArguments, ModelArgument, Overwrite, chosen_context
from ..output import console, print_json, rejected_text
from ..parsing import Repeatable, Unprefixed, option
from ..progress import progress

if TYPE_CHECKING:
    from nestmodel import CtcProbeReport, ProbeReport

_Output = Annotated[
    Path | None, option("-o", help="Directory for the report and the rejects; without it, the result is only printed.")
]


def probe_label_command(
    model: ModelArgument,
    inputs: InputArguments,
    *,
    config: Annotated[ProbeConfig, Unprefixed],
    output: _Output = None,
    context: AttentionContext = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Predict a label of utterances from the encoder, an untrained encoder and log-mels."""
    from nestmodel import load_network, run_probe

    network = load_network(model, chosen_context(context))
    with progress("probing") as show:
        report = run_probe(
            network, inputs, config, output, overwrite=overwrite, model_name=str(model), on_progress=show
        )
    if as_json:
        return print_json(report.to_dict())
    _print_label_summary(report, output)


def probe_characters_command(
    model: ModelArgument,
    inputs: InputArguments,
    *,
    test: Annotated[
        tuple[str, ...],
        Repeatable,
        option(metavar="INPUT", help="Transcribed utterances to score, of other recordings; may be repeated."),
    ],
    config: Annotated[CtcProbeConfig, Unprefixed] = CtcProbeConfig(),
    output: _Output = None,
    context: AttentionContext = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Recognise characters by a linear CTC head on the encoder, an untrained encoder and log-mels."""
    from nestdata import ConfigError
    from nestmodel import load_network, run_ctc_probe

    if not test:
        raise ConfigError("give transcribed utterances to score with --test INPUT.")
    network = load_network(model, chosen_context(context))
    with progress("probing") as show:
        report = run_ctc_probe(
            network, inputs, test, config, output, overwrite=overwrite, model_name=str(model), on_progress=show
        )
    if as_json:
        return print_json(report.to_dict())
    _print_ctc_summary(report, output)


def _print_label_summary(report: "ProbeReport", output: Path | None) -> None:
    """Prints the accuracy of the contestants and of chance."""
    from rich.table import Table

    from nestmodel.evaluate.error_rates import percent

    out = console()
    table = Table("features", "accuracy, % (95 % interval)")
    for name in ("trained", "untrained", "log_mel", "chance"):
        table.add_row(_name(name), percent(getattr(report, name)))
    out.print(table)
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
        out.print(f"report: {output / 'probe.json'}")


def _print_ctc_summary(report: "CtcProbeReport", output: Path | None) -> None:
    """Prints the error rates of the contestants, and the differences."""
    from rich.table import Table

    from nestmodel.evaluate.error_rates import percent

    out = console()
    table = Table("features", "CER, %", "WER, %", "learning rate")
    for score in report.contestants:
        rates = (percent(score.characters), percent(score.words))
        table.add_row(_name(score.name), *rates, f"{score.learning_rate:g}")
    out.print(table)
    for difference in report.differences:
        out.print(
            f"CER, trained minus {_name(difference.baseline)}: {percent(difference.characters)} percentage points"
        )
    if report.differences and report.at_an_edge:
        names = ", ".join(map(_name, report.at_an_edge))
        out.print(
            "The learning rate may explain a part of these differences: the lowest or the highest one was best for "
            f"{names}. Give rates beyond it with --learning-rates."
        )
    out.print(
        f"{report.num_training} training utterances, {report.num_held_out} held out, {report.num_test} test "
        f"utterances; {len(report.alphabet)} characters (95 % intervals)"
    )
    for side, reasons in report.left_out.items():
        if reasons:
            out.print(f"{side}: " + rejected_text(reasons, None))
    if output is not None:
        out.print(f"report: {output / 'probe.json'}")


def _name(contestant: str) -> str:
    return contestant.replace("_", "-")

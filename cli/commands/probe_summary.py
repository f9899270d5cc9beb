"""What `nestmodel probe` prints: one table for each task."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..output import console, rejected_text

if TYPE_CHECKING:
    from nestmodel import CtcProbeReport, ErrorRate, Estimate, ProbeReport, ProbeScore


def print_label_summary(report: "ProbeReport", output: Path | None) -> None:
    """Prints the accuracy of the contestants and of chance."""
    from rich.table import Table

    out = console()
    table = Table("features", "accuracy, % (95 % interval)")
    table.add_row("trained", _percent(report.trained))
    table.add_row("untrained", _percent(report.untrained))
    table.add_row("log-mel", _percent(report.log_mel))
    table.add_row("chance", _percent(report.chance))
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
        out.print(f"report: {output / 'report.md'}")


def print_ctc_summary(report: "CtcProbeReport", output: Path | None) -> None:
    """Prints the error rates of the contestants, and the differences."""
    from rich.table import Table

    out = console()
    table = Table("features", "CER, %", "WER, %", "learning rate")
    for score in report.contestants:
        rates = (_percent(score.characters), _percent(score.words))
        table.add_row(_name(score.name), *rates, f"{score.learning_rate:g}")
    out.print(table)
    for difference in report.differences:
        out.print(
            f"CER, trained minus {_name(difference.baseline)}: {_percent(difference.characters)} percentage points"
        )
    out.print(
        f"{report.num_training} training utterances, {report.num_held_out} held out, {report.num_test} test "
        f"utterances; {len(report.alphabet)} characters (95 % intervals)"
    )
    _print_rejects(report.left_out, output)


def _print_rejects(left_out: dict[str, dict[str, int]], output: Path | None) -> None:
    out = console()
    for side, reasons in left_out.items():
        if reasons:
            out.print(f"{side}: " + rejected_text(reasons, None))
    if output is not None:
        out.print(f"report: {output / 'report.md'}")


def _name(contestant: str) -> str:
    return contestant.replace("_", "-")


def _percent(score: "ProbeScore | ErrorRate | Estimate") -> str:
    """Returns a value and its interval, the first three fields of each kind of score."""
    value, low, high = score[:3]
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"

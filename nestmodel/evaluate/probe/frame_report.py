"""Settings and result of the frame probe: configuration, scores by layer, the report in Markdown, its plot."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestmodel.evaluate.error_rates import Estimate, percent
from nestmodel.evaluate.frame_units import ClusterScore
from nestmodel.evaluate.probe.contestants import contestant_name
from nestmodel.evaluate.probe.frame_classifier import FRAMES_PER_STEP, LEARNING_RATE
from nestmodel.evaluate.probe.report import draw_layers, plain, table, unusable_lines
from nestmodel.evaluate.probe.utterances import split_name
from nestmodel.evaluate.probe_config import Contestant, FrameProbeConfig
from nestmodel.figures import GREY, finish_axes, new_figure


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerScore:
    """Result of one layer of one contestant on the test frames."""

    contestant: Contestant
    layer: int
    """0 is the input of the first block, i the output of block i; log-mels have only layer 0."""

    accuracy: Estimate
    """Share of the frames whose unit is predicted; the interval draws utterances."""

    clusters: ClusterScore
    """Agreement of k-means clusters of the layer with the units."""

    best_epoch: int
    num_epochs: int
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDifference:
    """Accuracy of a layer of the trained encoder minus that of a baseline, with a paired bootstrap interval."""

    layer: int
    baseline: Contestant
    accuracy: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameProbeReport:
    """Scores of a frame probe, and what they were computed from."""

    config: FrameProbeConfig
    model: str
    frame_rate_hz: float
    num_training: int
    """Number of utterances for training; the counts of frames are those that were used."""

    num_held_out: int
    num_test: int
    intervals_over: str
    """What the bootstrap draws, such as "10 groups of `scene`"."""

    num_training_frames: int
    num_held_out_frames: int
    num_test_frames: int
    chance: Estimate
    """Accuracy of always predicting the most frequent unit of the training frames."""

    alphabet: str | None
    """The characters, if they are the units."""

    layers: list[LayerScore]
    differences: list[LayerDifference]
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of unusable utterances by reason, of the training and of the test corpus."""

    @property
    def num_units(self) -> int:
        """Number of units that are predicted."""
        return self.config.num_units if self.alphabet is None else len(self.alphabet)

    def scores(self, name: Contestant) -> list[LayerScore]:
        """Returns the scores of a contestant by layer."""
        return [score for score in self.layers if score.contestant == name]

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `probe.json`."""
        return {"kind": "probe", "task": "frames", **plain(self)}


def frame_markdown(report: FrameProbeReport) -> str:
    """Returns the content of `report.md`."""
    return "\n".join([*_results(report), *_training(report)]) + "\n"


def draw_frame_probe(report: FrameProbeReport, picture: Path) -> None:
    """Plots accuracy over layers with 95 % intervals, and the agreement of clusters."""
    figure = new_figure(9.0, 4.2)
    left, right = figure.subplots(1, 2)
    encoders: tuple[Contestant, ...] = ("trained", "untrained")
    for name in encoders:
        draw_layers(left, name, [score.accuracy for score in report.scores(name)], scale=100.0)
        draw_layers(right, name, [(score.clusters.normalised_information,) for score in report.scores(name)])
    (log_mel,) = report.scores("log_mel")
    left.axhline(100 * log_mel.accuracy.value, color=GREY, linestyle="-.", label="log-mel")
    left.axhline(100 * report.chance.value, color=GREY, linestyle=":", label="most frequent unit")
    right.axhline(log_mel.clusters.normalised_information, color=GREY, linestyle="-.", label="log-mel")
    left.set_ylabel("accuracy on test frames, %")
    right.set_ylabel("normalised mutual information")
    finish_axes(left, f"linear classifier, {_units_name(report)}", has_legend=True)
    finish_axes(right, "clusters of the layer and units", has_legend=False)
    figure.savefig(picture, dpi=110)


def _units_name(report: FrameProbeReport) -> str:
    if report.alphabet is not None:
        return f"{len(report.alphabet)} characters"
    return f"{report.config.num_units} units of MFCCs"


def _results(report: FrameProbeReport) -> Iterator[str]:
    yield f"# Frame probe of {report.model or 'a model'}"
    yield ""
    yield (
        f"How well frames of {1000 / report.frame_rate_hz:.0f} ms predict {_units_name(report)}. Accuracy of a linear "
        f"classifier in %, with 95 % bootstrap intervals over {report.intervals_over}; {report.num_test} test "
        f"utterances ({report.num_test_frames} frames). Always predicting the most frequent unit: "
        f"{percent(report.chance)}. PNMI and purity compare {report.config.num_units} k-means clusters of the features "
        "with the units."
    )
    yield ""
    yield from table(
        "features | layer | accuracy | PNMI | purity | best epoch | epochs | steps", map(_layer_row, report.layers)
    )
    yield "Trained minus baseline, in percentage points (paired bootstrap):"
    yield ""
    yield from table(
        "layer | baseline | accuracy",
        (
            f"{difference.layer} | {contestant_name(difference.baseline)} | {percent(difference.accuracy)}"
            for difference in report.differences
        ),
    )


def _layer_row(score: LayerScore) -> str:
    clusters = f"{score.clusters.normalised_information:.3f} | {score.clusters.purity:.3f}"
    training = f"{score.best_epoch} | {score.num_epochs} | {score.num_steps}"
    return f"{contestant_name(score.contestant)} | {score.layer} | {percent(score.accuracy)} | {clusters} | {training}"


def _training(report: FrameProbeReport) -> Iterator[str]:
    config = report.config
    yield "## Training of the classifiers"
    yield ""
    yield (
        f"{report.num_training} utterances ({report.num_training_frames} frames) for training; {report.num_held_out} "
        f"({report.num_held_out_frames} frames) held out, {split_name(config.group_by)}, which select the epoch by "
        "their accuracy. Dimensions are standardised with the training frames. Adam, "
        f"{FRAMES_PER_STEP} frames per step; the learning rate falls linearly from {LEARNING_RATE:g} to 0 over "
        f"{config.max_epochs} epochs, and training ends early after {config.patience} epochs without improvement. "
        f"Seed of the split, the units, the classifiers, the untrained encoder and the bootstrap: {config.seed}."
    )
    if report.alphabet is not None:
        yield "The characters are those of a forced alignment by CTC heads of all features, whose probabilities are"
        yield "averaged. Frames with a blank get the nearest character, frames with two characters the first. Alphabet:"
        yield f"`{report.alphabet}`."
    yield from unusable_lines(report.left_out)

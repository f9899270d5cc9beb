"""Settings and result of the content probe: configuration, scores, their plot."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestmodel.evaluate.error_rates import ErrorRate, Estimate
from nestmodel.evaluate.probe.contestants import contestant_name
from nestmodel.evaluate.probe.report import COLOURS, plain
from nestmodel.evaluate.probe_config import Contestant, CtcProbeConfig
from nestmodel.evaluate.text import NORMALISATION
from nestmodel.figures import finish_axes, new_figure

NUM_EXAMPLES = 5
"""Number of test utterances whose transcripts are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedScore:
    """Result of one head: how it was trained, and its errors on the test utterances."""

    seed: int
    held_out_error_rate: float
    """Character error rate of the held-out utterances after the best epoch."""

    best_epoch: int
    num_epochs: int
    num_steps: int
    layer_weights: list[float]
    """Learned weights of the layers, which add up to 1; layer 0 is the input of the first block."""

    characters: ErrorRate
    words: ErrorRate


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestantScore:
    """Result of one feature set."""

    name: Contestant
    num_parameters: int
    """Number of parameters of a head."""

    learning_rate: float
    held_out_error_rates: dict[float, float]
    """Held-out character error rate by learning rate, the mean over the seeds."""

    seeds: list[SeedScore]
    characters: ErrorRate
    """Error rate over the test utterances, with the errors of all seeds added up."""

    words: ErrorRate


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Error rate of the trained encoder minus that of a baseline, on the same utterances; below 0 it is better."""

    baseline: Contestant
    characters: Estimate
    words: Estimate
    characters_by_seed: list[Estimate]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A test utterance with its transcripts by the heads of the first seed."""

    cut_id: str
    reference: str
    hypotheses: dict[Contestant, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CtcProbeReport:
    """Scores of a content probe, and what they were computed from."""

    config: CtcProbeConfig
    model: str
    alphabet: str
    """Characters of the training texts."""

    unknown_characters: dict[str, int]
    """Characters of the test texts that are not in the alphabet; each occurrence is an error."""

    frame_rate_hz: float
    num_training: int
    num_held_out: int
    num_test: int
    intervals_over: str
    """What the bootstrap draws, such as "10 groups of `scene`"."""

    num_too_fast: dict[str, int]
    """Utterances with more characters than label frames: of the training corpus, which are left out; of the test
    corpus, which are scored."""

    num_known_texts: int
    """Number of test utterances whose text is also the text of a training utterance."""

    contestants: list[ContestantScore]
    differences: list[Difference]
    examples: list[Example]
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of unusable utterances by reason, of the training and of the test corpus."""

    def score(self, name: Contestant) -> ContestantScore:
        """Returns the score of a contestant."""
        return next(score for score in self.contestants if score.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `probe.json`."""
        return {"kind": "probe", "task": "ctc", "normalisation": list(NORMALISATION), **plain(self)}


def draw_ctc_probe(report: CtcProbeReport, picture: Path) -> None:
    """Plots the character error rates with their intervals, and the rates of single seeds."""
    figure = new_figure(6.0, 4.2)
    axis = figure.subplots()
    for position, score in enumerate(report.contestants):
        rate, low, high = (100 * value for value in score.characters[:3])
        axis.bar([position], [rate], 0.6, color=COLOURS[score.name], alpha=0.6)
        axis.errorbar([position], [rate], [[rate - low], [high - rate]], fmt="none", ecolor="black", capsize=4)
        singles = [100 * seed.characters.rate for seed in score.seeds]
        axis.plot([position + 0.2] * len(singles), singles, "o", color="black", markersize=3)
    axis.set_xticks(range(len(report.contestants)), [contestant_name(score.name) for score in report.contestants])
    axis.set_ylabel("character error rate, %")
    finish_axes(axis, f"{report.num_test} test utterances; 95 % intervals; points: seeds", has_legend=False)
    figure.savefig(picture, dpi=110)

"""Tells which scores without labels follow the content of an encoder, over settings and over time.

    python -m benchmarks run scores OUTPUT --corpus held_out.corpus --noise noise.corpus \
        --model "baseline/0/840=a.ckpt=probes/a/probe.json" --model "baseline/0/1680=b.ckpt=probes/b/probe.json"

Names are SETTING/SEED/STEP. The last part is the result of `nestmodel probe --task ctc` for the checkpoint, whose rate
of errors in characters is the content. Every checkpoint is scored on the same held-out audio with `score_features`, and
each score is compared with the content by the rank correlation of Spearman: over all checkpoints, over the settings and
seeds at equal steps, and over the steps of each run. A call that was interrupted goes on where it ended; a later call
may have more checkpoints. `--quick` takes one minute of audio, to check that everything runs.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.report import Report, machine, versions
from nestdata import Corpus
from nestmodel import FeatureScoreConfig, load_network, score_features
from nestmodel.formats.model_file import open_model_file
from nestmodel.formats.training_record import record_of

LOSS = "training loss"
"""Mean of the last step before the checkpoint, minus the entropy of its tokens: the baseline of all scores."""

NUM_RESAMPLES = 2_000
MIN_RUNS = 5
QUICK = None
Numbers = NDArray[np.float64]


class Point(NamedTuple):
    """A checkpoint, its content and its scores."""

    setting: str
    seed: str
    step: int
    content: float
    """Errors in characters, as a share."""

    scores: dict[str, float]

    @property
    def run(self) -> str:
        """Name of the run that wrote the checkpoint."""
        return f"{self.setting}/{self.seed}"


class Correlation(NamedTuple):
    """Rank correlation of a score and the errors."""

    value: float
    low: float
    high: float
    """Bounds of the 95 % bootstrap interval over runs; NaN with fewer than `MIN_RUNS` of them."""

    num_points: int
    num_strata: int
    """Number of strata with at least two points, within which ranks are taken."""


def main() -> int:
    """Scores all checkpoints and writes the results."""
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.num_threads)
    corpus, noise = (None if path is None else Corpus.open(path) for path in (arguments.corpus, arguments.noise))
    assert corpus is not None
    config = FeatureScoreConfig(seconds=arguments.seconds)
    kept = {"corpus": corpus.fingerprint, "noise": "" if noise is None else noise.fingerprint, "config": repr(config)}
    keep_settings(arguments.output, kept)
    points = []
    for given in arguments.model:
        name, checkpoint, probe = given.split("=")
        setting, seed, step = name.split("/")
        scores = _scores(arguments.output, Path(checkpoint), corpus, noise, config)
        points.append(Point(setting, seed, int(step), _content(Path(probe)), scores))
        print(f"{name}: {100 * points[-1].content:.1f} % errors in characters", flush=True)
    _print(arguments, points, corpus, config)
    return 0


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, quick={"seconds": 60.0})
    parser.add_argument("output", type=Path)
    parser.add_argument("--corpus", type=Path, required=True, help="held-out speech, prepared by `nestdata prepare`")
    parser.add_argument("--noise", type=Path, help="noise corpus; white noise without one")
    parser.add_argument(
        "--model", action="append", required=True, metavar="SETTING/SEED/STEP=CHECKPOINT=PROBE", help="may be repeated"
    )
    parser.add_argument("--note", default="", help="text of the result: which lines were scored, and what for")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=FeatureScoreConfig().seconds, help="of audio [%(default)s]")
    arguments = parser.parse_args()
    for given in arguments.model:
        name, *paths = given.split("=")
        if len(paths) != 2 or name.count("/") != 2 or not name.rpartition("/")[2].isdecimal():
            parser.error(f"--model {given!r}: give SETTING/SEED/STEP=CHECKPOINT=PROBE")
    return arguments


def _scores(
    output: Path, checkpoint: Path, corpus: Corpus, noise: Corpus | None, config: FeatureScoreConfig
) -> dict[str, float]:
    """Returns the scores of a checkpoint, which are computed once."""
    with open_model_file(checkpoint) as file:
        record = record_of(file.entry)
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()[:16]
    path = output / f"{digest}.json"
    if not path.exists():
        path.write_text(json.dumps(score_features(load_network(checkpoint), corpus, noise, config)))
    metrics = {} if record is None else record.train_metrics
    loss = {LOSS: metrics["loss"] - metrics["token_entropy"]} if {"loss", "token_entropy"} <= set(metrics) else {}
    found: dict[str, float] = {**loss, **json.loads(path.read_text())}
    return found


def _content(probe: Path) -> float:
    contestants = json.loads(probe.read_text(encoding="utf-8"))["contestants"]
    (rate,) = (one["characters"]["rate"] for one in contestants if one["name"] == "trained")
    return float(rate)


def rank_correlation(points: Sequence[Point], score: str, stratum: Callable[[Point], object]) -> Correlation:
    """Returns Spearman's correlation of a score and the errors within strata: -1 if the score orders all as the errors.

    Within each stratum, both are replaced by their ranks minus the mean rank; the correlation is that of all of them.
    The interval resamples whole runs, whose checkpoints are not independent.

    Args:
        points: Checkpoints.
        score: Name of the score.
        stratum: Returns a key; only points with the same key are compared.
    """
    runs = sorted({point.run for point in points})
    by_run = {run: [point for point in points if point.run == run] for run in runs}
    generator = np.random.default_rng(0)
    drawn: list[float] = []
    value, num_points, num_strata = _within_strata(points, score, stratum)
    for _ in range(NUM_RESAMPLES if min(len(runs), num_points) >= MIN_RUNS else 0):
        sample = [point for run in generator.choice(runs, len(runs)) for point in by_run[str(run)]]
        drawn.append(_within_strata(sample, score, stratum)[0])
    kept = np.array([one for one in drawn if not np.isnan(one)])
    low, high = np.quantile(kept, (0.025, 0.975)) if len(kept) else (float("nan"), float("nan"))
    return Correlation(value, float(low), float(high), num_points, num_strata)


def _within_strata(points: Sequence[Point], score: str, stratum: Callable[[Point], object]) -> tuple[float, int, int]:
    """Returns the correlation, and the numbers of points and strata; NaN if nothing differs."""
    strata: dict[object, list[Point]] = {}
    for point in points:
        strata.setdefault(stratum(point), []).append(point)
    groups = [group for group in strata.values() if len(group) > 1]
    if not groups:
        return float("nan"), 0, 0
    readers: tuple[Callable[[Point], float], ...] = (lambda point: point.scores[score], lambda point: point.content)
    scores, errors = (
        np.concatenate([_centred_ranks([read(point) for point in group]) for group in groups]) for read in readers
    )
    scale = float(np.sqrt((scores @ scores) * (errors @ errors)))
    return (float(scores @ errors) / scale if scale else float("nan")), len(scores), len(groups)


def _centred_ranks(values: Sequence[float]) -> Numbers:
    """Returns ranks minus their mean; equal values share the mean of their ranks."""
    array = np.array(values)
    ranks = np.array([(array < one).sum() + ((array == one).sum() - 1) / 2 for one in array], np.float64)
    centred: Numbers = ranks - ranks.mean()
    return centred


COMPARISONS: dict[str, Callable[[Point], object]] = {
    "all checkpoints": lambda _: None,
    "settings and seeds, equal steps": lambda point: point.step,
    "steps of one run": lambda point: point.run,
}


def _print(arguments: argparse.Namespace, points: list[Point], corpus: Corpus, config: FeatureScoreConfig) -> None:
    names = [name for name in points[0].scores if all(name in point.scores for point in points)]
    rows = {name: [rank_correlation(points, name, of) for of in COMPARISONS.values()] for name in names}
    ordered = sorted(names, key=lambda name: np.nan_to_num(rows[name][0].value, nan=2.0))
    heads = [f"{what}: {one.num_points} points" for what, one in zip(COMPARISONS, rows[names[0]], strict=True)]
    num_runs, num_settings = len({point.run for point in points}), len({point.setting for point in points})
    report = Report(
        "Scores without labels, and content",
        __file__,
        f"{len(points)} checkpoints of {num_runs} runs, {num_settings} settings, {machine()}, "
        f"{versions('torch', 'scikit-learn')}.",
        results=arguments.results,
    )
    if arguments.note:
        report.text(arguments.note)
    report.text(f"""Scores: {min(config.seconds, 3600 * corpus.hours):.0f} s of held-out audio, {config.num_units}
        units, noise at {config.snr_db:g} dB. Content: errors in characters of a linear head on the frozen encoder, of
        the probes' own test lines.""")
    report.text(f"""Spearman's rank correlation of score and errors: -1 if a high score always goes with few errors, 0
        if it says nothing. In brackets, the 95 % bootstrap interval over runs; the scores were not chosen by it, and
        {len(names)} of them are compared. "{LOSS}" is that of the last step minus the entropy of its tokens: for it, 1
        would be ideal.""")
    report.table(["score", *heads], ([name, *map(_shown, rows[name])] for name in ordered))
    report.table(["setting", "seed", "step", "CER, %", *names], (_figures(point, names) for point in points))


def _figures(point: Point, names: Sequence[str]) -> list[str]:
    scores = [f"{point.scores[name]:.3f}" for name in names]
    return [point.setting, point.seed, f"{point.step:,}", f"{100 * point.content:.1f}", *scores]


def _shown(one: Correlation) -> str:
    if np.isnan(one.value):
        return "-"
    return f"{one.value:.2f}" + ("" if np.isnan(one.low) else f" ({one.low:.2f} to {one.high:.2f})")


if __name__ == "__main__":
    sys.exit(main())

"""Runs the frame probe: which layers hold the acoustic content of single frames.

A linear classifier predicts the unit of each encoder frame from one layer. The units are k-means clusters of MFCCs, for
which no transcript is needed, or the characters of a forced alignment. Besides, k-means clusters of the layer are
compared with the units. The log-mel frames determine the MFCCs almost linearly: there, their accuracy is an upper bound
rather than a baseline.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nestdata import AudioInputs, Corpus
from nestmodel.evaluate.error_rates import check_jiwer, ratio, ratio_difference, sums_by_group
from nestmodel.evaluate.features.batch import frame_rate_hz, log_mel_function
from nestmodel.evaluate.features.inputs import OnProgress
from nestmodel.evaluate.features.rejects import RejectLog
from nestmodel.evaluate.frame_units import check_sklearn, cluster_score, mfcc_units, unit_clusters
from nestmodel.evaluate.probe.contestants import CONTESTANTS, Caches, FeatureCache
from nestmodel.evaluate.probe.ctc_head import default_labels_per_frame
from nestmodel.evaluate.probe.frame_alignment import Units, aligned_units
from nestmodel.evaluate.probe.frame_classifier import LabelledFrames, fit_frames
from nestmodel.evaluate.probe.frame_report import (
    FrameProbeReport,
    LayerDifference,
    LayerScore,
    draw_frame_probe,
    frame_markdown,
)
from nestmodel.evaluate.probe.run import ProbeRun, Side, run_task
from nestmodel.evaluate.probe.training import StoppingRule
from nestmodel.evaluate.probe.utterances import (
    ProbeUtterance,
    SideName,
    SplitRows,
    check_enough,
    in_all,
    in_drawn_order,
    interval_name,
    speech_utterances,
    split_training,
)
from nestmodel.evaluate.probe_config import Contestant, FrameProbeConfig
from nestmodel.nn.network import NestNetwork

MAX_TRAINING_HOURS = 4.0
"""Training utterances are drawn by a key until they last about as long."""


def run_frame_probe(
    model: NestNetwork,
    inputs: AudioInputs,
    test: AudioInputs,
    config: FrameProbeConfig | None = None,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> FrameProbeReport:
    """Predicts units of single frames from each layer of an encoder, trained and untrained, and from log-mels.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        inputs: Utterances for training; a corpus, or any inputs that `nestdata prepare` reads. Texts are needed
            for the units `characters` only.
        test: Utterances that are scored, of other recordings.
        config: The units, and how the classifiers are trained.
        output: Directory for `probe.json`, `report.md`, `probe.png`, `rejected.jsonl` and `rejected_test.jsonl`; None
            writes nothing.
        overwrite: Whether an earlier probe at `output` is replaced.
        model_name: Name of the model in the report.
        on_progress: Called with the finished and the total units of work: an utterance that is encoded once, or on
            which one classifier is trained.

    Raises:
        ConfigError: The device does not exist, a corpus has another sampling rate than the model, or scikit-learn is
            not installed.
        ProbeError: There are too few utterances, they cannot be split, or both sides have the same audio.
        ExtractError: A batch does not fit into memory.
        OutputError: `output` exists and may not be replaced, or cannot be written.
        NestError: An input cannot be read.
    """
    probe = FrameProbe(config or FrameProbeConfig())
    check_sklearn()
    if probe.needs_text:
        check_jiwer()
    sides: dict[SideName, AudioInputs] = {"training": inputs, "test": test}
    return run_task(probe, model, sides, output, overwrite=overwrite, model_name=model_name, on_progress=on_progress)


@dataclass(frozen=True, slots=True)
class FrameProbe:
    """The task `frames`: units of single frames."""

    config: FrameProbeConfig

    @property
    def needs_text(self) -> bool:
        """Whether characters are the units."""
        return self.config.units == "characters"

    def utterances(self, corpus: Corpus, side: SideName, rejects: RejectLog) -> list[ProbeUtterance]:
        """Returns all utterances, or those with text if characters are the units."""
        return speech_utterances(corpus, side, rejects, needs_text=self.needs_text, group_by=self.config.group_by)

    def score(self, run: ProbeRun) -> FrameProbeReport:
        """Trains a classifier and clusters on each layer of each contestant."""
        config, test = self.config, run.sides["test"]
        training = _draw(run.sides["training"], config.seed)
        num_training, num_test = len(training.utterances), len(test.utterances)
        num_layers = 2 * (run.model.config.encoder.num_layers + 1) + 1
        run.work.total = (len(CONTESTANTS) + 1) * (num_training + num_test) + num_layers * num_training
        scored = []
        with run.cached(training, test) as caches:
            task = _task(training, test, caches, self._units(run, training, test, caches), config)
            for name, each in caches.items():
                for layer in range(each.training.shape[0]):
                    scored.append(task.score(name, layer, each))
                    run.work.finish(num_training)
        rows, units, num_frames = task.rows, task.units, task.num_frames()
        return FrameProbeReport(
            config=config,
            model=run.model_name,
            frame_rate_hz=frame_rate_hz(run.model),
            num_training=len(rows.training),
            num_held_out=len(rows.held_out),
            num_test=len(task.test),
            num_training_frames=sum(len(units.training[row]) for row in rows.training),
            num_held_out_frames=sum(len(units.training[row]) for row in rows.held_out),
            intervals_over=interval_name((utterance.group for utterance in task.test), config.group_by),
            num_test_frames=int(num_frames.sum()),
            chance=ratio(task.num_most_frequent(), num_frames, config.seed),
            alphabet=units.alphabet,
            layers=[result.score for result in scored],
            differences=_differences(scored, num_frames, config.seed),
            left_out=run.left_out,
        )

    def write(self, report: FrameProbeReport, directory: Path) -> None:
        """Writes the report as text, as data and as a picture."""
        draw_frame_probe(report, directory / "probe.png")
        (directory / "report.md").write_text(frame_markdown(report), encoding="utf-8")
        (directory / "probe.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")

    def _units(self, run: ProbeRun, training: Side, test: Side, caches: Mapping[Contestant, Caches]) -> Units:
        config, model = self.config, run.model
        if self.needs_text:
            aligned = aligned_units(
                caches,
                training,
                test,
                labels_per_frame=default_labels_per_frame(frame_rate_hz(model)),
                held_out=config.held_out,
                seed=config.seed,
            )
            run.work.finish(len(training.utterances) + len(test.utterances))
            return aligned
        mels, test_mels = (run.read(side, model, log_mel_function(model)) for side in (training, test))
        factor = model.config.encoder.subsampling_factor
        return Units(*mfcc_units(mels, test_mels, config.num_units, factor, config.seed), num_units=config.num_units)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scored:
    score: LayerScore
    num_correct: NDArray[np.int64]
    """By group of test utterances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What every layer is trained and scored on."""

    config: FrameProbeConfig
    rows: SplitRows
    test: list[ProbeUtterance]
    units: Units

    def score(self, name: Contestant, layer: int, caches: Caches) -> _Scored:
        """Trains a classifier and clusters on a layer, and scores both on the test frames."""
        config, units = self.config, self.units
        rule = StoppingRule(max_epochs=config.max_epochs, patience=config.patience)
        training = _frames(caches.training, layer, self.rows.training, units.training)
        held_out = _frames(caches.training, layer, self.rows.held_out, units.training)
        test = _frames(caches.test, layer, [utterance.row for utterance in self.test], units.test)
        classifier = fit_frames(training, held_out, units.num_units, rule, config.seed)
        is_correct = (classifier.predict(test.values) == test.units).numpy()
        ends = np.cumsum([len(units.test[utterance.row]) for utterance in self.test])
        num_correct = self._by_group(np.add.reduceat(is_correct.astype(np.int64), np.array([0, *ends[:-1]])))
        clusters = unit_clusters(training.values.numpy(), config.num_units, config.seed)
        score = LayerScore(
            contestant=name,
            layer=layer,
            accuracy=ratio(num_correct, self.num_frames(), config.seed),
            clusters=cluster_score(test.units.numpy(), clusters.predict(test.values.numpy())),
            best_epoch=classifier.training.best_epoch,
            num_epochs=classifier.training.num_epochs,
            num_steps=classifier.training.num_steps,
        )
        return _Scored(score=score, num_correct=num_correct)

    def num_frames(self) -> NDArray[np.int64]:
        """Returns the number of frames of each group of test utterances."""
        return self._by_group(np.array([len(self.units.test[utterance.row]) for utterance in self.test]))

    def num_most_frequent(self) -> NDArray[np.int64]:
        """Returns how many frames of each test group have the most frequent unit of the training frames."""
        units = self.units
        most_frequent = np.bincount(np.concatenate([units.training[row] for row in self.rows.training])).argmax()
        return self._by_group(
            np.array([int((units.test[utterance.row] == most_frequent).sum()) for utterance in self.test])
        )

    def _by_group(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return sums_by_group(counts, [utterance.group for utterance in self.test])


def _draw(side: Side, seed: int) -> Side:
    """Returns a side with utterances of about `MAX_TRAINING_HOURS` at most, by index."""
    drawn, num_samples = [], 0
    for utterance in in_drawn_order(side.utterances, "probe frames", seed):
        if num_samples < MAX_TRAINING_HOURS * 3600 * side.corpus.sampling_rate:
            drawn.append(utterance)
            num_samples += side.corpus.num_samples_of(utterance.row)
    return side._replace(utterances=sorted(drawn))


def _task(
    training: Side, test: Side, caches: Mapping[Contestant, Caches], units: Units, config: FrameProbeConfig
) -> _Task:
    usable = in_all(training.utterances, [units.training, *(each.training for each in caches.values())])
    scored = in_all(test.utterances, [units.test, *(each.test for each in caches.values())])
    check_enough(len(usable), len(scored))
    rows = split_training(usable, config.held_out, config.seed)
    return _Task(config=config, rows=rows, test=scored, units=units)


def _frames(
    cache: FeatureCache, layer: int, rows: Sequence[int], units: Mapping[int, NDArray[np.int64]]
) -> LabelledFrames:
    return LabelledFrames(
        values=torch.cat([cache.read(row)[:, layer] for row in rows]),
        units=torch.from_numpy(np.concatenate([units[row] for row in rows])),
    )


def _differences(scored: Sequence[_Scored], num_frames: NDArray[np.int64], seed: int) -> list[LayerDifference]:
    """Compares each layer of the trained encoder with the same layer of the untrained one, and with the log-mels."""
    by_name = {(result.score.contestant, result.score.layer): result.num_correct for result in scored}
    found = []
    for (name, layer), num_correct in by_name.items():
        baselines: tuple[tuple[Contestant, int], ...] = (("untrained", layer), ("log_mel", 0))
        for baseline, baseline_layer in baselines if name == "trained" else ():
            other = by_name[baseline, baseline_layer]
            accuracy = ratio_difference((num_correct, num_frames), (other, num_frames), seed)
            found.append(LayerDifference(layer=layer, baseline=baseline, accuracy=accuracy))
    return found

"""Runs the frame probe: which layers hold the acoustic content of single frames.

A linear classifier predicts the unit of each encoder frame from one layer. The units are k-means clusters of MFCCs, for
which no transcript is needed, or the characters of a forced alignment. Besides, k-means clusters of the layer are
compared with the units. The log-mel frames determine the MFCCs almost linearly: there, their accuracy is an upper bound
rather than a baseline.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nestdata import AudioInputs, derive_key
from nestmodel.evaluate.contestants import CONTESTANTS, Contestant
from nestmodel.evaluate.ctc_head import StoppingRule, default_labels_per_frame
from nestmodel.evaluate.encode import Utterance, frame_rate_hz, iterate_log_mels, resolve_device
from nestmodel.evaluate.error_rates import check_jiwer, ratio, ratio_difference, sums_by_group
from nestmodel.evaluate.feature_cache import FeatureCache
from nestmodel.evaluate.frame_alignment import aligned_units
from nestmodel.evaluate.frame_classifier import LabelledFrames, fit_frames
from nestmodel.evaluate.frame_report import (
    FrameProbeConfig,
    FrameProbeReport,
    LayerDifference,
    LayerScore,
    draw_frame_probe,
    frame_markdown,
)
from nestmodel.evaluate.frame_units import cluster_score, mfcc_units, unit_clusters
from nestmodel.evaluate.inputs import OnProgress
from nestmodel.evaluate.linear_probe import check_sklearn
from nestmodel.evaluate.probe_output import OnWork, probe_directory, progress_counter
from nestmodel.evaluate.sides import Caches, Side, counted, open_sides, write_caches
from nestmodel.evaluate.transcripts import SpeechUtterance, SplitRows, check_enough, interval_name, split_training
from nestmodel.nn.network import NestNetwork

MAX_TRAINING_HOURS = 4.0
"""Training utterances are drawn by a key until they last about as long."""

Units = Mapping[int, NDArray[np.int64]]
"""Units of the encoder frames of utterances, by their index in the corpus."""


class _Units(NamedTuple):
    training: Units
    test: Units
    num_units: int
    alphabet: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What every layer is trained and scored on."""

    rows: SplitRows
    test_rows: list[int]
    test_groups: list[str]
    """Group of each test utterance, from which intervals are drawn."""

    units: Units
    test_units: Units
    num_units: int
    alphabet: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scored:
    score: LayerScore
    num_correct: NDArray[np.int64]
    """By group of test utterances."""


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
    config = config or FrameProbeConfig()
    check_sklearn()
    if config.units == "characters":
        check_jiwer()
    resolve_device(config.device)
    target = None if output is None else Path(output).resolve()
    rate = model.config.features.sampling_rate
    with probe_directory(target, overwrite) as directory:
        with open_sides(
            inputs,
            test,
            rate,
            directory,
            needs_text=config.units == "characters",
            group_by=config.group_by,
            allow_commands=config.allow_commands,
        ) as sides:
            report = _probe_sides(model, *sides, config, directory, on_progress)
            left_out = {"training": sides[0].rejects.counts, "test": sides[1].rejects.counts}
        report = replace(report, model=model_name, left_out=left_out)
        if target is not None:
            draw_frame_probe(report, directory / "probe.png")
            (directory / "report.md").write_text(frame_markdown(report), encoding="utf-8")
            (directory / "probe.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def _probe_sides(
    model: NestNetwork,
    training: Side,
    test: Side,
    config: FrameProbeConfig,
    directory: Path,
    on_progress: OnProgress | None,
) -> FrameProbeReport:
    """Returns the report without the name of the model and the rejects."""
    training = replace(training, utterances=_draw(training, config.seed))
    num_layers = 2 * (model.config.encoder.num_layers + 1) + 1
    num_utterances = len(training.utterances) + len(test.utterances)
    on_work = progress_counter(
        (len(CONTESTANTS) + 1) * num_utterances + num_layers * len(training.utterances), on_progress
    )
    with tempfile.TemporaryDirectory(dir=directory) as cache_directory:
        caches = write_caches(
            model,
            training,
            test,
            Path(cache_directory),
            on_work,
            seed=config.seed,
            max_batch_seconds=config.max_batch_seconds,
            device=config.device,
        )
        task = _task(training, test, caches, _units(model, training, test, caches, config, on_work), config)
        scored = [
            _score_layer(name, layer, caches[name], task, config, on_work, len(training.utterances))
            for name in CONTESTANTS
            for layer in range(caches[name].training.shape[0])
        ]
    num_frames = _num_frames(task)
    return FrameProbeReport(
        config=config,
        model="",
        frame_rate_hz=frame_rate_hz(model),
        num_training=len(task.rows.training),
        num_held_out=len(task.rows.held_out),
        num_test=len(task.test_rows),
        num_training_frames=sum(len(task.units[row]) for row in task.rows.training),
        num_held_out_frames=sum(len(task.units[row]) for row in task.rows.held_out),
        intervals_over=interval_name(task.test_groups, config.group_by),
        num_test_frames=int(num_frames.sum()),
        chance=ratio(_most_frequent_correct(task), num_frames, config.seed),
        alphabet=task.alphabet,
        layers=[one.score for one in scored],
        differences=_differences(scored, num_frames, config.seed),
    )


def _draw(side: Side, seed: int) -> list[SpeechUtterance]:
    """Returns utterances of about `MAX_TRAINING_HOURS` at most, by index."""
    drawn, num_samples = [], 0
    for one in sorted(side.utterances, key=lambda one: (derive_key(seed, f"probe frames/{one.cut_id}"), one.cut_id)):
        if num_samples < MAX_TRAINING_HOURS * 3600 * side.corpus.sampling_rate:
            drawn.append(one)
            num_samples += side.corpus.num_samples_of(one.row)
    return sorted(drawn)


def _units(
    model: NestNetwork,
    training: Side,
    test: Side,
    caches: Mapping[Contestant, Caches],
    config: FrameProbeConfig,
    on_work: OnWork,
) -> _Units:
    if config.units == "characters":
        aligned = aligned_units(
            caches,
            training,
            test,
            labels_per_frame=default_labels_per_frame(frame_rate_hz(model)),
            held_out=config.held_out,
            seed=config.seed,
        )
        on_work(len(training.utterances) + len(test.utterances))
        characters = aligned.alphabet.characters
        return _Units(aligned.training, aligned.test, len(characters), characters)

    def log_mels(side: Side) -> Iterator[Utterance]:
        rows = [one.row for one in side.utterances]
        settings = (config.max_batch_seconds, config.device)
        return counted(iterate_log_mels(model, side.corpus, *settings, rows=rows, on_reject=side.rejects.add), on_work)

    factor = model.config.encoder.subsampling_factor
    return _Units(
        *mfcc_units(log_mels(training), log_mels(test), config.num_units, factor, config.seed),
        num_units=config.num_units,
        alphabet=None,
    )


def _task(
    training: Side,
    test: Side,
    caches: Mapping[Contestant, Caches],
    units: _Units,
    config: FrameProbeConfig,
) -> _Task:
    in_all = set(units.training).intersection(*(one.training.rows for one in caches.values()))
    in_all_test = set(units.test).intersection(*(one.test.rows for one in caches.values()))
    usable = [one for one in training.utterances if one.row in in_all]
    scored = [one for one in test.utterances if one.row in in_all_test]
    check_enough(len(usable), len(scored))
    return _Task(
        rows=split_training(usable, config.held_out, config.seed),
        test_rows=[one.row for one in scored],
        test_groups=[one.group for one in scored],
        units=units.training,
        test_units=units.test,
        num_units=units.num_units,
        alphabet=units.alphabet,
    )


def _score_layer(
    name: Contestant,
    layer: int,
    caches: Caches,
    task: _Task,
    config: FrameProbeConfig,
    on_work: OnWork,
    num_utterances: int,
) -> _Scored:
    """Trains a classifier and clusters on a layer, and scores both on the test frames."""
    rule = StoppingRule(max_epochs=config.max_epochs, patience=config.patience)
    training = _frames(caches.training, layer, task.rows.training, task.units)
    held_out = _frames(caches.training, layer, task.rows.held_out, task.units)
    test = _frames(caches.test, layer, task.test_rows, task.test_units)
    classifier = fit_frames(training, held_out, task.num_units, rule, config.seed)
    is_correct = (classifier.predict(test.values) == test.units).numpy()
    ends = np.cumsum([len(task.test_units[row]) for row in task.test_rows])
    num_correct = np.add.reduceat(is_correct.astype(np.int64), np.array([0, *ends[:-1]]))
    num_correct = sums_by_group(num_correct, task.test_groups)
    clusters = unit_clusters(training.values.numpy(), config.num_units, config.seed)
    score = LayerScore(
        contestant=name,
        layer=layer,
        accuracy=ratio(num_correct, _num_frames(task), config.seed),
        clusters=cluster_score(test.units.numpy(), clusters.predict(test.values.numpy())),
        best_epoch=classifier.best_epoch,
        num_epochs=classifier.num_epochs,
        num_steps=classifier.num_steps,
    )
    on_work(num_utterances)
    return _Scored(score=score, num_correct=num_correct)


def _frames(cache: FeatureCache, layer: int, rows: Sequence[int], units: Units) -> LabelledFrames:
    return LabelledFrames(
        values=torch.cat([cache.read(row)[:, layer] for row in rows]),
        units=torch.from_numpy(np.concatenate([units[row] for row in rows])),
    )


def _num_frames(task: _Task) -> NDArray[np.int64]:
    """Returns the number of frames of each group of test utterances."""
    return sums_by_group(np.array([len(task.test_units[row]) for row in task.test_rows]), task.test_groups)


def _most_frequent_correct(task: _Task) -> NDArray[np.int64]:
    """Returns how many frames of each group of test utterances have the most frequent unit of the training frames."""
    most_frequent = np.bincount(np.concatenate([task.units[row] for row in task.rows.training])).argmax()
    counts = np.array([int((task.test_units[row] == most_frequent).sum()) for row in task.test_rows])
    return sums_by_group(counts, task.test_groups)


def _differences(scored: Sequence[_Scored], num_frames: NDArray[np.int64], seed: int) -> list[LayerDifference]:
    """Compares each layer of the trained encoder with the same layer of the untrained one, and with the log-mels."""
    by_name = {(one.score.contestant, one.score.layer): one.num_correct for one in scored}
    found = []
    for (name, layer), num_correct in by_name.items():
        baselines: tuple[tuple[Contestant, int], ...] = (("untrained", layer), ("log_mel", 0))
        for baseline, baseline_layer in baselines if name == "trained" else ():
            other = by_name[baseline, baseline_layer]
            accuracy = ratio_difference((num_correct, num_frames), (other, num_frames), seed)
            found.append(LayerDifference(layer=layer, baseline=baseline, accuracy=accuracy))
    return found

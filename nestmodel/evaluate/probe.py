"""Runs the linear probe: predicts labels from the frozen features of three extractors.

The labels of a manifest, such as speaker or language, are predicted from each layer of the trained encoder, from each
layer of the same encoder with its initial random weights (the baseline), and from log-mel statistics. Split, pooling
and classifier are the same for all three. The untrained encoder reads the same input as the trained one, so the
difference between them was learned. The log-mel statistics contain more: the level and the channel of a recording,
which are normalised away before the encoder. They are a strong baseline if the recordings of a class share a room or a
microphone; a split by groups avoids that.

A single layer may contain less about a label than all layers together, so the concatenation of all layers is scored as
well.

The split depends on ids, labels and seed only, not on the order of the manifest. scikit-learn belongs to the extra
`probe`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestdata import AudioInputs, Corpus
from nestmodel.errors import ProbeError
from nestmodel.evaluate.contestants import untrained_network
from nestmodel.evaluate.encode import Utterance, iterate_features, iterate_log_mels, resolve_device
from nestmodel.evaluate.inputs import OnProgress, cut_labels, open_inputs
from nestmodel.evaluate.linear_probe import ProbeScore, check_sklearn, fit_and_score
from nestmodel.evaluate.probe_output import OnWork, probe_directory, progress_counter
from nestmodel.evaluate.rejects import RejectLog
from nestmodel.evaluate.report import MIN_TRAIN_PER_CLASS, ProbeConfig, ProbeReport, draw_probe
from nestmodel.evaluate.split import LabelledUtterance, limit_per_class, split_held_out
from nestmodel.nn.network import NestNetwork

PooledFeatures = dict[int, NDArray[np.float32]]
"""By index in the corpus: mean and standard deviation over frames for each layer, shape (layers, 2 * dim)."""

_HELD_OUT, _TRAINING = "held out", "training"  # names of the groups if `held_out_where` defines the split
_MAX_NAMES = 12
_MAX_CLASSES = 5


def run_probe(
    model: NestNetwork,
    inputs: AudioInputs,
    config: ProbeConfig,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> ProbeReport:
    """Scores a linear probe on each layer of an encoder, trained and untrained, and on log-mel statistics.

    Every utterance is pooled into the mean and the standard deviation over its valid frames. The classifier is
    logistic regression on standardised features. Cross-validation on the training utterances selects the strength of
    its regularisation, separately for each set of features.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        inputs: A `Corpus`; or anything else that `prepare_corpus` accepts, such as a file, a folder or a `CutSet`,
            which is prepared with every file header read.
        config: The label and the split.
        output: Directory for `probe.json`, `probe.png` and `rejected.jsonl`; None writes nothing.
        overwrite: Whether an earlier probe at `output` is replaced.
        model_name: Name of the model in the report.
        on_progress: Called with the finished and the total units of work. One utterance encoded once is a unit; a fit
            of the classifier counts as many units as there are utterances.

    Raises:
        ConfigError: The device does not exist, the corpus has another sampling rate than the model, or scikit-learn is
            not installed.
        ProbeError: No utterance has the label, or fewer than two classes have enough utterances.
        ExtractError: A batch does not fit into memory.
        OutputError: `output` exists and may not be replaced, or cannot be written.
        NestError: An input cannot be read.
    """
    check_sklearn()
    resolve_device(config.device)
    target = None if output is None else Path(output).resolve()
    rate = model.config.features.sampling_rate
    with probe_directory(target, overwrite) as directory:
        with (
            RejectLog(directory) as rejects,
            open_inputs(inputs, rate, directory, rejects, allow_commands=config.allow_commands) as corpus,
        ):
            report = _probe_corpus(model, corpus, config, rejects, on_progress)
        report = replace(report, model=model_name, left_out=rejects.counts)
        if target is not None:
            draw_probe(report, directory / "probe.png")
            (directory / "probe.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def _probe_corpus(
    model: NestNetwork,
    corpus: Corpus,
    config: ProbeConfig,
    rejects: RejectLog,
    on_progress: OnProgress | None,
) -> ProbeReport:
    labelled, num_unlabelled = _labelled_utterances(corpus, config)
    utterances, held_out_ids = _split(labelled, config)
    _count_classes(labelled, utterances, held_out_ids)  # raises before any audio is read
    num_fits = 2 * (model.config.encoder.num_layers + 2) + 1
    on_work = progress_counter(len(utterances) * (3 + num_fits), on_progress)
    pooled = _pool_all(model, corpus, config, [one.row for one in utterances], rejects, on_work)
    usable = [one for one in utterances if all(one.row in features for features in pooled.values())]
    classes, excluded_classes = _count_classes(labelled, usable, held_out_ids)
    usable = [one for one in usable if one.label in classes]
    is_held_out = np.array([one.cut_id in held_out_ids for one in usable])
    class_numbers = {label: number for number, label in enumerate(classes)}
    labels = np.array([class_numbers[one.label] for one in usable])
    scores: dict[str, list[ProbeScore]] = {}
    for name, features_by_row in pooled.items():
        scores[name] = []
        layers = np.stack([features_by_row[one.row] for one in usable], axis=1)  # (layers, utterances, 2 * dim)
        all_layers = np.concatenate(list(layers), axis=1)
        for features in [*layers, *([all_layers] if name != "log_mel" else [])]:
            scores[name].append(fit_and_score(features, labels, is_held_out, config.seed))
            on_work(len(utterances))
    return ProbeReport(
        config=config,
        model="",
        classes=classes,
        trained=scores["trained"][:-1],
        untrained=scores["untrained"][:-1],
        trained_together=scores["trained"][-1],
        untrained_together=scores["untrained"][-1],
        log_mel=scores["log_mel"][0],
        chance=ProbeScore.from_counts(max(num_held for _, num_held in classes.values()), int(is_held_out.sum())),
        num_unlabelled=num_unlabelled,
        excluded_classes=excluded_classes,
    )


def _labelled_utterances(corpus: Corpus, config: ProbeConfig) -> tuple[list[LabelledUtterance], int]:
    """Returns the utterances that have the label and the group, and the number of the other utterances."""
    labelled, name_counts = [], Counter[str]()
    where_name, _, where_value = (config.held_out_where or "").partition("=")
    for row in range(len(corpus)):
        cut = corpus.line(row)
        labels = {name: text for name, value in cut_labels(cut).items() if (text := _label_text(value))}
        name_counts.update(labels.keys())
        group = cut["id"] if config.group_by is None else labels.get(config.group_by)
        if where_name:
            group = _HELD_OUT if labels.get(where_name) == where_value else _TRAINING
        if config.label in labels and group is not None:
            labelled.append(LabelledUtterance(row, cut["id"], labels[config.label], group))
    for setting, name in (("label", config.label), ("group_by", config.group_by), ("held_out_where", where_name)):
        if name and not name_counts[name]:
            known = ", ".join(f"{name} ({number})" for name, number in name_counts.most_common(_MAX_NAMES)) or "none"
            raise ProbeError(f"{setting} is {name!r}, and no utterance has that label. The labels here: {known}.")
    if not labelled:
        raise ProbeError(f"no utterance has both {config.label!r} and {config.group_by!r}. Drop --group-by.")
    return labelled, len(corpus) - len(labelled)


def _label_text(value: object) -> str:
    """Returns a label as text; an empty string for a value that cannot be a label."""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def _split(labelled: list[LabelledUtterance], config: ProbeConfig) -> tuple[list[LabelledUtterance], set[str]]:
    """Returns the utterances of both sides of the split, sorted by id, and the ids of the held-out side."""
    if config.held_out_where is None:
        held_out_ids = split_held_out(labelled, config.held_out, config.seed)
    else:
        held_out_ids = {one.cut_id for one in labelled if one.group == _HELD_OUT}
    training = [one for one in labelled if one.cut_id not in held_out_ids]
    if config.train_per_class is not None:
        training = limit_per_class(training, config.train_per_class, config.seed)
    held_out = [one for one in labelled if one.cut_id in held_out_ids]
    return sorted([*training, *held_out], key=lambda one: one.cut_id), held_out_ids


def _count_classes(
    labelled: list[LabelledUtterance], usable: list[LabelledUtterance], held_out_ids: set[str]
) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Returns the numbers of training and held-out utterances by class, and the excluded classes with the reasons.

    Raises:
        ProbeError: Fewer than two classes have enough utterances.
    """
    num_held_out = Counter(one.label for one in usable if one.cut_id in held_out_ids)
    num_train = Counter(one.label for one in usable if one.cut_id not in held_out_ids)
    classes, excluded = {}, {}
    for name in sorted({one.label for one in labelled}):
        if num_train[name] < MIN_TRAIN_PER_CLASS:
            excluded[name] = f"{num_train[name]} in training, {MIN_TRAIN_PER_CLASS} are needed"
        elif not num_held_out[name]:
            excluded[name] = "none held out"
        else:
            classes[name] = (num_train[name], num_held_out[name])
    if len(classes) < 2:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in list(excluded.items())[:_MAX_CLASSES])
        raise ProbeError(
            f"{len(classes)} of {len(classes) + len(excluded)} classes can be probed, and two are needed"
            + (f" ({reasons})" if reasons else "")
            + ". Give more utterances of each, another --label, or no --group-by."
        )
    return classes, excluded


def _pool_all(
    model: NestNetwork,
    corpus: Corpus,
    config: ProbeConfig,
    rows: list[int],
    rejects: RejectLog,
    on_work: OnWork,
) -> dict[str, PooledFeatures]:
    """Returns the pooled features of the utterances by extractor: `trained`, `untrained`, `log_mel`."""
    batches = (config.max_batch_seconds, config.device)
    untrained = untrained_network(model, config.seed)
    pooled = {}
    for name, encoder in (("trained", model), ("untrained", untrained)):
        utterances = iterate_features(encoder, corpus, "all", *batches, rows=rows, on_reject=rejects.add)
        pooled[name] = _pool(utterances, on_work)
    utterances = iterate_log_mels(model, corpus, *batches, rows=rows, on_reject=rejects.add)
    pooled["log_mel"] = _pool(utterances, on_work)
    return pooled


def _pool(utterances: Iterator[Utterance], on_work: OnWork) -> PooledFeatures:
    pooled: PooledFeatures = {}
    for utterance in utterances:
        values = utterance.values  # (layers, frames, dim)
        pooled[utterance.row] = np.concatenate([values.mean(axis=1), values.std(axis=1)], axis=-1)
        on_work(1)
    return pooled

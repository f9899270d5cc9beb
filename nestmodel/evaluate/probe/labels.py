"""Runs the linear probe: predicts labels from the frozen features of three contestants.

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

import importlib.util
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestdata import AudioInputs, Corpus, derive_key
from nestmodel.errors import ConfigError, ProbeError
from nestmodel.evaluate.features.batch import log_mel_function
from nestmodel.evaluate.features.encode import Utterance
from nestmodel.evaluate.features.inputs import OnProgress, cut_labels
from nestmodel.evaluate.features.rejects import RejectLog
from nestmodel.evaluate.probe.contestants import CONTESTANTS, frame_features
from nestmodel.evaluate.probe.label_report import ProbeReport, ProbeScore, draw_probe
from nestmodel.evaluate.probe.run import ProbeRun, run_task
from nestmodel.evaluate.probe.utterances import ProbeUtterance, SideName, in_all, limit_per_class, split_held_out
from nestmodel.evaluate.probe_config import MIN_TRAIN_PER_CLASS, Contestant, ProbeConfig
from nestmodel.nn.network import NestNetwork

PooledFeatures = dict[int, NDArray[np.float32]]
"""By index in the corpus: mean and standard deviation over frames for each layer, shape (layers, 2 * dim)."""

_HELD_OUT, _TRAINING = "held out", "training"  # names of the groups if `held_out_where` defines the split
_MAX_NAMES = 12
_MAX_CLASSES = 5
_INVERSE_REGULARISATION = (0.01, 0.1, 1.0)
_MAX_FOLDS = 3


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
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError("a probe of labels needs scikit-learn: pip install 'nest-pretrain[probe]'.")
    probe = LabelProbe(config)
    sides: dict[SideName, AudioInputs] = {"training": inputs}
    return run_task(probe, model, sides, output, overwrite=overwrite, model_name=model_name, on_progress=on_progress)


@dataclass(frozen=True, slots=True)
class LabelProbe:
    """The task `labels`: a label of utterances."""

    config: ProbeConfig

    def utterances(self, corpus: Corpus, _side: SideName, _rejects: RejectLog) -> list[ProbeUtterance]:
        """Returns the utterances that have the label and the group."""
        return _labelled_utterances(corpus, self.config)

    def score(self, run: ProbeRun) -> ProbeReport:
        """Fits the classifier to each layer of each contestant, and to all layers together."""
        config, side = self.config, run.sides["training"]
        labelled = side.utterances
        utterances, held_out_ids = _split(labelled, config)
        _count_classes(labelled, utterances, held_out_ids)  # raises before any audio is read
        num_fits = 2 * (run.model.config.encoder.num_layers + 2) + 1
        run.work.total = len(utterances) * (len(CONTESTANTS) + num_fits)
        side = side._replace(utterances=utterances)
        pooled: dict[Contestant, PooledFeatures] = {}
        for name in CONTESTANTS:
            network, compute = frame_features(name, run.model, config.seed)
            if name == "log_mel":
                compute = log_mel_function(network)  # of 10 ms, and before normalisation
            pooled[name] = _pool(run.read(side, network, compute))
        usable = in_all(utterances, list(pooled.values()))
        classes, excluded_classes = _count_classes(labelled, usable, held_out_ids)
        usable = [utterance for utterance in usable if utterance.target in classes]
        is_held_out = np.array([utterance.cut_id in held_out_ids for utterance in usable])
        class_numbers = {label: number for number, label in enumerate(classes)}
        labels = np.array([class_numbers[utterance.target] for utterance in usable])
        scores: dict[Contestant, list[ProbeScore]] = {name: [] for name in CONTESTANTS}
        for name, features_by_row in pooled.items():
            layers = np.stack(
                [features_by_row[utterance.row] for utterance in usable], axis=1
            )  # (layers, utterances, 2 * dim)
            all_layers = np.concatenate(list(layers), axis=1)
            for features in [*layers, *([all_layers] if name != "log_mel" else [])]:
                scores[name].append(fit_and_score(features, labels, is_held_out, config.seed))
                run.work.finish(len(utterances))
        return ProbeReport(
            config=config,
            model=run.model_name,
            classes=classes,
            trained=scores["trained"][:-1],
            untrained=scores["untrained"][:-1],
            trained_together=scores["trained"][-1],
            untrained_together=scores["untrained"][-1],
            log_mel=scores["log_mel"][0],
            chance=ProbeScore.from_counts(max(num_held for _, num_held in classes.values()), int(is_held_out.sum())),
            num_unlabelled=len(side.corpus) - len(labelled),
            excluded_classes=excluded_classes,
            left_out=side.rejects.counts,
        )

    def write(self, report: ProbeReport, directory: Path) -> None:
        """Writes the report as data and as a picture."""
        draw_probe(report, directory / "probe.png")
        (directory / "probe.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")


def fit_and_score(
    features: NDArray[np.float32], labels: NDArray[np.int64], is_held_out: NDArray[np.bool_], seed: int
) -> ProbeScore:
    """Fits logistic regression to the training utterances and scores it on the held-out utterances.

    Features are standardised. Cross-validation on the training utterances selects the strength of the regularisation.

    Args:
        features: Shape (utterances, dim).
        labels: Class number of each utterance, shape (utterances,).
        is_held_out: True for the utterances that are scored; the others are used for training.
        seed: Determines the folds of the cross-validation.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train_labels = labels[~is_held_out]
    num_folds = min(_MAX_FOLDS, *Counter(train_labels.tolist()).values())
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=derive_key(seed, "probe folds") % 2**32)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, tol=1e-2))
    search = GridSearchCV(classifier, {"logisticregression__C": list(_INVERSE_REGULARISATION)}, cv=folds)
    with warnings.catch_warnings():
        # With weak regularisation, the solver stops before it has converged; the limit is the same for all features.
        warnings.simplefilter("ignore", ConvergenceWarning)
        search.fit(features[~is_held_out], train_labels)
    num_correct = int((search.predict(features[is_held_out]) == labels[is_held_out]).sum())
    return ProbeScore.from_counts(num_correct, int(is_held_out.sum()))


def _labelled_utterances(corpus: Corpus, config: ProbeConfig) -> list[ProbeUtterance]:
    """Returns the utterances that have the label and the group."""
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
            labelled.append(ProbeUtterance(row, cut["id"], labels[config.label], group))
    for setting, name in (("label", config.label), ("group_by", config.group_by), ("held_out_where", where_name)):
        if name and not name_counts[name]:
            known = ", ".join(f"{name} ({number})" for name, number in name_counts.most_common(_MAX_NAMES)) or "none"
            raise ProbeError(f"{setting} is {name!r}, and no utterance has that label. The labels here: {known}.")
    if not labelled:
        raise ProbeError(f"no utterance has both {config.label!r} and {config.group_by!r}. Drop --group-by.")
    return labelled


def _label_text(value: object) -> str:
    """Returns a label as text; an empty string for a value that cannot be a label."""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def _split(labelled: list[ProbeUtterance], config: ProbeConfig) -> tuple[list[ProbeUtterance], set[str]]:
    """Returns the utterances of both sides of the split, sorted by id, and the ids of the held-out side."""
    if config.held_out_where is None:
        held_out_ids = split_held_out(labelled, config.held_out, config.seed)
    else:
        held_out_ids = {utterance.cut_id for utterance in labelled if utterance.group == _HELD_OUT}
    training = [utterance for utterance in labelled if utterance.cut_id not in held_out_ids]
    if config.train_per_class is not None:
        training = limit_per_class(training, config.train_per_class, config.seed)
    held_out = [utterance for utterance in labelled if utterance.cut_id in held_out_ids]
    return sorted([*training, *held_out], key=lambda utterance: utterance.cut_id), held_out_ids


def _count_classes(
    labelled: list[ProbeUtterance], usable: list[ProbeUtterance], held_out_ids: set[str]
) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Returns the numbers of training and held-out utterances by class, and the excluded classes with the reasons.

    Raises:
        ProbeError: Fewer than two classes have enough utterances.
    """
    num_held_out = Counter(utterance.target for utterance in usable if utterance.cut_id in held_out_ids)
    num_train = Counter(utterance.target for utterance in usable if utterance.cut_id not in held_out_ids)
    classes, excluded = {}, {}
    for name in sorted({utterance.target for utterance in labelled}):
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


def _pool(utterances: Iterator[Utterance]) -> PooledFeatures:
    pooled: PooledFeatures = {}
    for utterance in utterances:
        values = utterance.values  # (layers, frames, dim)
        pooled[utterance.row] = np.concatenate([values.mean(axis=1), values.std(axis=1)], axis=-1)
    return pooled

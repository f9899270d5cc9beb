"""The probes of `nestmodel probe`: labels of utterances, and characters by a linear CTC head, from frozen features.

Both tasks compare three contestants (`Contestant`): the trained encoder, the same encoder with its initial random
weights, and log-mels. Utterances, split and classifier are the same for all three. The batch norm of the untrained
encoder is calibrated on the training utterances.

Labels are predicted from the mean and the standard deviation over the frames of an utterance, all layers together. The
log-mel statistics contain the level and the channel of a recording, which are normalised away before the encoder. They
are a strong baseline if the recordings of a class share a room or a microphone; a split by groups avoids that.

Source of the content probe: SUPERB, arXiv:2105.01051: a frozen encoder, a learned weighted sum of its layers, a small
head. SUPERB's phoneme recognition has the same head, one linear map with CTC; its speech recognition has a BLSTM of two
layers. Differs: characters instead of phonemes; each dimension of each layer is standardised; several labels per frame
if frames are longer than 40 ms (SUPERB's encoders have frames of 20 ms); the epoch is selected by a part of the
training utterances.
"""

import importlib.util
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from nestdata import AudioInputs, Corpus, derive_key, output_directory
from nestdata.output import has_json_kind
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError
from nestmodel.evaluate.calibration import calibrate_batch_norm
from nestmodel.evaluate.ctc_head import (
    CtcHead,
    Features,
    HeadTask,
    fit_head,
    num_labels_per_frame,
    transcribe,
    writable,
    write_features,
)
from nestmodel.evaluate.encode import (
    BatchFunction,
    Model,
    Utterance,
    as_network,
    frame_rate_hz,
    iterate_corpus,
    layer_function,
    log_mel_function,
    resolve_device,
    stacked_mel_function,
)
from nestmodel.evaluate.error_rates import ErrorCounts, check_jiwer, count_errors, error_difference, error_rate
from nestmodel.evaluate.evaluation_config import Contestant, CtcProbeConfig, ProbeConfig
from nestmodel.evaluate.inputs import OnProgress, RejectLog, open_inputs
from nestmodel.evaluate.probe_report import (
    ContestantScore,
    CtcProbeReport,
    Difference,
    ProbeReport,
    ProbeScore,
    write_report,
)
from nestmodel.evaluate.text import Alphabet
from nestmodel.evaluate.utterances import (
    ProbeUtterance,
    check_disjoint,
    check_enough,
    count_classes,
    in_all,
    labelled_utterances,
    split_labelled,
    split_training,
    transcribed_utterances,
)
from nestmodel.nn.network import NestNetwork

CONTESTANTS: tuple[Contestant, ...] = get_args(Contestant)

_INVERSE_REGULARISATION = (0.01, 0.1, 1.0)
_MAX_FOLDS = 3


def run_probe(
    model: Model,
    inputs: AudioInputs,
    config: ProbeConfig,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> ProbeReport:
    """Scores how well a linear classifier predicts a label from a trained and an untrained encoder, and from log-mels.

    Every utterance is pooled into the mean and the standard deviation over its valid frames, of all layers together.
    The classifier is logistic regression on standardised features. Cross-validation on the training utterances selects
    the strength of its regularisation, separately for each contestant.

    Args:
        model: A network, whose encoder is used in eval mode and moved to the device; or the path of one.
        inputs: A `Corpus`; or anything else that `prepare_corpus` accepts, such as a file, a folder or a `CutSet`,
            which is prepared with every file header read.
        config: The label and the split.
        output: Directory for `probe.json` and `rejected.jsonl`; None writes nothing.
        overwrite: Whether an earlier probe at `output` is replaced.
        model_name: Name of the model in the report.
        on_progress: Called with the finished and the total units of work. One utterance encoded once is a unit; a fit
            of the classifier, and the calibration, count as many units as there are utterances.

    Raises:
        ConfigError: The device does not exist, the corpus has another sampling rate than the model, or scikit-learn is
            not installed.
        ProbeError: No utterance has the label, or fewer than two classes have enough utterances.
        ExtractError: A batch does not fit into memory.
        OutputError: `output` exists and may not be replaced, or cannot be written.
        NestError: The model or an input cannot be read.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError("a probe of labels needs scikit-learn: pip install 'nest-pretrain[probe]'.")
    network = as_network(model)
    resolve_device(config.device)
    with (
        _directory(output, overwrite) as directory,
        _opened(inputs, network, directory, "rejected.jsonl", config) as side,
    ):
        labelled = labelled_utterances(side.corpus, config)
        utterances, held_out_ids = split_labelled(labelled, config)
        count_classes(labelled, utterances, held_out_ids)  # raises before any audio is read
        training = [utterance for utterance in utterances if utterance.cut_id not in held_out_ids]
        work = _Work(on_progress, total=2 * len(CONTESTANTS) * len(utterances) + len(training))
        pooled: dict[Contestant, dict[int, NDArray[np.float32]]] = {}
        for name in CONTESTANTS:
            encoder, compute = _contestant(name, network, side, training, log_mel_function, work)
            features = side.read(utterances, encoder, compute, work)
            pooled[name] = {utterance.row: _pooled(utterance) for utterance in features}
        usable = in_all(utterances, list(pooled.values()))
        classes, excluded_classes = count_classes(labelled, usable, held_out_ids)
        usable = [utterance for utterance in usable if utterance.target in classes]
        is_held_out = np.array([utterance.cut_id in held_out_ids for utterance in usable])
        class_numbers = {label: number for number, label in enumerate(classes)}
        labels = np.array([class_numbers[utterance.target] for utterance in usable])
        scores: dict[Contestant, ProbeScore] = {}
        for name in CONTESTANTS:
            matrix = np.stack([pooled[name][utterance.row] for utterance in usable])
            scores[name] = fit_and_score(matrix, labels, is_held_out, config.seed)
            work.finish(len(utterances))
        report = ProbeReport(
            config=config,
            model=model_name,
            classes=classes,
            trained=scores["trained"],
            untrained=scores["untrained"],
            log_mel=scores["log_mel"],
            chance=ProbeScore.from_counts(max(num_held for _, num_held in classes.values()), int(is_held_out.sum())),
            num_unlabelled=len(side.corpus) - len(labelled),
            excluded_classes=excluded_classes,
            left_out=side.rejects.counts,
        )
        write_report(report, directory)
    return report


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


def run_ctc_probe(
    model: Model,
    inputs: AudioInputs,
    test: AudioInputs,
    config: CtcProbeConfig | None = None,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> CtcProbeReport:
    """Compares how well characters are recognised from a trained encoder, an untrained encoder and log-mels.

    Every contestant has the same texts, split, head, learning rates to choose from, and number of epochs. Features are
    computed once and cached on disk. Heads are trained on the CPU.

    Args:
        model: A network, whose encoder is used in eval mode and moved to the device; or the path of one.
        inputs: Transcribed utterances for training; a corpus, or any inputs that `nestdata prepare` reads.
        test: Transcribed utterances that are scored, of other recordings.
        config: How the heads are trained.
        output: Directory for `probe.json`, `hypotheses.jsonl`, `rejected.jsonl` and
            `rejected_test.jsonl`; None writes nothing.
        overwrite: Whether an earlier probe at `output` is replaced.
        model_name: Name of the model in the report.
        on_progress: Called with the finished and the total units of work: an utterance that is encoded once, or on
            which one head is trained.

    Raises:
        ConfigError: The device does not exist, a corpus has another sampling rate than the model, or jiwer is not
            installed.
        ProbeError: There are too few utterances with text, they cannot be split, or both sides have the same audio.
        ExtractError: A batch does not fit into memory.
        OutputError: `output` exists and may not be replaced, or cannot be written.
        NestError: The model or an input cannot be read.
    """
    check_jiwer()
    network, config = as_network(model), config or CtcProbeConfig()
    resolve_device(config.device)
    with (
        _directory(output, overwrite) as directory,
        _opened(inputs, network, directory, "rejected.jsonl", config) as training_side,
        _opened(test, network, directory, "rejected_test.jsonl", config) as test_side,
        tempfile.TemporaryDirectory(dir=directory) as cache_directory,
    ):
        check_disjoint(training_side.corpus, test_side.corpus)
        training = transcribed_utterances(training_side.corpus, "training", training_side.rejects, config.group_by)
        tested = transcribed_utterances(test_side.corpus, "test", test_side.rejects, config.group_by)
        check_enough(len(training), len(tested))
        contestants: list[Contestant] = ["trained", *config.baselines]
        num_heads = len(contestants) * len(config.learning_rates) * len(config.probe_seeds)
        num_calibrating = len(training) if "untrained" in contestants else 0
        num_encoded = len(contestants) * (len(training) + len(tested)) + num_calibrating
        work = _Work(on_progress, total=num_encoded + num_heads * len(training))
        caches: dict[Contestant, tuple[Features, Features]] = {}  # of training and of test utterances
        for name in contestants:
            # The log-mels are what both encoders read: normalised, and stacked to encoder frames.
            encoder, compute = _contestant(name, network, training_side, training, stacked_mel_function, work)
            caches[name] = (
                write_features(Path(cache_directory, name), training_side.read(training, encoder, compute, work)),
                write_features(Path(cache_directory, f"{name}-test"), test_side.read(tested, encoder, compute, work)),
            )
        usable = in_all(training, [of_training for of_training, _ in caches.values()])
        scored = in_all(tested, [of_test for _, of_test in caches.values()])
        labels_per_frame = num_labels_per_frame(frame_rate_hz(network))
        learned = writable(usable, caches["trained"][0], labels_per_frame)
        num_fast = len(scored) - len(writable(scored, caches["trained"][1], labels_per_frame))
        check_enough(len(learned), len(scored))
        fitted, held_out = split_training(learned, config.held_out, config.seed)
        task = HeadTask(
            texts={utterance.row: utterance.target for utterance in learned},
            alphabet=Alphabet.of_texts(utterance.target for utterance in learned),
            training=fitted,
            held_out=held_out,
            labels_per_frame=labels_per_frame,
        )
        finish_head = partial(work.finish, len(training))
        found = {name: _recognise(name, caches[name], task, scored, config, finish_head) for name in contestants}
        (directory / "hypotheses.jsonl").write_text(_hypothesis_lines(scored, found, config), encoding="utf-8")
        report = CtcProbeReport(
            config=config,
            model=model_name,
            alphabet=task.alphabet.characters,
            frame_rate_hz=frame_rate_hz(network),
            labels_per_frame=labels_per_frame,
            num_training=len(fitted),
            num_held_out=len(held_out),
            num_test=len(scored),
            num_too_fast={"training": len(usable) - len(learned), "test": num_fast},
            contestants=[recognition.score for recognition in found.values()],
            differences=[
                Difference(
                    baseline=name,
                    characters=error_difference(found["trained"].characters, found[name].characters, config.seed),
                    words=error_difference(found["trained"].words, found[name].words, config.seed),
                )
                for name in config.baselines
            ],
            left_out={"training": training_side.rejects.counts, "test": test_side.rejects.counts},
        )
        write_report(report, directory)
    return report


class _Work:
    """Counts finished units of work, and reports their number and the total."""

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0

    def finish(self, number: int) -> None:
        """Adds units that were finished since the last call."""
        self._done += number
        if self._on_progress:
            self._on_progress(self._done, self._total)


class _Side(NamedTuple):
    """The training or the test corpus of a probe."""

    corpus: Corpus
    rejects: RejectLog
    config: ProbeConfig | CtcProbeConfig

    def read(
        self, utterances: Sequence[ProbeUtterance], network: NestNetwork, compute: BatchFunction, work: _Work
    ) -> Iterator[Utterance]:
        """Yields features of utterances, longest first. Each is a unit of work; a broken one is rejected."""
        rows = [utterance.row for utterance in utterances]
        limits = (self.config.max_batch_seconds, self.config.device)
        for utterance in iterate_corpus(network, self.corpus, compute, *limits, rows=rows, on_reject=self.rejects.add):
            yield utterance
            work.finish(1)

    def untrained(self, utterances: Sequence[ProbeUtterance], config: NestConfig, work: _Work) -> NestNetwork:
        """Returns a network with initial weights, its batch norm calibrated on utterances; a unit of work each."""
        network = NestNetwork(replace(config, seed=self.config.seed))
        rows = [utterance.row for utterance in utterances]
        limits = (self.config.max_batch_seconds, self.config.device)
        calibrate_batch_norm(network, self.corpus, rows, *limits, on_reject=self.rejects.add)
        work.finish(len(utterances))
        return network


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recognition:
    """Test transcripts of one contestant and their errors, by seed."""

    score: ContestantScore
    hypotheses: list[list[str]]
    characters: ErrorCounts
    """Errors of all seeds, added up over the groups of the test utterances."""

    words: ErrorCounts


@contextmanager
def _directory(output: str | Path | None, overwrite: bool) -> Iterator[Path]:
    """Yields the directory that becomes `output`, or a temporary directory if there is no output."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="nestmodel-probe-") as name:
            yield Path(name)
    else:
        target = Path(output).resolve()
        may_replace = partial(has_json_kind, file_name="probe.json", kind="probe")
        names = re.compile(r"probe\.json|hypotheses\.jsonl|rejected(?:_test)?\.jsonl")
        with output_directory(
            target, kind="a probe", names=names, overwrite=overwrite, may_replace=may_replace
        ) as directory:
            yield directory


@contextmanager
def _opened(
    inputs: AudioInputs, network: NestNetwork, directory: Path, rejected: str, config: ProbeConfig | CtcProbeConfig
) -> Iterator[_Side]:
    """Yields the corpus of the inputs, and the log of its rejects, which is a file in the directory."""
    rate, rejects = network.config.features.sampling_rate, RejectLog()
    with (
        tempfile.TemporaryDirectory(dir=directory) as temporary,
        open_inputs(inputs, rate, Path(temporary), rejects.add) as corpus,
    ):
        yield _Side(corpus, rejects, config)
    rejects.write(directory / rejected)


def _contestant(
    name: Contestant,
    network: NestNetwork,
    side: _Side,
    training: Sequence[ProbeUtterance],
    mel_function: Callable[[NestNetwork], BatchFunction],
    work: _Work,
) -> tuple[NestNetwork, BatchFunction]:
    """Returns the network of a contestant, and the function that computes its features."""
    if name == "log_mel":
        return network, mel_function(network)
    encoder = side.untrained(training, network.config, work) if name == "untrained" else network
    return encoder, layer_function(encoder, "all")


def _pooled(utterance: Utterance) -> NDArray[np.float32]:
    """Returns the mean and the standard deviation over the frames of each layer, one layer after the other."""
    values = utterance.values  # (layers, frames, dim)
    return np.concatenate([values.mean(axis=1), values.std(axis=1)], axis=-1).flatten()


def _recognise(
    name: Contestant,
    caches: tuple[Features, Features],
    task: HeadTask,
    test: Sequence[ProbeUtterance],
    config: CtcProbeConfig,
    finish_head: Callable[[], None],
) -> _Recognition:
    """Chooses the learning rate of a contestant, trains its heads, and counts their errors on the test corpus."""
    # All seeds choose the learning rate: with a low one, some heads write next to nothing, depending on the seed.
    candidates: dict[float, list[tuple[CtcHead, float]]] = {rate: [] for rate in config.learning_rates}
    for rate, trained in candidates.items():
        for seed in config.probe_seeds:
            trained.append(fit_head(caches[0], task, learning_rate=rate, max_epochs=config.max_epochs, seed=seed))
            finish_head()
    held_out = {rate: fmean(error for _, error in trained) for rate, trained in candidates.items()}
    learning_rate = min(held_out, key=held_out.__getitem__)
    heads, rows = candidates[learning_rate], [utterance.row for utterance in test]
    hypotheses = [transcribe(head, caches[1], task.alphabet, rows) for head, _ in heads]
    references, groups = [utterance.target for utterance in test], [utterance.group for utterance in test]
    characters = [count_errors(references, texts, "characters").by_group(groups) for texts in hypotheses]
    words = [count_errors(references, texts, "words").by_group(groups) for texts in hypotheses]
    all_characters, all_words = reduce(add, characters), reduce(add, words)
    score = ContestantScore(
        name=name,
        learning_rate=learning_rate,
        by_seed={
            seed: error_rate(errors, config.seed) for seed, errors in zip(config.probe_seeds, characters, strict=True)
        },
        characters=error_rate(all_characters, config.seed),
        words=error_rate(all_words, config.seed),
    )
    return _Recognition(score=score, hypotheses=hypotheses, characters=all_characters, words=all_words)


def _hypothesis_lines(
    test: Sequence[ProbeUtterance], found: dict[Contestant, _Recognition], config: CtcProbeConfig
) -> str:
    """Returns one JSON line per test utterance: its id, group and text, and its transcripts by features and seed."""
    lines = []
    for i, utterance in enumerate(test):
        line: dict[str, Any] = {"id": utterance.cut_id, "group": utterance.group, "text": utterance.target}
        for name, recognition in found.items():
            texts = zip(config.probe_seeds, recognition.hypotheses, strict=True)
            line[name] = {str(seed): of_seed[i] for seed, of_seed in texts}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)

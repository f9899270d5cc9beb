"""Did it learn anything? A linear classifier on frozen features, beside the same on features that learned nothing.

The labels of a manifest, such as speaker or language, are predicted from each layer of the trained encoder, from each
layer of the same encoder with fresh weights, and from plain log-mel statistics, all on one split and with one
treatment. The untrained encoder reads the same input as the trained one, so what lies between them was learned. The
log-mel statistics see more: level and channel, which are normalised away before the encoder. Where the recordings of a
class were made in one place, they may be hard to beat, and a split by groups is the better question.

Layers hold different things, and each by itself may know less than all of them side by side, which is scored as well.

Guarantees that the split depends on ids, labels and seed alone, not on the order of the manifest. scikit-learn is an
extra, `probe`, and imported where it is used.
"""

import importlib.util
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata import Corpus
from nestmodel.classifier import ProbeScore, score_held_out
from nestmodel.errors import ConfigError, ProbeError
from nestmodel.held_out import Labelled, first_of_each_class, split_held_out
from nestmodel.model import NestModel
from nestmodel.output import output_directory
from nestmodel.utterances import (
    LeftOut,
    OnProgress,
    Utterance,
    check_batch_seconds,
    iterate_features,
    iterate_log_mels,
    labels_of,
    open_inputs,
    resolve_device,
)

Pooled = dict[int, NDArray[np.float32]]
"""By row of the corpus: means, then deviations, for each layer, shape (layers, 2 * dim)."""

_NAMED, _OTHERS = "held out", "trained on"  # groups, where the configuration names what is held out
_LEAST_IN_TRAINING = 2


_SINGLE_SCORES = ("trained_together", "untrained_together", "log_mel", "chance")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """What is predicted, and how the utterances are divided."""

    label: str
    """Name of the label: `language`, `speaker`, `text`, or any other field of the manifest."""

    held_out: float = 0.25
    """Share of the utterances of each class that is scored, in (0, 1); the others are trained on."""

    held_out_where: str | None = None
    """A field and its value, such as `split=test`: what is scored instead of a share of each class."""

    group_by: str | None = None
    """A field, such as `speaker`, all utterances of one value of which are on one side; None splits utterances."""

    train_per_class: int | None = None
    """At most so many utterances of a class are trained on; None takes all. With all, easy labels can be read off
    anything, and encoders look alike."""

    seed: int = 0
    """Of the split, and of the fresh weights of the untrained encoder."""

    max_batch_seconds: float = 120.0
    """Audio in a batch, padding included."""

    device: str = "auto"
    """Where the encoder runs; `auto` takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(f"held_out is {self.held_out:g}: expected a share between 0 and 1.")
        if self.train_per_class is not None and self.train_per_class < _LEAST_IN_TRAINING:
            raise ConfigError(f"train_per_class is {self.train_per_class}: give {_LEAST_IN_TRAINING} or more.")
        if self.held_out_where is not None:
            if not all(self.held_out_where.partition("=")):
                raise ConfigError(
                    f"held_out_where is {self.held_out_where!r}: give a field and a value, as split=test."
                )
            if self.group_by is not None:
                raise ConfigError("held_out_where says which side each utterance is on: drop group_by.")
        check_batch_seconds(self.max_batch_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a probe found, and on what."""

    config: ProbeConfig
    model: str
    classes: dict[str, tuple[int, int]]
    """Utterances that were trained on and held out, by class."""

    trained: list[ProbeScore]
    """By layer: the input of the first block, then the output of each."""

    untrained: list[ProbeScore]
    """The same with the weights that training starts from."""

    trained_together: ProbeScore
    """All layers of the trained encoder side by side."""

    untrained_together: ProbeScore
    """All layers of the untrained one."""

    log_mel: ProbeScore
    """The same of log mels."""

    chance: ProbeScore
    """Always the most frequent class."""

    num_unlabelled: int = 0
    """Utterances without the label, or without the field of `group_by`."""

    left_out_classes: dict[str, str] = field(default_factory=dict)
    """Classes that could not take part, and why."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inputs whose audio could not be used by reason; listed in `rejected.jsonl`."""

    @property
    def num_train(self) -> int:
        """Utterances that were trained on."""
        return sum(train for train, _ in self.classes.values())

    @property
    def num_held_out(self) -> int:
        """Utterances that were scored."""
        return sum(held for _, held in self.classes.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns what `probe.json` holds."""
        scores = {name: [score._asdict() for score in getattr(self, name)] for name in ("trained", "untrained")}
        return {
            "kind": "probe",
            **asdict(self),
            **scores,
            **{name: getattr(self, name)._asdict() for name in _SINGLE_SCORES},
            "num_train": self.num_train,
            "num_held_out": self.num_held_out,
        }


def run_probe(
    model: NestModel,
    inputs: Corpus | Sequence[str | Path],
    config: ProbeConfig,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> ProbeReport:
    """Scores a linear probe on every layer of an encoder, trained and with fresh weights, and on log mels.

    An utterance is the mean and the deviation of its valid frames, for every contestant. The classifier is logistic
    regression on standardised features, its strength of regularisation chosen by cross-validation on the training
    part, anew for each set of features.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        inputs: A corpus; or manifests, folders and corpora, which are prepared with the header of every file read.
        config: The label, and how the utterances are divided.
        output: Where `probe.json`, `probe.png` and `rejected.jsonl` go; None writes nothing.
        overwrite: Whether an earlier probe at `output` is replaced.
        model_name: What the report calls the model.
        on_progress: Called with what is done and its total; a pass over the utterances and a fit count alike.

    Raises:
        ConfigError: The device does not exist, the corpus has another sampling rate than the model, the target is in
            the way, or scikit-learn is not installed.
        ProbeError: No utterance has the label, or fewer than two classes have enough of them.
        ExtractError: A batch does not fit into memory.
        NestDataError: An input cannot be read, or the target not be written.
    """
    _check_installed()
    resolve_device(config.device)
    target = None if output is None else Path(output).resolve()
    with _workplace(target, overwrite) as directory, (directory / "rejected.jsonl").open("w") as rejected:
        with open_inputs(inputs, model, directory) as corpus:
            left_out: Counter[str] = Counter()
            if not isinstance(inputs, Corpus):
                rejected.write((corpus.path / "rejected.jsonl").read_text(encoding="utf-8"))
                left_out.update(corpus.meta["rejected"])
            seen: set[str] = set()

            def leave_out(found: LeftOut) -> None:
                if found.cut_id not in seen:  # the audio is read once for each contestant
                    seen.add(found.cut_id)
                    left_out[found.reason] += 1
                    rejected.write(json.dumps(found._asdict()) + "\n")

            report = _probe(model, corpus, config, leave_out, on_progress)
        report = replace(report, model=model_name, left_out=dict(left_out.most_common()))
        if target is not None:
            rejected.flush()
            draw_probe(report, directory / "probe.png")
            (directory / "probe.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def draw_probe(report: ProbeReport, picture: Path) -> None:
    """Draws accuracy over layers: trained as a line with its interval, untrained dashed, log mels and chance level."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axis = figure.subplots()
    layers = np.arange(len(report.trained))
    for name, scores, colour, style in (
        ("trained", report.trained, "#2f6f9f", "-"),
        ("untrained", report.untrained, "#b5532a", "--"),
    ):
        accuracy, low, high = 100 * np.array(scores).T
        axis.plot(layers, accuracy, style, color=colour, marker="o", markersize=3, label=name)
        axis.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
    for name, score, colour in (
        ("trained, all layers together", report.trained_together, "#2f6f9f"),
        ("untrained, all layers together", report.untrained_together, "#b5532a"),
    ):
        place = len(layers) - 1 + 0.4
        bars = [[100 * (score.accuracy - score.low)], [100 * (score.high - score.accuracy)]]
        axis.errorbar([place], [100 * score.accuracy], bars, fmt="D", markersize=5, color=colour, capsize=3, label=name)
    axis.axhline(100 * report.log_mel.accuracy, color="#4b4b4b", linestyle="-.", label="log-mel statistics")
    axis.axhline(100 * report.chance.accuracy, color="#4b4b4b", linestyle=":", label="chance: the most frequent class")
    label = report.config.label.replace("$", r"\$")  # which would begin a formula
    title = f"{label}: {len(report.classes)} classes, {report.num_train} utterances to train on"
    axis.set_title(f"{title}, {report.num_held_out} held out", loc="left", fontsize=10)
    axis.set_xlabel("layer (0 is the input of the first block)")
    axis.set_ylabel("held-out utterances recognised, %")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def _probe(
    model: NestModel,
    corpus: Corpus,
    config: ProbeConfig,
    leave_out: Callable[[LeftOut], None],
    on_progress: OnProgress | None,
) -> ProbeReport:
    labelled, num_unlabelled = _labelled(corpus, config)
    if config.held_out_where is None:
        held = split_held_out(labelled, config.held_out, config.seed)
    else:
        held = {one.cut_id for one in labelled if one.group == _NAMED}
    training = [one for one in labelled if one.cut_id not in held]
    if config.train_per_class is not None:
        training = first_of_each_class(training, config.train_per_class, config.seed)
    parts = sorted([*training, *(one for one in labelled if one.cut_id in held)], key=lambda one: one.cut_id)
    _classes(labelled, parts, held)  # before any audio is read, for where it cannot work
    tick = _ticker(len(parts), 3 + 2 * (model.config.encoder.num_layers + 2) + 1, on_progress)
    pooled = _pool_all(model, corpus, config, [one.row for one in parts], leave_out, tick)
    usable = [one for one in parts if all(one.row in found for found in pooled.values())]
    classes, left_out_classes = _classes(labelled, usable, held)
    usable = [one for one in usable if one.label in classes]
    is_held = np.array([one.cut_id in held for one in usable])
    numbers = {label: number for number, label in enumerate(classes)}
    labels = np.array([numbers[one.label] for one in usable])
    scores: dict[str, list[ProbeScore]] = {}
    for name, found in pooled.items():
        scores[name] = []
        layers = np.stack([found[one.row] for one in usable], axis=1)  # (layers, utterances, 2 * dim)
        together = np.concatenate(list(layers), axis=1)
        for features in [*layers, *([together] if name != "log_mel" else [])]:
            scores[name].append(score_held_out(features, labels, is_held, config.seed))
            tick(len(parts))
    return ProbeReport(
        config=config,
        model="",
        classes=classes,
        trained=scores["trained"][:-1],
        untrained=scores["untrained"][:-1],
        trained_together=scores["trained"][-1],
        untrained_together=scores["untrained"][-1],
        log_mel=scores["log_mel"][0],
        chance=ProbeScore.of(max(number for _, number in classes.values()), int(is_held.sum())),
        num_unlabelled=num_unlabelled,
        left_out_classes=left_out_classes,
    )


def _pool_all(
    model: NestModel,
    corpus: Corpus,
    config: ProbeConfig,
    rows: list[int],
    leave_out: Callable[[LeftOut], None],
    tick: Callable[[int], None],
) -> dict[str, Pooled]:
    """Returns what each contestant makes of the utterances."""
    batches = (config.max_batch_seconds, config.device)
    found = {}
    for name, encoder in (("trained", model), ("untrained", NestModel(replace(model.config, seed=config.seed)))):
        utterances = iterate_features(encoder, corpus, "all", *batches, rows=rows, on_left_out=leave_out)
        found[name] = _pooled(utterances, tick)
    utterances = iterate_log_mels(model, corpus, *batches, rows=rows, on_left_out=leave_out)
    found["log_mel"] = _pooled(utterances, tick)
    return found


def _labelled(corpus: Corpus, config: ProbeConfig) -> tuple[list[Labelled], int]:
    """Returns the utterances that have the label, and the number of those that do not."""
    found, names = [], Counter[str]()
    field_name, _, value = (config.held_out_where or "").partition("=")
    for row in range(len(corpus)):
        line = corpus.line(row)
        labels = {name: text for name, value in labels_of(line).items() if (text := _text(value))}
        names.update(labels.keys())
        group = line["id"] if config.group_by is None else labels.get(config.group_by)
        if field_name:
            group = _NAMED if labels.get(field_name) == value else _OTHERS
        if config.label in labels and group is not None:
            found.append(Labelled(row, line["id"], labels[config.label], group))
    for what, name in (("label", config.label), ("group_by", config.group_by), ("held_out_where", field_name)):
        if name and not names[name]:
            known = ", ".join(f"{name} ({number})" for name, number in names.most_common(12)) or "none at all"
            raise ProbeError(f"{what} is {name!r}, and no utterance has that. The labels here: {known}.")
    if not found:
        raise ProbeError(f"no utterance has both {config.label!r} and {config.group_by!r}. Drop --group-by.")
    return found, len(corpus) - len(found)


def _text(value: object) -> str:
    """A label as text; empty for what is none."""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def _classes(
    labelled: list[Labelled], usable: list[Labelled], held: set[str]
) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Returns the classes that take part with their numbers in training and held out, and why others do not."""
    num_held = Counter(one.label for one in usable if one.cut_id in held)
    num_train = Counter(one.label for one in usable if one.cut_id not in held)
    classes, left_out = {}, {}
    for name in sorted({one.label for one in labelled}):
        if num_train[name] < _LEAST_IN_TRAINING:
            left_out[name] = f"{num_train[name]} in training, {_LEAST_IN_TRAINING} are needed"
        elif not num_held[name]:
            left_out[name] = "none held out"
        else:
            classes[name] = (num_train[name], num_held[name])
    if len(classes) < 2:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in list(left_out.items())[:5])
        raise ProbeError(
            f"{len(classes)} of {len(classes) + len(left_out)} classes can be probed, and two are needed"
            + (f" ({why})" if why else "")
            + ". Give more utterances of each, another --label, or no --group-by."
        )
    return classes, left_out


def _pooled(utterances: Iterator[Utterance], tick: Callable[[int], None]) -> Pooled:
    found: Pooled = {}
    for utterance in utterances:
        values = utterance.values
        found[utterance.row] = np.concatenate([values.mean(axis=1), values.std(axis=1)], axis=-1)
        tick(1)
    return found


def _ticker(num_rows: int, num_passes: int, on_progress: OnProgress | None) -> Callable[[int], None]:
    done = 0

    def tick(number: int) -> None:
        nonlocal done
        done += number
        if on_progress:
            on_progress(done, num_rows * num_passes)

    return tick


@contextmanager
def _workplace(target: Path | None, overwrite: bool) -> Iterator[Path]:
    if target is None:
        with tempfile.TemporaryDirectory(prefix="nestmodel-probe-") as name:
            yield Path(name)
    else:
        with output_directory(target, overwrite=overwrite, marker="probe.json", kind="probe") as partial:
            yield partial


def _check_installed() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError("a probe needs scikit-learn: pip install 'nest-pretrain[probe]'.")

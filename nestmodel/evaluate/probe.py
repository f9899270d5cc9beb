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
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestdata import Corpus, has_json_kind, output_directory
from nestmodel.errors import ConfigError, ProbeError
from nestmodel.evaluate.classifier import ProbeScore, score_held_out
from nestmodel.evaluate.encode import (
    OnProgress,
    RejectedUtterance,
    Utterance,
    iterate_features,
    iterate_log_mels,
    labels_of,
    open_inputs,
    resolve_device,
)
from nestmodel.evaluate.report import LEAST_IN_TRAINING, ProbeConfig, ProbeReport, draw_probe
from nestmodel.evaluate.split import Labelled, first_of_each_class, split_held_out
from nestmodel.training.module import NestModel

Pooled = dict[int, NDArray[np.float32]]
"""By row of the corpus: means, then deviations, for each layer, shape (layers, 2 * dim)."""

_NAMED, _OTHERS = "held out", "trained on"  # groups, where the configuration names what is held out


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
        ConfigError: The device does not exist, the corpus has another sampling rate than the model, or scikit-learn is
            not installed.
        ProbeError: No utterance has the label, or fewer than two classes have enough of them.
        ExtractError: A batch does not fit into memory.
        OutputError: The target exists, cannot be written, or is being written by another run.
        NestDataError: An input cannot be read.
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

            def leave_out(found: RejectedUtterance) -> None:
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


def _probe(
    model: NestModel,
    corpus: Corpus,
    config: ProbeConfig,
    leave_out: Callable[[RejectedUtterance], None],
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
    classes, excluded_classes = _classes(labelled, usable, held)
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
        excluded_classes=excluded_classes,
    )


def _pool_all(
    model: NestModel,
    corpus: Corpus,
    config: ProbeConfig,
    rows: list[int],
    leave_out: Callable[[RejectedUtterance], None],
    tick: Callable[[int], None],
) -> dict[str, Pooled]:
    """Returns what each contestant makes of the utterances."""
    batches = (config.max_batch_seconds, config.device)
    found = {}
    for name, encoder in (("trained", model), ("untrained", NestModel(replace(model.config, seed=config.seed)))):
        utterances = iterate_features(encoder, corpus, "all", *batches, rows=rows, on_reject=leave_out)
        found[name] = _pooled(utterances, tick)
    utterances = iterate_log_mels(model, corpus, *batches, rows=rows, on_reject=leave_out)
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
        if num_train[name] < LEAST_IN_TRAINING:
            left_out[name] = f"{num_train[name]} in training, {LEAST_IN_TRAINING} are needed"
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
        with output_directory(target, kind="a probe", overwrite=overwrite, may_replace=_is_probe) as partial:
            yield partial


def _is_probe(directory: Path) -> bool:
    return has_json_kind(directory, "probe.json", "probe")


def _check_installed() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError("a probe needs scikit-learn: pip install 'nest-pretrain[probe]'.")

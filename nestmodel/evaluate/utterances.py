"""The utterances that a probe uses: what is predicted from each, their groups, and their split.

Utterances that cannot be used are listed with the reason. The split depends on ids, targets, groups and seed, not on
the order of the utterances. No audio is read here.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from nestdata import Corpus, derive_key
from nestmodel.errors import ProbeError
from nestmodel.evaluate.evaluation_config import MIN_TRAIN_PER_CLASS, ProbeConfig
from nestmodel.evaluate.inputs import RejectLog, cut_labels, reject_cut
from nestmodel.evaluate.text import normalise_text

SideName = Literal["training", "test"]

MIN_UTTERANCES = 10
"""Minimum number of utterances for training, and of test utterances: with fewer, intervals mean little."""

_HELD_OUT, _TRAINING = "held out", "training"  # names of the groups if `held_out_where` defines the split
_MAX_NAMES = 3
_MAX_LABELS = 12
_MAX_CLASSES = 5


class ProbeUtterance(NamedTuple):
    """An utterance that a probe uses."""

    row: int
    """Index of the utterance in its corpus."""

    cut_id: str
    target: str
    """What is predicted: a label, or normalised text."""

    group: str
    """All utterances of a group are on the same side of the split. Intervals of results on a test corpus are drawn from
    whole groups."""


def labelled_utterances(corpus: Corpus, config: ProbeConfig) -> list[ProbeUtterance]:
    """Returns the utterances that have the label and the group.

    Raises:
        ProbeError: No utterance has them.
    """
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
            known = ", ".join(f"{name} ({number})" for name, number in name_counts.most_common(_MAX_LABELS)) or "none"
            raise ProbeError(f"{setting} is {name!r}, and no utterance has that label. The labels here: {known}.")
    if not labelled:
        raise ProbeError(f"no utterance has both {config.label!r} and {config.group_by!r}. Drop --group-by.")
    return labelled


def split_labelled(labelled: list[ProbeUtterance], config: ProbeConfig) -> tuple[list[ProbeUtterance], set[str]]:
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


def count_classes(
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


def transcribed_utterances(
    corpus: Corpus, side: SideName, rejects: RejectLog, group_by: str | None
) -> list[ProbeUtterance]:
    """Returns the utterances of a corpus that have text, by index; adds the others to `rejects`.

    Args:
        corpus: Training or test corpus.
        side: Which of the two it is, for messages: paths of inputs are prepared to a corpus that has no name.
        rejects: Receives utterances without text, or whose text is empty after normalisation.
        group_by: A field of the manifest that defines the groups. Without it, and for utterances that lack it, a group
            is a recording.

    Raises:
        ProbeError: No training utterance has the field `group_by`, or no utterance has text.
    """
    found, num_grouped = [], 0
    for row in range(len(corpus)):
        cut = corpus.line(row)
        labels = cut_labels(cut)
        group = None if group_by is None else labels.get(group_by)
        num_grouped += group is not None
        text = normalise_text(labels["text"]) if isinstance(labels.get("text"), str) else ""
        if not text:
            reason = "empty_text" if labels.get("text") else "no_text"
            detail = f"its text is {labels.get('text')!r}: letters or digits are needed"
            rejects.add(reject_cut(cut, reason, detail))
            continue
        name = f"recording {cut['recording']['id']}" if group is None else f"group {group}"
        found.append(ProbeUtterance(row, cut["id"], text, name))
    if group_by is not None and not num_grouped and side == "training":
        raise ProbeError(f"group_by is {group_by!r}, and no training utterance has that field.")
    if not found:
        raise ProbeError(f"no {side} utterance has text. Give a manifest with the field `text`.")
    return found


def split_training(utterances: Sequence[ProbeUtterance], held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns the indices of the utterances for fitting and of a held-out share, in whole groups.

    Raises:
        ProbeError: There is only one group.
    """
    held_out_ids = split_held_out([utterance._replace(target="") for utterance in utterances], held_out, seed)
    training = [utterance.row for utterance in utterances if utterance.cut_id not in held_out_ids]
    if not training or not held_out_ids:
        raise ProbeError(
            f"{len(utterances)} training utterances are of one group, {utterances[0].group!r}, and cannot be split. "
            "Give more recordings, or another --group-by."
        )
    return training, [utterance.row for utterance in utterances if utterance.cut_id in held_out_ids]


def split_held_out(utterances: Iterable[ProbeUtterance], held_out: float, seed: int) -> set[str]:
    """Returns the ids of the held-out utterances: about a share `held_out` of each class, in whole groups.

    A group counts for the class that most of its utterances have. If a class has two groups or more, each side gets at
    least one of them. The order of the utterances has no effect.
    """
    groups: dict[str, list[ProbeUtterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.group].append(utterance)
    by_class: dict[str, list[str]] = defaultdict(list)
    for name, members in groups.items():
        counts = Counter(utterance.target for utterance in members)
        by_class[min(counts, key=lambda target: (-counts[target], target))].append(name)
    held_out_ids: set[str] = set()
    for names in by_class.values():
        selected = _select_groups({name: len(groups[name]) for name in names}, held_out, seed)
        held_out_ids.update(utterance.cut_id for name in selected for utterance in groups[name])
    return held_out_ids


def limit_per_class(utterances: Iterable[ProbeUtterance], limit: int, seed: int) -> list[ProbeUtterance]:
    """Returns at most `limit` utterances of each class. The order of the utterances does not affect the selection."""

    def drawn(utterance: ProbeUtterance) -> tuple[int, str]:
        return derive_key(seed, f"probe few/{utterance.cut_id}"), utterance.cut_id

    by_class: dict[str, list[ProbeUtterance]] = defaultdict(list)
    for utterance in sorted(utterances, key=drawn):
        if len(by_class[utterance.target]) < limit:
            by_class[utterance.target].append(utterance)
    return [utterance for members in by_class.values() for utterance in members]


def check_enough(num_training: int, num_test: int) -> None:
    """Raises ProbeError if there are too few utterances to train or to score a content probe."""
    if num_training < MIN_UTTERANCES or num_test < MIN_UTTERANCES:
        raise ProbeError(
            f"{num_training} utterances for training and {num_test} for the test can be used: give at least "
            f"{MIN_UTTERANCES} of each."
        )


def check_disjoint(training: Corpus, test: Corpus) -> None:
    """Raises ProbeError if the test corpus has audio of the training corpus: overlapping spans of one file."""
    spans = defaultdict(list)
    for row in range(len(training)):
        cut = training.line(row)
        spans[_source(cut)].append((cut["start"], cut["start"] + cut["duration"]))
    shared = []
    for row in range(len(test)):
        cut = test.line(row)
        start, end = cut["start"], cut["start"] + cut["duration"]
        if any(start < other_end and other_start < end for other_start, other_end in spans[_source(cut)]):
            shared.append(cut["id"])
    if shared:
        names = ", ".join(shared[:_MAX_NAMES]) + (", ..." if len(shared) > _MAX_NAMES else "")
        raise ProbeError(
            f"{len(shared)} of {len(test)} test utterances are audio of the training utterances ({names}). Give other "
            "recordings to --test."
        )


def in_all(utterances: Iterable[ProbeUtterance], features: Collection[Container[int]]) -> list[ProbeUtterance]:
    """Returns the utterances whose index is in all features; a broken utterance is missing in some."""
    return [utterance for utterance in utterances if all(utterance.row in each for each in features)]


def _label_text(value: object) -> str:
    """Returns a label as text; an empty string for a value that cannot be a label."""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def _select_groups(sizes: dict[str, int], share: float, seed: int) -> list[str]:
    """Selects groups that hold about a share of all utterances, in the order of a hash of their names."""
    order = sorted(sizes, key=lambda name: (derive_key(seed, f"probe split/{name}"), name))
    target, num_selected, selected = share * sum(sizes.values()), 0, []
    for name in order:
        if num_selected + sizes[name] / 2 <= target:
            selected.append(name)
            num_selected += sizes[name]
    if len(order) > 1 and not selected:
        return [min(order, key=sizes.__getitem__)]
    return selected[:-1] if len(selected) == len(order) else selected


def _source(cut: dict[str, Any]) -> str:
    """Returns where the audio of a cut is: its files or URLs, and the channel."""
    sources = sorted((source["type"], str(source["source"])) for source in cut["recording"]["sources"])
    return f"{sources} {cut['channel']}"

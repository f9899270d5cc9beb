"""The utterances of a training and a test corpus that a probe uses: their normalised texts, their groups, their split.

Utterances that cannot be used are listed with the reason. No audio is read here.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from nestdata import Corpus
from nestmodel.errors import ProbeError
from nestmodel.evaluate.inputs import audio_path, cut_labels
from nestmodel.evaluate.rejects import RejectedUtterance, RejectLog
from nestmodel.evaluate.split import LabelledUtterance, split_held_out
from nestmodel.evaluate.text import normalise_text

MIN_UTTERANCES = 10
"""Minimum number of utterances for training, and of test utterances: with fewer, intervals mean little."""

_MAX_NAMES = 3


class SpeechUtterance(NamedTuple):
    """An utterance that a probe uses."""

    row: int
    """Index of the utterance in its corpus."""

    cut_id: str
    text: str
    """Normalised text; empty if the probe needs none."""

    group: str
    """Utterances of a group are on the same side of the split into training and held-out utterances. Intervals of test
    results are drawn from whole groups."""


class SplitRows(NamedTuple):
    """Indices of the utterances of a training corpus, in order."""

    training: list[int]
    held_out: list[int]


def speech_utterances(
    corpus: Corpus, side: Literal["training", "test"], rejects: RejectLog, *, needs_text: bool, group_by: str | None
) -> list[SpeechUtterance]:
    """Returns the utterances of a corpus that can be used, by index; adds the others to `rejects`.

    Args:
        corpus: Training or test corpus.
        side: Which of the two it is, for messages: paths of inputs are prepared to a corpus that has no name.
        rejects: Receives utterances without text, or whose text is empty after normalisation.
        needs_text: Whether utterances need a text.
        group_by: A field of the manifest that defines the groups. Without it, and for utterances that lack it, a group
            is a recording.

    Raises:
        ProbeError: No training utterance has the field `group_by`, or no utterance has a text that is needed.
    """
    found, num_grouped = [], 0
    for row in range(len(corpus)):
        cut = corpus.line(row)
        labels = cut_labels(cut)
        group = None if group_by is None else labels.get(group_by)
        num_grouped += group is not None
        text = normalise_text(labels["text"]) if isinstance(labels.get("text"), str) else ""
        if needs_text and not text:
            reason = "empty_text" if labels.get("text") else "no_text"
            detail = f"its text is {labels.get('text')!r}: letters or digits are needed"
            rejects.add(RejectedUtterance(audio_path(cut) or "", cut["id"], reason, detail))
            continue
        name = f"recording {cut['recording']['id']}" if group is None else f"group {group}"
        found.append(SpeechUtterance(row, cut["id"], text if needs_text else "", name))
    if group_by is not None and not num_grouped and side == "training":
        raise ProbeError(f"group_by is {group_by!r}, and no training utterance has that field.")
    if not found:
        raise ProbeError(f"no {side} utterance has text. Give a manifest with the field `text`.")
    return found


def split_training(utterances: Sequence[SpeechUtterance], held_out: float, seed: int) -> SplitRows:
    """Splits training utterances into those for fitting and a held-out share, in whole groups.

    Raises:
        ProbeError: There is only one group.
    """
    labelled = [LabelledUtterance(one.row, one.cut_id, "", one.group) for one in utterances]
    held_out_ids = split_held_out(labelled, held_out, seed)
    rows = SplitRows(
        training=[one.row for one in utterances if one.cut_id not in held_out_ids],
        held_out=[one.row for one in utterances if one.cut_id in held_out_ids],
    )
    if not rows.training or not rows.held_out:
        raise ProbeError(
            f"{len(utterances)} training utterances are of one group, {utterances[0].group!r}, and cannot be split. "
            "Give more recordings, or another --group-by."
        )
    return rows


def split_name(group_by: str | None) -> str:
    """Returns for reports what `split_training` keeps together."""
    return "in whole recordings" if group_by is None else f"in whole groups of `{group_by}`"


def interval_name(test_groups: Iterable[str], group_by: str | None) -> str:
    """Returns for reports what the intervals of test results are drawn from."""
    groups = set(test_groups)
    if len(groups) < 2:
        return "utterances"
    if group_by is not None and any(group.startswith("group ") for group in groups):
        return f"{len(groups)} groups of `{group_by}`"
    return f"{len(groups)} recordings"


def check_enough(num_training: int, num_test: int) -> None:
    """Raises ProbeError if there are too few utterances to train or to score a probe."""
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


def _source(cut: dict[str, Any]) -> str:
    """Returns where the audio of a cut is: its files or URLs, and the channel."""
    sources = sorted((one["type"], str(one["source"])) for one in cut["recording"]["sources"])
    return f"{sources} {cut['channel']}"

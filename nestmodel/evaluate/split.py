"""The split into training and held-out utterances. It depends on ids, labels, groups and seed, not on their order."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nestdata import derive_key


class LabelledUtterance(NamedTuple):
    """An utterance with its label."""

    row: int
    """Index of the utterance in the corpus."""

    cut_id: str
    label: str
    group: str
    """All utterances of a group are on the same side of the split."""


def split_held_out(utterances: Iterable[LabelledUtterance], held_out: float, seed: int) -> set[str]:
    """Returns the ids of the held-out utterances: about a share `held_out` of each class, in whole groups.

    A group counts for the class that most of its utterances have. If a class has two groups or more, each side gets at
    least one of them. The order of the utterances has no effect.
    """
    groups: dict[str, list[LabelledUtterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.group].append(utterance)
    by_class: dict[str, list[str]] = defaultdict(list)
    for name, members in groups.items():
        counts = Counter(utterance.label for utterance in members)
        by_class[min(counts, key=lambda label: (-counts[label], label))].append(name)
    held_out_ids: set[str] = set()
    for names in by_class.values():
        selected = _select_groups({name: len(groups[name]) for name in names}, held_out, seed)
        held_out_ids.update(utterance.cut_id for name in selected for utterance in groups[name])
    return held_out_ids


def limit_per_class(utterances: Iterable[LabelledUtterance], limit: int, seed: int) -> list[LabelledUtterance]:
    """Returns at most `limit` utterances of each class. The order of the utterances does not affect the selection."""
    by_class: dict[str, list[LabelledUtterance]] = defaultdict(list)
    for utterance in sorted(utterances, key=lambda one: (derive_key(seed, f"probe few/{one.cut_id}"), one.cut_id)):
        if len(by_class[utterance.label]) < limit:
            by_class[utterance.label].append(utterance)
    return [utterance for members in by_class.values() for utterance in members]


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

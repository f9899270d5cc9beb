"""Which labelled utterances are held out and which are trained on: a hash of their ids, whatever their order."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nestdata import derive_key


class Labelled(NamedTuple):
    """An utterance that could take part."""

    row: int
    cut_id: str
    label: str
    group: str
    """Utterances of one group are on one side."""


def split_held_out(labelled: Iterable[Labelled], held_out: float, seed: int) -> set[str]:
    """Returns the ids that are held out: of each class about this share, and whole groups.

    A group belongs to the class that most of its utterances have. Where a class has two groups or more, one at least
    is on each side. The order of the utterances does not matter.
    """
    groups: dict[str, list[Labelled]] = defaultdict(list)
    for one in labelled:
        groups[one.group].append(one)
    by_class: dict[str, list[str]] = defaultdict(list)
    for name, members in groups.items():
        counts = Counter(one.label for one in members)
        by_class[min(counts, key=lambda label: (-counts[label], label))].append(name)
    held: set[str] = set()
    for names in by_class.values():
        chosen = _chosen_groups({name: len(groups[name]) for name in names}, held_out, seed)
        held.update(one.cut_id for name in chosen for one in groups[name])
    return held


def first_of_each_class(training: Iterable[Labelled], number: int, seed: int) -> list[Labelled]:
    """Returns at most so many utterances of each class, the same whatever the order."""
    by_class: dict[str, list[Labelled]] = defaultdict(list)
    for one in sorted(training, key=lambda one: (derive_key(seed, f"probe few/{one.cut_id}"), one.cut_id)):
        if len(by_class[one.label]) < number:
            by_class[one.label].append(one)
    return [one for some in by_class.values() for one in some]


def _chosen_groups(sizes: dict[str, int], share: float, seed: int) -> list[str]:
    """Chooses groups, in an order that is a hash of their names, that make up about a share of all."""
    order = sorted(sizes, key=lambda name: (derive_key(seed, f"probe split/{name}"), name))
    wanted, taken, chosen = share * sum(sizes.values()), 0, []
    for name in order:
        if taken + sizes[name] / 2 <= wanted:
            chosen.append(name)
            taken += sizes[name]
    if len(order) > 1 and not chosen:
        return [min(order, key=sizes.__getitem__)]
    return chosen[:-1] if len(chosen) == len(order) else chosen

"""Gives repeated ids a distinct suffix or prefix.

Ids repeat if two corpora have equal file names, or if the keys of each tar begin again. An entry of another span,
channel, file or source is other audio, and its new id says what differs. Other repetitions are the same audio twice, or
two forms of one recording, such as `a.wav` and `a.mp3` in a folder.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.prepare.found import MIXED_CHANNEL, digest
from nestdata.prepare.inputs.entry import Source, span_suffix


class ToldApart(NamedTuple):
    """What becomes of the cuts of entries that repeat an earlier id, by the indices of their records."""

    new_ids: dict[int, tuple[str, str]]
    """The old and the new id of the entry, for other audio."""

    same_as: dict[int, int]
    """The earlier cut of the same audio."""


class _Audio(NamedTuple):
    """What distinguishes the audio of an entry."""

    location: str
    form: str
    """The location without suffix."""

    source: int
    channel: int
    start: float
    duration: float


@dataclass(slots=True)
class _Known:
    """The entries of one id so far."""

    same: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """The first cut of each, by what makes another entry the same audio."""

    starts: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))
    """Starts by location."""

    channels: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Channels by location."""

    sources: set[int] = field(default_factory=set)

    def add(self, audio: _Audio, index: int) -> None:
        """Adds an entry."""
        self.same |= dict.fromkeys(_identities(audio), index)
        self.starts[audio.location].add(audio.start)
        self.channels[audio.location].add(audio.channel)
        self.sources.add(audio.source)


def tell_apart(
    records: NDArray[Any],
    repeated: Mapping[int, int],
    cut_at: Callable[[int], dict[str, Any]],
    sources: Sequence[Source],
) -> ToldApart:
    """Tells entries apart that repeat the id of an earlier one.

    Args:
        records: One for each cut, shape (num_cuts,), dtype `RECORD`.
        repeated: The indices of the cuts of such entries, each with the index of the first cut with this id.
        cut_at: Returns the cut of a record by its index.
        sources: The sources, by the index that records have.
    """

    def audio_at(index: int) -> tuple[dict[str, Any], _Audio]:
        cut, record = cut_at(index), records[index]
        location = audio_of(cut)
        form, span = _without_suffix(location), (cut["start"], cut["duration"])
        return cut, _Audio(location, form, int(record["source"]), int(record["channel"]), *span)

    entries: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in sorted(repeated):
        entries[tuple(int(records[index][name]) for name in ("entry", "source", "number"))].append(index)
    found, known = ToldApart({}, {}), dict[int, _Known]()
    taken, added = np.sort(records["entry"]), set[int]()
    for (entry, *_), indices in entries.items():
        if entry not in known:
            known[entry] = _Known()
            known[entry].add(audio_at(repeated[indices[0]])[1], repeated[indices[0]])
        cut, audio = audio_at(indices[0])
        earlier = next((known[entry].same[key] for key in _identities(audio) if key in known[entry].same), None)
        if earlier is not None:
            found.same_as.update(dict.fromkeys(indices, earlier))
            continue
        known[entry].add(audio, indices[0])
        old = entry_id(cut, records[indices[0]])
        for new in _other_ids(old, audio, known[entry], str(sources[audio.source].path)):
            number = digest(new)
            at = int(np.searchsorted(taken, np.uint64(number)))
            if number not in added and number not in taken[at : at + 1].tolist():
                added.add(number)
                found.new_ids.update(dict.fromkeys(indices, (old, new)))
                break
        else:
            found.same_as.update(dict.fromkeys(indices, repeated[indices[0]]))
    return found


def entry_id(cut: Mapping[str, Any], record: np.void) -> str:
    """Returns the id of the entry of a cut."""
    cut_id: str = cut["id"]
    return cut_id if record["entry"] == record["id"] else cut_id.rpartition("@")[0]


def renamed(cut: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Returns a cut with another id; ids of its recording and labels change, too, if they begin with the old id."""
    for part in (cut, cut["recording"], *cut["supervisions"]):
        for key in ("id", "recording_id"):
            value = part.get(key)
            if isinstance(value, str) and (value == old or value.startswith(f"{old}@")):
                part[key] = new + value.removeprefix(old)
    return cut


def audio_of(cut: Mapping[str, Any]) -> str:
    """Returns the path or URL of the audio of a cut, with its place in a tar."""
    sources = [source for source in cut["recording"].get("sources", ()) if cut["channel"] in source["channels"]]
    return str(sources[0].get("source", "")) if sources else "a recording without a source"


def _identities(audio: _Audio) -> list[tuple[Any, ...]]:
    """Returns what makes another entry of this id the same audio: its location, or its name in the same source."""
    span = audio.channel, audio.start
    return [(audio.location, *span), (audio.form, audio.source, *span)]


def _other_ids(old: str, audio: _Audio, known: _Known, source: str) -> Iterator[str]:
    """Yields ids that say what distinguishes an entry from the known ones."""
    span = span_suffix(audio.start, audio.duration) if len(known.starts[audio.location]) > 1 else ""
    channel = ""
    if len(known.channels[audio.location]) > 1:
        channel = "@mix" if audio.channel == MIXED_CHANNEL else f"@ch{audio.channel}"
    yield from dict.fromkeys(old + suffix for suffix in (channel, span, span + channel) if suffix)
    places = [_without_suffix(source), audio.form] if len(known.sources) > 1 else [audio.form]
    for place in places:
        parts = place.split("/")
        # As much of the path as is needed.
        yield from ("/".join([*parts[begin:], old]).lstrip("/") for begin in reversed(range(len(parts))))


def _without_suffix(location: str) -> str:
    """Returns the path or URL of a file or tar without its suffix, and without a place in a tar."""
    folder, slash, name = location.partition("?o=")[0].rstrip("/").rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return folder + slash + (stem if dot and stem and not suffix.isdigit() else name)

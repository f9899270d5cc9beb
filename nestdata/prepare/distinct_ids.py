"""Gives repeated ids a distinct suffix or prefix.

Ids repeat if two corpora have equal file names, or if the keys of each tar begin again. An entry of another span,
channel, file or source is other audio, and its new id says what differs. Other repetitions are the same audio twice, or
two forms of one recording, such as `a.wav` and `a.mp3` in a folder.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.prepare.found import MIXED_CHANNEL, digest
from nestdata.prepare.inputs.entry import Source, span_suffix


class _Audio(NamedTuple):
    """What distinguishes the audio of an entry."""

    location: str
    form: str
    """The location without suffix."""

    source: int
    channel: int
    start: float
    duration: float


def tell_apart(
    records: NDArray[Any],
    repeated: Mapping[int, int],
    cut_at: Callable[[int], dict[str, Any]],
    sources: Sequence[Source],
) -> tuple[dict[int, tuple[str, str]], dict[int, int]]:
    """Tells entries apart that repeat the id of an earlier one.

    Args:
        records: One for each cut, shape (num_cuts,), dtype `RECORD`.
        repeated: The indices of the cuts of such entries, each with the index of the first cut with this id.
        cut_at: Returns the cut of a record by its index.
        sources: The sources, by the index that records have.

    Returns:
        By the index of a cut of such an entry: the old and the new id of the entry, if it is other audio; and the
        index of the earlier cut, if it is the same audio.
    """

    def audio_at(index: int) -> tuple[dict[str, Any], _Audio]:
        cut, record = cut_at(index), records[index]
        location = audio_of(cut)
        form, span = _without_suffix(location), (cut["start"], cut["duration"])
        return cut, _Audio(location, form, int(record["source"]), int(record["channel"]), *span)

    entries: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in sorted(repeated):
        entries[tuple(int(records[index][name]) for name in ("entry", "source", "number"))].append(index)
    new_ids, same_as = dict[int, tuple[str, str]](), dict[int, int]()
    taken, added = np.sort(records["entry"]), set[int]()
    # The first cut of each audio of an id, and the starts and channels of each location, and the sources of each id.
    first_of = dict[tuple[Any, ...], int]()
    known: dict[tuple[Any, ...], set[Any]] = defaultdict(set)

    def add(entry: int, audio: _Audio, index: int) -> None:
        first_of.update({(entry, *key): index for key in _identities(audio)})
        known[entry, "start", audio.location].add(audio.start)
        known[entry, "channel", audio.location].add(audio.channel)
        known[entry, "source"].add(audio.source)

    for (entry, *_), indices in entries.items():
        first = repeated[indices[0]]
        if (entry, "source") not in known:
            add(entry, audio_at(first)[1], first)
        cut, audio = audio_at(indices[0])
        earlier = next((first_of[entry, *key] for key in _identities(audio) if (entry, *key) in first_of), None)
        if earlier is not None:
            same_as |= dict.fromkeys(indices, earlier)
            continue
        add(entry, audio, indices[0])
        old = entry_id(cut, records[indices[0]])
        starts, channels = known[entry, "start", audio.location], known[entry, "channel", audio.location]
        source = str(sources[audio.source].path) if len(known[entry, "source"]) > 1 else ""
        for new in _other_ids(old, audio, len(starts) > 1, len(channels) > 1, source):
            number = digest(new)
            at = int(np.searchsorted(taken, np.uint64(number)))
            if number not in added and number not in taken[at : at + 1].tolist():
                added.add(number)
                new_ids |= dict.fromkeys(indices, (old, new))
                break
        else:
            same_as |= dict.fromkeys(indices, first)
    return new_ids, same_as


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


def _other_ids(old: str, audio: _Audio, has_span: bool, has_channel: bool, source: str) -> Iterator[str]:
    """Yields ids that say what distinguishes an entry from the known ones.

    Args:
        old: The repeated id.
        audio: The audio of the entry.
        has_span: Whether other entries have another start in its file.
        has_channel: Whether other entries have another channel of its file.
        source: The path of its source, if other entries are from other sources.
    """
    span = span_suffix(audio.start, audio.duration) if has_span else ""
    channel = ("@mix" if audio.channel == MIXED_CHANNEL else f"@ch{audio.channel}") if has_channel else ""
    yield from dict.fromkeys(old + suffix for suffix in (channel, span, span + channel) if suffix)
    places = [_without_suffix(source), audio.form] if source else [audio.form]
    for place in places:
        parts = place.split("/")
        # As much of the path as is needed.
        yield from ("/".join([*parts[begin:], old]).lstrip("/") for begin in reversed(range(len(parts))))


def _without_suffix(location: str) -> str:
    """Returns the path or URL of a file or tar without its suffix, and without a place in a tar."""
    folder, slash, name = location.partition("?o=")[0].rstrip("/").rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return folder + slash + (stem if dot and stem and not suffix.isdigit() else name)

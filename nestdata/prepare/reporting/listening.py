"""Chooses cuts and rejects of a corpus that one should listen to, and copies their audio into the folder of the report.

The choice depends only on the content of the corpus: shortest and longest cuts, keyed draws for each language and each
reason of rejection, and the loudest, quietest and clipped ones among cuts that are drawn by a key and decoded. The time
depends on the number of samples, not on the size of the corpus; a slow store is not waited for.
"""

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.decode import load_samples, samples_in
from nestdata.corpus.addresses import AddressTable
from nestdata.errors import AudioError, StorageError, in_one_line, shortened
from nestdata.output import is_full_disk, path_before_move
from nestdata.prepare.inputs.remote import in_parallel, in_time
from nestdata.prepare.reporting.sound import MAX_SECONDS, Levels, Sound, measure, read_sound, write_sound
from nestdata.prepare.writing.draw import KeyedDraw
from nestdata.prepare.writing.found import AudioSpan, Reject, span_at_address
from nestdata.stateless_rng import StatelessRng
from nestdata.storage import is_url

_log = logging.getLogger(__name__)

FOLDER = "report"
"""Folder of the copied audio, beside the page."""

MAX_EXAMINED = 128
"""Number of cuts that are decoded to find the loudest, the quietest and clipped ones, if they are local files."""

MAX_EXAMINED_REMOTE = 32
"""The same if the audio of the corpus is in an object store."""

MAX_FILES = 150
MAX_BYTES = 8_000_000
"""Number and total size of the copied files; once they are reached, further samples are left out."""

MAX_STORE_SECONDS = 60.0
"""How long the report waits for an object store to measure cuts, and again to copy samples."""

_EXTREMES = ("shortest", "longest", "loudest", "quietest", "clipped", "not decodable")
MAX_TEXT = 300
"""Characters of a text or a name that are shown."""

# Lines of `cuts.jsonl` are usually shorter than this.
_LINE_BYTES = 2048
_BLOCK = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A cut or reject in the tables of samples."""

    group: str
    """Why it is shown, such as `shortest` or `language en`."""

    name: str
    """Id of the cut."""

    detail: str
    """The text of the cut, or the explanation of the reject."""

    where: str = ""
    """Position of a reject in the input."""

    language: str = ""
    speaker: str = ""
    seconds: float | None = None
    """Duration of the cut; None if it is not known."""

    file: str = ""
    """The copied audio, relative to the page; empty if there is none."""

    error: str = ""
    """Why there is no audio."""

    levels: Levels | None = None


@dataclass(kw_only=True, slots=True)
class Listening:
    """What the page needs for its tables of samples."""

    cuts: list[Sample] = field(default_factory=list)
    rejects: list[Sample] = field(default_factory=list)
    num_examined: int = 0
    """Number of cuts whose level was measured."""

    num_failed: int = 0
    """Number of those that could not be decoded."""

    num_left_out: int = 0
    """Number of samples for which there was no space."""

    failure: str = ""
    """Why there are no samples; empty if nothing went wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListeningConfig:
    """How many samples are copied, and where the corpus is."""

    per_group: int
    """Number of samples of each group, at most `MAX_DRAWN`."""

    directory: Path
    """The corpus directory while it is written."""

    stored_in: Path
    """Its path once it is in place: paths of extracted audio start with it."""

    is_probed: bool
    """Whether the audio has been read before. If not, as with trusted durations, audio at URLs is not read either, and
    what libsndfile cannot read is not decoded with Lhotse, whose import takes seconds."""


class _Request(NamedTuple):
    """A sample whose audio is to be copied."""

    sample: Sample
    span: AudioSpan | None
    row: dict[str, Any] | None
    """The cut as a dict; None for a reject."""


def collect_samples(
    config: ListeningConfig,
    addresses: AddressTable | None,
    languages: dict[str, list[int]],
    rejects: KeyedDraw[Reject],
) -> Listening:
    """Chooses samples, and copies the beginnings of their audio to the folder `FOLDER` of the corpus directory.

    If anything goes wrong, there are no samples, and the result says why: the corpus does not need them.

    Args:
        config: How many samples are copied, and where the corpus is.
        addresses: Where the bytes of the cuts are, if any cut has an address.
        languages: Cuts of each language, by the byte at which their line starts, in the order of the draw.
        rejects: Rejects of each reason.

    Raises:
        OSError: The disk is full.
    """
    try:
        return _collected(config, addresses, languages, rejects)
    except Exception as error:
        if isinstance(error, OSError) and is_full_disk(error):
            raise
        failure = in_one_line(error)
        _log.warning("%s: the report has no samples to listen to (%s)", config.stored_in, failure)
        shutil.rmtree(config.directory / FOLDER, ignore_errors=True)
        return Listening(failure=failure)


def _collected(
    config: ListeningConfig,
    addresses: AddressTable | None,
    languages: dict[str, list[int]],
    rejects: KeyedDraw[Reject],
) -> Listening:
    """Does the work of `collect_samples`."""
    with _Cuts(config.directory, addresses) as cuts:
        levels = _examine(config, cuts)
        groups = _extremes(config, cuts, levels) + _of_languages(config, cuts, languages)
    listening = Listening(num_examined=len(levels), num_failed=sum(isinstance(found, str) for found in levels.values()))
    of_rejects = [
        [_request_of_reject(reject) for reject in rejects[reason][: config.per_group]] for reason in sorted(rejects)
    ]
    # One sample of each group before the second one of any, and rare kinds first, in case the space is not enough.
    turns = [
        request
        for turn in zip_longest(*groups[: len(_EXTREMES)], *of_rejects, *groups[len(_EXTREMES) :])
        for request in turn
        if request
    ]
    copied = _copy(config, turns)
    listening.num_left_out = len(turns) - len(copied)
    for shown, requests in ((listening.cuts, groups), (listening.rejects, of_rejects)):
        shown += [copied[request.sample] for group in requests for request in group if request.sample in copied]
    return listening


class _Cuts:
    """The cuts of a corpus that is being written, in the order of its index."""

    def __init__(self, directory: Path, addresses: AddressTable | None) -> None:
        self._index = np.load(directory / "index.npy", mmap_mode="r")
        # Not a memory map, whose pages would count as memory of this process.
        self._lines = (directory / "cuts.jsonl").open("rb", buffering=_LINE_BYTES)
        self._addresses = addresses

    def __enter__(self) -> "_Cuts":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def __len__(self) -> int:
        return int(self._index.shape[1])

    def request(self, group: str, index: int) -> _Request:
        """Returns the request of a cut."""
        self._lines.seek(int(self._index[1, index]))
        row: dict[str, Any] = orjson.loads(self._lines.readline())
        label = (row["supervisions"] or [{}])[0]
        sample = Sample(
            group=group,
            name=shortened(row["id"], MAX_TEXT),
            detail=str(label.get("text") or "")[:MAX_TEXT],
            language=str(label.get("language") or ""),
            speaker=shortened(str(label.get("speaker") or ""), MAX_TEXT),
            seconds=row["duration"],
        )
        return _Request(sample, span_at_address(row, self._addresses[index] if self._addresses else None), row)

    def positions(self, starts: Sequence[int]) -> dict[int, int]:
        """Returns the indices of the cuts whose lines start at the given bytes."""
        wanted, found = np.unique(np.array(starts, np.int64)), dict[int, int]()
        for first in range(0, len(self), _BLOCK) if len(wanted) else ():
            block: NDArray[np.int64] = np.asarray(self._index[1, first : first + _BLOCK])
            nearest = wanted[np.minimum(np.searchsorted(wanted, block), len(wanted) - 1)]
            found |= {int(block[i]): first + i for i in np.flatnonzero(nearest == block).tolist()}
        return found


def _examine(config: ListeningConfig, cuts: _Cuts) -> dict[int, Levels | str]:
    """Measures cuts that are drawn by a key.

    Returns:
        The levels by index of the cut, or the error.
    """
    drawn = StatelessRng(0, "report", len(cuts)).distinct(min(MAX_EXAMINED, len(cuts)), len(cuts))
    requests = [cuts.request("", index) for index in drawn]
    if any(_is_remote(request) for request in requests):
        most = MAX_EXAMINED_REMOTE if config.is_probed else 0
        drawn, requests = drawn[:most], requests[:most]
    found = (measure(sound.samples) if isinstance(sound, Sound) else sound for sound in _sounds(config, requests))
    return dict(zip(drawn, found, strict=True))


def _extremes(config: ListeningConfig, cuts: _Cuts, levels: dict[int, Levels | str]) -> list[list[_Request]]:
    """Returns the requests of the groups in `_EXTREMES`."""
    measured = {index: found for index, found in levels.items() if isinstance(found, Levels)}
    by_level = sorted(measured, key=lambda index: (measured[index].rms_db, index))
    clipped = sorted((index for index in measured if measured[index].clipped), key=lambda i: -measured[i].clipped)
    failed = [index for index in levels if index not in measured]
    last = len(cuts) - 1
    chosen = (range(last + 1), range(last, -1, -1), by_level[::-1], by_level, clipped, failed)
    groups = zip(_EXTREMES, chosen, strict=True)
    return [[cuts.request(group, index) for index in indices[: config.per_group]] for group, indices in groups]


def _of_languages(config: ListeningConfig, cuts: _Cuts, languages: dict[str, list[int]]) -> list[list[_Request]]:
    starts = {name: starts[: config.per_group] for name, starts in languages.items()}
    positions = cuts.positions([start for group in starts.values() for start in group])
    groups = {
        name: [cuts.request(f"language: {shortened(name, MAX_TEXT)}", positions[start]) for start in starts[name]]
        for name in starts
    }
    # A cut of another language may have the id of a duplicate that was drawn.
    return [[request for request in group if request.sample.language == name] for name, group in groups.items()]


def _request_of_reject(reject: Reject) -> _Request:
    sample = Sample(
        group=reject.reason, name=shortened(reject.cut_id, MAX_TEXT), detail=reject.detail, where=reject.where
    )
    return _Request(sample, reject.audio, None)


def _copy(config: ListeningConfig, requests: list[_Request]) -> dict[Sample, Sample]:
    """Copies audio in order while there is space; the same span is copied once.

    Returns:
        What is known after copying, for each sample that is not left out.
    """
    folder = config.directory / FOLDER
    folder.mkdir()
    known: dict[AudioSpan | None, dict[str, Any]] = {None: {"error": "not stored as a file"}}
    num_files = num_bytes = 0
    # Each span once, by its first request.
    spans = {request.span: request for request in reversed(requests) if request.span}
    firsts = [request for request in requests if request.span and spans[request.span] is request]
    for request, sound in zip(firsts, _sounds(config, firsts), strict=True):
        if isinstance(sound, str):
            known[request.span] = {"error": sound}
            continue
        name = f"{num_files + 1:03d}.flac"
        try:
            num_bytes += write_sound(folder / name, sound)
        except AudioError as error:
            known[request.span] = {"error": str(error)}
            continue
        num_files += 1
        known[request.span] = {"file": f"{FOLDER}/{name}", "levels": measure(sound.samples)}
        if num_files >= MAX_FILES or num_bytes >= MAX_BYTES:
            break
    return {
        request.sample: replace(request.sample, **known[request.span]) for request in requests if request.span in known
    }


def _sounds(config: ListeningConfig, requests: Iterable[_Request]) -> Iterator[Sound | str]:
    """Yields the beginning of the audio of each request in order, or why it cannot be decoded; URLs in parallel."""
    until = time.monotonic() + MAX_STORE_SECONDS

    def sound_of(request: _Request) -> Sound | str:
        if not _is_remote(request):
            return _sound_of(config, request)
        try:
            return in_time(partial(_sound_of, config), request, until)
        except TimeoutError:
            return f"the store did not send it within {MAX_STORE_SECONDS:g} s"

    return in_parallel(sound_of, requests, is_slow=_is_remote)


def _sound_of(config: ListeningConfig, request: _Request) -> Sound | str:
    if request.span is None:
        return "not stored as a file"
    if _is_remote(request) and not config.is_probed:
        return "no audio in the object store was read (--probe missing)"
    span = request.span._replace(location=path_before_move(request.span.location, config.stored_in, config.directory))
    try:
        return read_sound(span)
    except (AudioError, StorageError, OSError) as error:
        detail = str(error).replace(str(config.directory), str(config.stored_in))[:MAX_TEXT]
        if not isinstance(error, AudioError) or not config.is_probed or request.row is None or span.extent:
            return detail
    return _decoded_by_lhotse(request.row, span.location) or detail


def _decoded_by_lhotse(row: dict[str, Any], path: str) -> Sound | None:
    """Decodes the beginning of a file that libsndfile does not read; None if it cannot be decoded either."""
    for source in row["recording"]["sources"]:
        source["source"] = path
    rate = row["recording"]["sampling_rate"]
    num_samples = samples_in(min(row["duration"], MAX_SECONDS), rate)
    with suppress(AudioError, StorageError):
        return Sound(load_samples(row, num_samples=num_samples), rate)
    return None


def _is_remote(request: _Request) -> bool:
    return request.span is not None and is_url(request.span.location)

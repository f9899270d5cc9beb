"""Audio files at URLs: they become members of their own objects, and are fetched many at a time."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.entry import Audio, Entry, File, LhotseCut, Member, Unusable, at_member
from nestdata.redaction import redacted_url
from nestdata.storage import DaemonPool, has_scheme, is_url, storage
from nestdata.storage.location import parse_url

# Larger objects are not fetched whole: their headers are read by ranges. With 32 requests at a time, a process thus
# holds at most 256 MiB.
_MAX_LOADED_BYTES = 8 << 20

_POINTER_SPAN = re.compile(r"\?o=\d+&e=\d+(&n=[^&]*(&s=1)?)?$")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def with_members(entries: Iterable[tuple[int, Entry]], is_read: Callable[[Entry], bool]) -> Iterator[tuple[int, Entry]]:
    """Yields numbered entries in order; entries with audio at a URL get a member, or a problem if it is not usable.

    Objects are asked for and fetched many at a time, as far ahead as `StorageConfig.max_requests`.

    Args:
        entries: The entries of a task, with their numbers.
        is_read: Returns whether the audio of an entry will be read. Only then is it fetched.

    Raises:
        ManifestError: A store cannot hold what a URL names, or a setting of the store is wrong.
        StorageError: A store cannot be read.
    """

    def is_slow(pair: tuple[int, Entry]) -> bool:
        audio = pair[1].audio
        return bool(_url_of(audio)) and (audio.member is None or is_read(pair[1]))

    def located(pair: tuple[int, Entry]) -> tuple[int, Entry]:
        return (pair[0], _with_member(pair[1], is_read)) if is_slow(pair) else pair

    entries = iter(entries)
    for pair in entries:
        audio = pair[1].audio
        # Most inputs have local files only, and this costs a tenth of the time of a line whose duration is trusted.
        if not isinstance(audio, File) or "://" in audio.location:
            checked = ((number, _with_valid_urls(entry)) for number, entry in chain([pair], entries))
            yield from in_parallel(located, checked, is_slow=is_slow)
            return
        yield pair


def in_parallel(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, is_slow: Callable[[_Item], bool]
) -> Iterator[_Result]:
    """Yields the results of a function for items, in order; from a slow item on, several are computed at a time.

    Args:
        function: Computes the result of an item.
        items: The items.
        is_slow: Whether the result of an item takes time.
    """
    limit = storage().config.max_requests
    pool = DaemonPool(limit, "nestdata-prepare")
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            if not (waiting or is_slow(item)):
                yield function(item)
                continue
            waiting.append(pool.submit(function, item))
            while waiting and (waiting[0].done() or len(waiting) >= limit):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.close()


def _url_of(audio: Audio) -> str:
    """Returns the URL of audio that must be located or may be fetched; empty for any other audio."""
    if audio.member:
        location = "" if audio.member.is_loaded else audio.member.location
    else:
        location = audio.source_of("url") if isinstance(audio, LhotseCut) else audio.location
    return location if is_url(location) else ""


def _given_urls(audio: Audio) -> Iterator[str]:
    """Yields what audio gives as URLs of any scheme; Lhotse would run one that begins with `pipe:`."""
    match audio:
        case File(path):
            if has_scheme(path):
                yield path
        case LhotseCut(row):
            for source in row["recording"]["sources"]:
                kind, location = source["type"], str(source["source"])
                if kind == "url" or has_scheme(location):
                    yield _POINTER_SPAN.sub("", location)


def _with_valid_urls(entry: Entry) -> Entry:
    """Returns an entry; if one of its URLs holds credentials or is not valid, the entry as a reject without URLs."""
    for location in _given_urls(entry.audio):
        try:
            parse_url(location)
        except StorageError as error:
            unusable = Unusable("invalid_url", str(error), entry.audio.member)
            return entry._replace(cut_id=redacted_url(entry.cut_id), audio=unusable)
    return entry


def _with_member(entry: Entry, is_read: Callable[[Entry], bool]) -> Entry:
    audio = entry.audio
    assert isinstance(audio, File | Member | LhotseCut)
    try:
        member = audio.member
        if member is None:
            info = storage().info(_url_of(audio))
            member = Member(info, 0, info.size)
        if member.length <= _MAX_LOADED_BYTES and is_read(entry):
            member = replace(member, start=member.read())
    except StorageError as error:
        if error.kind == "invalid":
            raise ManifestError(f"{entry.where}: {error}") from None
        return entry._replace(audio=Unusable.of(error, audio))
    return entry._replace(audio=at_member(audio, member))

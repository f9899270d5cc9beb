"""`RemoteReader`: the bytes of remote cuts for the batches of one process, from the read-ahead, the cache or the store.

Only corpora with audio in object stores use it; local audio, in tars as well, is read where it is decoded.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import nestguard
from nestdata.config_checks import require, require_at_least
from nestdata.corpus.cache import PinnedCache, is_pinned, shares_of_corpora
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.corpus import Corpus
from nestdata.corpus.members import MemberBytes, read_intact
from nestdata.corpus.read_ahead import ReadAhead, Request
from nestdata.field_docs import with_field_docs
from nestdata.plan.microbatch import MicrobatchKey
from nestdata.redaction import redacted
from nestdata.storage import Storage, StorageConfig, is_url

NUM_AHEAD = 8
"""Number of next microbatches that a loading process knows; `ahead_bytes` limits what it fetches of them."""

# Requests are made when a microbatch is known, and looked up when its cuts are taken. Each takes half a kilobyte.
_MAX_KNOWN_REQUESTS = 1024


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """How audio in object stores is read. Does not change batches, and may differ when a run is resumed."""

    patience_s: float = 240.0
    """Seconds for which a request that fails for a transient reason is repeated, before the run ends. Should be 30 s or
    more below the stall guard's limit for loading, `guard.limits.step_s`."""

    max_requests: int = 32
    """Largest number of simultaneous requests of one loading process."""

    ahead_bytes: int = 256_000_000
    """Bytes that a loading process holds or requests for the microbatch that it loads and the next ones. One member may
    exceed them."""

    cache_dir: Path | None = None
    """Folder of the cache, on a disk of the node; the ranks of a node share it. None: no cache."""

    cache_bytes: int = 0
    """Bytes of the corpora that the cache keeps, for all ranks of a node together."""

    def __post_init__(self) -> None:
        require(self.patience_s > 0, "remote.patience_s", self.patience_s, "a positive number of seconds")
        require_at_least(1, "remote", self, "max_requests")
        require_at_least(0, "remote", self, "ahead_bytes", "cache_bytes")
        expected = "a positive number with remote.cache_dir, otherwise 0"
        require((self.cache_dir is None) == (self.cache_bytes == 0), "remote.cache_bytes", self.cache_bytes, expected)


@dataclass(frozen=True, kw_only=True)
class RemoteStats:
    """What reading from object stores has cost a batch, or several. `first + second` is their sum."""

    wait_s: float = 0.0
    """Seconds for which the loading process waited for bytes."""

    bytes_fetched: int = 0
    """Bytes read from stores, some of them for later batches."""

    cache_hits: int = 0
    """Cuts read from the cache."""

    def __add__(self, other: "RemoteStats") -> "RemoteStats":
        return RemoteStats(
            wait_s=self.wait_s + other.wait_s,
            bytes_fetched=self.bytes_fetched + other.bytes_fetched,
            cache_hits=self.cache_hits + other.cache_hits,
        )


class RemoteReader:
    """Reads the bytes of remote cuts ahead of the batches of a process.

    Pickles as its settings: every process has threads, connections and a cache of its own.

    Args:
        speech: Corpora of speech, in the order of the plan.
        noise: The noise corpus, if there is one.
        config: Patience and limits.
        repeats: How often the cuts of each corpus of speech are seen in an epoch.
    """

    def __init__(self, speech: Corpora, noise: Corpus | None, config: RemoteConfig, repeats: Sequence[float]) -> None:
        self._settings = speech, noise, config, repeats
        self._process_id = 0

    def _start(self) -> None:
        """Prepares the threads, the connections and the cache of this process."""
        speech, noise, config, repeats = self._settings
        self._process_id = os.getpid()
        # A worker that is started during a run has the same patience from its first request on.
        patience_s = config.patience_s
        self._storage = Storage(
            StorageConfig(patience_s=patience_s, first_contact_s=patience_s, max_requests=config.max_requests)
        )
        self._cache = None if config.cache_dir is None else PinnedCache(config.cache_dir)
        self._shares = shares_of_corpora(config.cache_bytes, speech, noise, repeats)
        self.ahead = ReadAhead(self._fetch, num_threads=config.max_requests, max_bytes=config.ahead_bytes)
        self._known: dict[MicrobatchKey, list[Request]] = {}
        self._request = lru_cache(maxsize=_MAX_KNOWN_REQUESTS)(self._make_request)
        self._num_hits = 0
        self._hits_lock = threading.Lock()
        self._reported: tuple[float, int, int] = (0.0, 0, 0)

    def begin(
        self,
        key: MicrobatchKey,
        upcoming: Iterable[MicrobatchKey],
        cuts_of: Callable[[MicrobatchKey], Sequence[tuple[Corpus, int]]],
    ) -> None:
        """Requests the bytes of a microbatch, and then of the next ones.

        Args:
            key: The microbatch.
            upcoming: The next ones.
            cuts_of: Returns the cuts of a microbatch, as far as they are known before it is loaded.
        """
        if self._process_id != os.getpid():  # a forked process does not have the threads of its parent
            self._start()
        keys = [key, *upcoming]
        self._known = {each: self._known.get(each) or self._requests(cuts_of(each)) for each in keys}
        self.ahead.begin(self._known[key], [self._known[each] for each in keys[1:]])

    def bytes_of(self, corpus: Corpus, index: int) -> MemberBytes:
        """Returns the bytes of a cut for `Corpus.load`, which has to read them if there are none.

        Raises:
            StorageError: The store did not answer within the patience, or refuses the credentials.
        """
        request = self._request(corpus, index)
        if request is None:
            return MemberBytes(store=self._storage)

        def note_wait() -> None:
            nestguard.current().note_wait(corpus.line(index)["id"], redacted(request.address.location))

        # Missing and damaged bytes are read again with the patience and the connections of this process.
        return MemberBytes(self.ahead.take(request, note_wait), is_checked=True, store=self._storage)

    def drop(self, corpus: Corpus, index: int) -> None:
        """Removes from the cache a cut whose audio could not be used."""
        request = self._request(corpus, index)
        if request is not None and self._cache is not None:
            self._cache.drop(request.address)

    def new_stats(self) -> RemoteStats:
        """Returns what was counted in this process since the last call."""
        before = self._reported
        self._reported = (self.ahead.waited_s, self._storage.stats.bytes_read, self._num_hits)
        wait_s, bytes_fetched, cache_hits = (now - then for now, then in zip(self._reported, before, strict=True))
        return RemoteStats(wait_s=wait_s, bytes_fetched=int(bytes_fetched), cache_hits=int(cache_hits))

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteReader, self._settings

    def _requests(self, cuts: Iterable[tuple[Corpus, int]]) -> list[Request]:
        return [request for cut in cuts if (request := self._request(*cut)) is not None]

    def _make_request(self, corpus: Corpus, index: int) -> Request | None:
        """Returns the request for a cut; None if it is not read from an object store."""
        address = None if corpus.has_bank else corpus.address(index)
        if address is None or not is_url(address.location):
            return None
        return Request(address, self._cache is not None and is_pinned(address, self._shares[corpus.path]))

    def _fetch(self, request: Request) -> bytes | None:
        """Returns the intact bytes of a request, from the cache or the store; None if the store does not have them.

        The cut is then judged, and replaced, where its audio is loaded.
        """
        cache = self._cache if request.is_pinned else None
        content = None if cache is None else cache.get(request.address)
        if content is not None:
            with self._hits_lock:
                self._num_hits += 1
            return content
        content = read_intact(request.address, self._storage)
        if cache is not None and content is not None:
            cache.put(request.address, content)
        return content

"""The check of shards: asks for each one, because the cuts of a missing one would be replaced during the run."""

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import pytorch_lightning as pl

from nestdata import Corpus, ObjectInfo, Storage, StorageConfig, StorageError, is_url, redacted
from nestmodel.preflight.checks import local_world_size
from nestmodel.preflight.measure.memory import gigabytes
from nestmodel.preflight.report import CheckResult
from nestmodel.training.data import NestDataModule

_AT_ONCE = 32
_PATIENCE_S = 20.0
"""Seconds for which one request is retried: long enough for throttling, and short for a store that is down."""

_TIME_SHARE = 0.5
"""Share of the time limit of a check that is spent on asking."""

_MOST_UNANSWERED = 4
"""Number of requests without an answer after which no further shard is asked for."""

_MOST_LISTED = 100_000
"""Shards of one corpus that are asked for; with more, those of as many cuts."""

_MOST_SHOWN = 3
_PERMANENT = ("missing", "changed")


def check_shards(data: NestDataModule, trainer: pl.Trainer, timeout_s: float) -> CheckResult:
    """Compares size and ETag of the shards that a run reads with what the corpora say.

    Ranks divide the shards in a store. The ranks of each node divide the shards on its file systems. If there is not
    enough time for all of them, those that were asked for are scattered over the corpora.

    Args:
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        timeout_s: Seconds that ranks wait for each other in a check.
    """
    shards = [shard for corpus in _corpora(data) for shard in _shards_of(corpus)]
    if not shards:
        return CheckResult(status="skipped", value="no shards")
    own = _own_shards(shards, trainer)
    found = _ask(own, Storage(StorageConfig(patience_s=_PATIENCE_S)), _TIME_SHARE * timeout_s)
    value = _value(found, len(own), sum(corpus.num_shards for corpus in _corpora(data) if not corpus.has_bank))
    figures = {
        "bad_shards": float(found.num_bad),
        "asked_shards": float(found.num_asked),
        "unreachable_shards": float(found.num_unanswered),
    }
    if not found.num_bad:
        return CheckResult(status="ok", value=value, figures=figures)
    is_tolerated = (
        not figures["unreachable_shards"] and found.num_bad <= data.config.bad_audio.max_share * found.num_asked
    )
    return CheckResult(
        status="warning" if is_tolerated else "failed", value=value, advice=_advice(found), figures=figures
    )


def _corpora(data: NestDataModule) -> list[Corpus]:
    """Returns the corpora of the run, noise and validation included."""
    datasets = [data.train_dataset, *([data.val_dataset] if data.val_dataset else [])]
    noise = [data.noise.corpus] if data.noise.corpus is not None else []
    return [*(corpus for dataset in datasets for corpus in dataset.corpus.corpora), *noise]


@dataclass
class _Found:
    """Answers of the store about the shards."""

    num_asked: int = 0
    num_bytes: int = 0
    messages: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Errors by kind."""

    lock: AbstractContextManager[Any] = field(default_factory=Lock)

    def add(self, kind: str, message: str, *, num_bytes: int = 0) -> None:
        """Counts an answer; an empty kind is a good one."""
        with self.lock:
            self.num_asked += 1
            self.num_bytes += num_bytes
            if kind:
                self.messages[kind].append(message)

    @property
    def num_bad(self) -> int:
        return sum(map(len, self.messages.values()))

    @property
    def num_unanswered(self) -> int:
        with self.lock:  # another thread may add a kind
            return sum(len(messages) for kind, messages in self.messages.items() if kind not in _PERMANENT)


def _shards_of(corpus: Corpus) -> list[ObjectInfo]:
    """Returns the shards of a corpus, or an evenly spread sample of very many."""
    if corpus.has_bank:
        return []
    if corpus.num_shards <= _MOST_LISTED:
        return [shard.info for shard in corpus.shards()]
    addresses = (corpus.address(index) for index in range(0, len(corpus), max(1, len(corpus) // _MOST_LISTED)))
    infos = (ObjectInfo(each.location, each.shard_size, each.etag) for each in addresses if each is not None)
    return list(dict.fromkeys(infos))


def _own_shards(shards: Sequence[ObjectInfo], trainer: pl.Trainer) -> list[ObjectInfo]:
    """Returns the shards that this rank asks for, in random order, so that the first ones are a fair sample."""
    remote = [shard for shard in shards if is_url(shard.location)][trainer.global_rank :: trainer.world_size]
    local = [shard for shard in shards if not is_url(shard.location)][trainer.local_rank :: local_world_size(trainer)]
    own = [*remote, *local]
    random.Random(0).shuffle(own)
    return own


def _ask(shards: Sequence[ObjectInfo], storage: Storage, time_s: float) -> _Found:
    """Asks for shards, until there are no more, the time is up, or it is clear that the store does not answer."""
    found, deadline = _Found(), time.monotonic() + time_s

    def ask(shard: ObjectInfo) -> None:
        if found.num_unanswered < _MOST_UNANSWERED and time.monotonic() < deadline:
            _record(found, shard, storage)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(ask, shards))
    return found


def _record(found: _Found, expected: ObjectInfo, storage: Storage) -> None:
    try:
        info = storage.info(expected.location)
    except StorageError as error:
        found.add(error.kind, str(error))
        return
    change = _change(expected, info)
    if change is None:
        found.add("", "", num_bytes=info.size)
    else:
        found.add("changed", f"{redacted(expected.location)} {change}", num_bytes=info.size)


def _change(expected: ObjectInfo, found: ObjectInfo) -> str | None:
    if found.size != expected.size:
        return f"has {found.size} bytes instead of {expected.size}"
    if None not in (expected.etag, found.etag) and found.etag != expected.etag:
        return f"has the ETag {found.etag} instead of {expected.etag}"
    return None


def _value(found: _Found, num_own: int, num_shards: int) -> str:
    part = (
        f"{found.num_asked:,}" if found.num_asked == num_own == num_shards else f"{found.num_asked:,} of {num_shards:,}"
    )
    asked = f"{part} shards asked for, {gigabytes(found.num_bytes)}"
    return ", ".join([asked, *(f"{len(messages):,} {kind}" for kind, messages in found.messages.items() if messages)])


def _advice(found: _Found) -> str:
    listed = []
    for kind, messages in found.messages.items():
        # Refused keys and servers that do not answer are the same for all shards.
        shown = [message.removesuffix(".") for message in messages[: _MOST_SHOWN if kind in _PERMANENT else 1]]
        more = f"; and {len(messages) - len(shown):,} more" if len(messages) > len(shown) else ""
        listed += [f"{len(messages):,} {kind}: {'; '.join(shown)}{more}"] if messages else []
    remedies = []
    if any(found.messages[kind] for kind in _PERMANENT):
        remedies.append("Restore the shards, or prepare the corpus again; a run would replace their cuts.")
    return " ".join([". ".join(listed) + ".", *remedies])

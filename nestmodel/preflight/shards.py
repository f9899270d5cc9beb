"""The check of shards: asks for each one, because the cuts of a missing one would be replaced during the run."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from math import gcd

import pytorch_lightning as pl

from nestdata import Corpus, ObjectInfo, Storage, StorageConfig, StorageError, is_url
from nestmodel.preflight.checks import local_world_size
from nestmodel.preflight.memory import gigabytes
from nestmodel.preflight.report import CheckResult
from nestmodel.training.data import NestDataModule

_AT_ONCE = 32
_PATIENCE_S = 20.0
"""Seconds for which one request is retried: long enough for throttling, and short for a store that is down."""

_TIME_SHARE = 0.5
"""Share of the time limit of a check that is spent on asking."""

_MOST_UNANSWERED = 4
"""Number of requests without an answer after which no further shard is asked for."""

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
    shards = _Shards([corpus for corpus in _corpora(data) if not corpus.has_bank])
    if not len(shards):
        return CheckResult(status="skipped", value="no shards")
    found = _ask(_own_shards(shards, trainer), Storage(StorageConfig(patience_s=_PATIENCE_S)), _TIME_SHARE * timeout_s)
    value = _value(found, len(shards))
    figures = {
        "bad_shards": float(found.num_bad),
        "asked_shards": float(found.num_asked),
        "unreachable_shards": float(sum(len(found.messages[kind]) for kind in found.messages if kind not in _PERMANENT)),
    }
    if not found.num_bad:
        return CheckResult(status="ok", value=value, figures=figures)
    is_tolerated = not figures["unreachable_shards"] and found.num_bad <= data.bad_audio.max_share * found.num_asked
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
    """What the store answered."""

    num_asked: int = 0
    num_bytes: int = 0
    messages: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Errors by kind."""

    @property
    def num_bad(self) -> int:
        return sum(map(len, self.messages.values()))


class _Shards(Sequence[ObjectInfo]):
    """All shards of several corpora, one after the other, without a list of them."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        self._corpora = corpora

    def __len__(self) -> int:
        return sum(corpus.num_shards for corpus in self._corpora)

    def __getitem__(self, number: int) -> ObjectInfo:  # type: ignore[override]  # no slices
        for corpus in self._corpora:
            if number < corpus.num_shards:
                return corpus.shard(number)
            number -= corpus.num_shards
        raise IndexError(number)


def _own_shards(shards: _Shards, trainer: pl.Trainer) -> Iterator[ObjectInfo]:
    """Yields the shards that this rank asks for, in scattered order."""
    for number in _scattered(len(shards)):
        shard = shards[number]
        by_all = is_url(shard.location)
        rank, size = (
            (trainer.global_rank, trainer.world_size) if by_all else (trainer.local_rank, local_world_size(trainer))
        )
        if number % size == rank:
            yield shard


def _scattered(size: int) -> Iterator[int]:
    """Yields each number below `size` once, such that the first ones are spread evenly."""
    stride = max(1, round(0.618 * size))
    while gcd(stride, size) != 1:
        stride += 1
    return (stride * i % size for i in range(size))


def _ask(shards: Iterator[ObjectInfo], storage: Storage, time_s: float) -> _Found:
    found, deadline = _Found(), time.monotonic() + time_s
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pending: set[Future[ObjectInfo]] = set()
        asked: dict[Future[ObjectInfo], ObjectInfo] = {}
        while True:
            num_unanswered = len(found.messages["unavailable"]) + len(found.messages["denied"])
            if num_unanswered < _MOST_UNANSWERED and time.monotonic() < deadline:
                for shard in islice(shards, 2 * _AT_ONCE - len(pending)):
                    future = pool.submit(storage.info, shard.location)
                    asked[future] = shard
                    pending.add(future)
            if not pending:
                return found
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                _record(found, asked.pop(future), future)


def _record(found: _Found, expected: ObjectInfo, answer: "Future[ObjectInfo]") -> None:
    found.num_asked += 1
    try:
        info = answer.result()
    except StorageError as error:
        found.messages[error.kind].append(str(error))
        return
    found.num_bytes += info.size
    if (change := _change(expected, info)) is not None:
        found.messages["changed"].append(f"{expected.location}: {change}")


def _change(expected: ObjectInfo, found: ObjectInfo) -> str | None:
    if found.size != expected.size:
        return f"has {found.size} bytes instead of {expected.size}"
    if None not in (expected.etag, found.etag) and found.etag != expected.etag:
        return f"has the ETag {found.etag} instead of {expected.etag}"
    return None


def _value(found: _Found, num_shards: int) -> str:
    asked = f"{found.num_asked:,} of {num_shards:,} shards asked for, {gigabytes(found.num_bytes)}"
    return ", ".join([asked, *(f"{len(messages):,} {kind}" for kind, messages in found.messages.items() if messages)])


def _advice(found: _Found) -> str:
    listed = []
    for kind, messages in found.messages.items():
        more = f"; and {len(messages) - _MOST_SHOWN:,} more" if len(messages) > _MOST_SHOWN else ""
        listed += [f"{len(messages):,} {kind}: {'; '.join(messages[:_MOST_SHOWN])}{more}"] if messages else []
    remedies = []
    if any(found.messages[kind] for kind in _PERMANENT):
        remedies.append("Restore the shards, or prepare the corpus again; a run would replace their cuts.")
    return " ".join([". ".join(line.removesuffix(".") for line in listed) + ".", *remedies])

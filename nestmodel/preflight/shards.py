"""The check of shards: a run would replace the cuts of a missing one."""

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytorch_lightning as pl

from nestdata import Corpus, ObjectInfo, Storage, StorageConfig, StorageError, is_url, redacted
from nestmodel.preflight.memory import gigabytes
from nestmodel.preflight.preflight_report import CheckResult, Status
from nestmodel.training.data import NestDataModule

_AT_ONCE = 32
_PATIENCE_S = 20.0
"""Seconds for which one request is retried: long enough for throttling, and short for a store that is down."""

_TIME_SHARE = 0.5
"""Share of the time limit of a check that is spent on asking."""

_MOST_UNANSWERED = 4
"""Number of requests without an answer after which no further shard is asked for."""

_MOST_LISTED = 100_000
"""All shards of a corpus are asked for if there are at most this many; otherwise, the shards of about as many cuts."""

_MOST_SHOWN = 3
_PERMANENT = ("missing", "changed")


def check_shards(data: NestDataModule, trainer: pl.Trainer, timeout_s: float) -> CheckResult:
    """Compares size and ETag of the shards that a run reads with what the corpora say.

    Ranks divide the shards in a store. The ranks of each node divide the shards on its file systems. If there is not
    enough time for all of them, the shards that were asked for are scattered over the corpora.

    Args:
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        timeout_s: Seconds that ranks wait for each other in a check.
    """
    corpora = _corpora(data)
    shards = [shard for corpus in corpora for shard in _shards_of(corpus)]
    if not shards:
        return CheckResult(status="skipped", value="no shards")
    storage = Storage(StorageConfig(patience_s=_PATIENCE_S))
    good, errors = _ask(_own_shards(shards, trainer), storage, _TIME_SHARE * timeout_s)
    num_bad, num_unreachable = sum(map(len, errors.values())), _num_unreachable(errors)
    num_asked = len(good) + num_bad
    num_shards = sum(corpus.num_shards for corpus in corpora if not corpus.has_bank)
    part = f"{num_asked:,}" if num_asked == num_shards else f"{num_asked:,} of {num_shards:,}"
    asked = f"{part} shards asked for, {gigabytes(sum(shard.size for shard in good))}"
    is_tolerated = not num_unreachable and num_bad <= data.config.bad_audio.max_share * num_asked
    status: Status = "ok" if not num_bad else "warning" if is_tolerated else "failed"
    return CheckResult(
        status=status,
        value=", ".join([asked, *(f"{len(messages):,} {kind}" for kind, messages in errors.items())]),
        advice=_advice(errors) if num_bad else "",
        figures={
            "bad_shards": float(num_bad),
            "asked_shards": float(num_asked),
            "unreachable_shards": float(num_unreachable),
        },
    )


def _corpora(data: NestDataModule) -> list[Corpus]:
    """Returns the corpora of the run, noise and validation included."""
    datasets = [data.train_dataset, *([data.val_dataset] if data.val_dataset else [])]
    noise = [data.noise.corpus] if data.noise.corpus is not None else []
    return [*(corpus for dataset in datasets for corpus in dataset.corpus.corpora), *noise]


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
    ranks_of_node = max(1, trainer.world_size // trainer.num_nodes)
    remote = [shard for shard in shards if is_url(shard.location)][trainer.global_rank :: trainer.world_size]
    local = [shard for shard in shards if not is_url(shard.location)][trainer.local_rank :: ranks_of_node]
    own = [*remote, *local]
    random.Random(0).shuffle(own)
    return own


def _ask(
    shards: Sequence[ObjectInfo], storage: Storage, time_s: float
) -> tuple[list[ObjectInfo], dict[str, list[str]]]:
    """Asks for shards, until there are no more, the time is up, or it is clear that the store does not answer.

    Returns:
        The shards that were as expected, and the messages of all errors by their kind.
    """
    errors, deadline = defaultdict[str, list[str]](list), time.monotonic() + time_s

    def ask(shard: ObjectInfo) -> ObjectInfo | None:
        if _num_unreachable(errors) < _MOST_UNANSWERED and time.monotonic() < deadline:
            try:
                _compare(shard, storage.info(shard.location))
                return shard
            except StorageError as error:
                errors[error.kind].append(str(error))
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [shard for shard in pool.map(ask, shards) if shard is not None], errors


def _num_unreachable(errors: Mapping[str, list[str]]) -> int:
    return sum(len(messages) for kind, messages in list(errors.items()) if kind not in _PERMANENT)


def _compare(expected: ObjectInfo, found: ObjectInfo) -> None:
    """Raises StorageError if a shard has changed."""
    name = redacted(expected.location)
    if found.size != expected.size:
        raise StorageError.because("changed", f"{name} has {found.size} bytes instead of {expected.size}")
    if None not in (expected.etag, found.etag) and found.etag != expected.etag:
        raise StorageError.because("changed", f"{name} has the ETag {found.etag} instead of {expected.etag}")


def _advice(errors: dict[str, list[str]]) -> str:
    listed = []
    for kind, messages in errors.items():
        # Refused keys and servers that do not answer are the same for all shards.
        shown = [message.removesuffix(".") for message in messages[: _MOST_SHOWN if kind in _PERMANENT else 1]]
        more = f"; and {len(messages) - len(shown):,} more" if len(messages) > len(shown) else ""
        listed.append(f"{len(messages):,} {kind}: {'; '.join(shown)}{more}")
    advice = ". ".join(listed) + "."
    if any(kind in _PERMANENT for kind in errors):
        advice += " Restore the shards, or prepare the corpus again; a run would replace their cuts."
    return advice

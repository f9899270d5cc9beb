"""What `pack_corpora` checks before it writes: equal names, audio in the set to be replaced, and repeated fetches."""

import logging
import mmap
import os
from pathlib import Path

import numpy as np

from nestdata.corpus.corpora import Corpora
from nestdata.errors import ConfigError
from nestdata.pack.output import PackOutput
from nestdata.pack.shard import name_in_set
from nestdata.prepare.writing.draw import key_of
from nestdata.storage import is_url

_log = logging.getLogger(__name__)
# Bytes fetched for each byte of the audio above which a warning is logged.
_MANY_TIMES = 4


def check_ids(corpora: Corpora) -> None:
    """Raises ConfigError if two cuts would have the same name: cuts of several corpora, or `a` and `/a`."""
    # Within a corpus, `prepare` has made the ids distinct.
    if len(corpora.corpora) == 1 and not _may_begin_with_slash(corpora.corpora[0].path / "cuts.jsonl"):
        return

    def name(index: int) -> str:
        cut_id: str = corpora.line(index)["id"]
        # Cuts whose ids cannot be names are left out.
        return name_in_set(cut_id) or cut_id

    ids = map(name, range(len(corpora)))
    digests = np.fromiter(map(key_of, ids), np.uint64, len(corpora))
    digests.sort()
    repeated = set(digests[1:][digests[1:] == digests[:-1]].tolist())
    if not repeated:
        return
    seen: dict[str, str] = {}
    for index in range(len(corpora)):
        name_of_cut, cut_id = name(index), corpora.line(index)["id"]
        if name_of_cut in seen and seen[name_of_cut] != cut_id:
            raise ConfigError(
                f"the cuts {seen[name_of_cut]!r} and {cut_id!r} would have the same name, since names in tar files "
                "begin without a slash. Change one of the ids in the input, and prepare the corpus again."
            )
        if name_of_cut in seen:
            raise ConfigError(
                f"several corpora have a cut with the id {cut_id!r}. Pack them one by one, or prepare one corpus from "
                "all of their inputs, which makes the ids distinct."
            )
        if key_of(name_of_cut) in repeated:
            seen[name_of_cut] = cut_id


def _may_begin_with_slash(lines: Path) -> bool:
    """Returns whether an id in `cuts.jsonl` begins with a slash: of a cut, or of anything else there."""
    with lines.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b'"id":"/') >= 0


def check_sources(corpora: Corpora, target: PackOutput) -> None:
    """Raises ConfigError if audio of the corpora is in the set that would be replaced."""
    inside = target.location + "/"
    for corpus in corpora.corpora:
        if corpus.has_bank:
            continue
        for shard in corpus.shards():
            location = shard.info.location
            if (location if is_url(location) else os.path.realpath(location)).startswith(inside):
                raise ConfigError(
                    f"{target.location}: holds the audio of {corpus.path}, so it cannot be replaced by packing that "
                    "corpus. Choose another path."
                )


def warn_of_windows(corpora: Corpora) -> None:
    """Warns if most bytes of objects would be fetched several times, because many cuts share a recording."""
    for corpus in corpora.corpora:
        if not corpus.is_remote:
            continue
        num_bytes, num_distinct = corpus.addressed_bytes()
        if num_bytes > _MANY_TIMES * num_distinct:
            _log.warning(
                "%s: its cuts share long recordings in a store, which are fetched once for each cut: %.1f times their "
                "bytes. It is faster to copy them to a local disk and to prepare them there",
                corpus.path,
                num_bytes / num_distinct,
            )

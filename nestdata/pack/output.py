"""The folder of a packed set while it is written: what is there already, and what an interrupted run has left."""

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nestdata.corpus.packed_set import (
    FOLDER,
    LEFT_OUT,
    MANIFEST,
    SETTINGS,
    PackedShard,
    ShardRecord,
    ShardSummary,
    digest_of,
    manifest_content,
    record_name,
    settings_content,
)
from nestdata.errors import OutputError, StorageError
from nestdata.pack.shard import PARTIAL_SUFFIX
from nestdata.storage import is_url, join, storage

_OWN_NAMES = re.compile(rf"cuts\.\d+\.jsonl|recording\.\d+\.tar|{re.escape(FOLDER)}/.*")
# Local files that a killed run was writing: of this package, and of `Storage.write`.
_UNFINISHED = re.compile(rf"(\.cuts\.\d+\.jsonl\.|{re.escape(FOLDER)}/).*{re.escape(PARTIAL_SUFFIX)}")
# Requests at a time for small files of a set.
_THREADS = 16


@dataclass(frozen=True, slots=True)
class PackOutput:
    """A folder that holds nothing, or a packed set that is complete or begun."""

    location: str
    sizes: dict[str, int]
    """Size of every complete file that is there, by its name relative to the folder."""

    unfinished: list[str]
    """Names of the files that a killed run was writing."""

    begun_settings: dict[str, Any] | None
    """Settings of the run that began the set; None if there is none, or if it is going to be replaced."""

    @classmethod
    def open(cls, location: str, *, overwrite: bool) -> "PackOutput":
        """Looks at the folder, and changes nothing.

        Raises:
            OutputError: Something else is there, or a complete set and `overwrite` is false.
            StorageError: The folder cannot be listed.
        """
        sizes = _sizes(location)
        unfinished = list(filter(_UNFINISHED.fullmatch, sizes))
        for name in unfinished:
            del sizes[name]
        if not sizes:
            return cls(location, sizes, unfinished, None)
        if not all(map(_OWN_NAMES.fullmatch, sizes)) or not {SETTINGS, MANIFEST} & sizes.keys():
            other = next((name for name in sizes if not _OWN_NAMES.fullmatch(name)), "Shar that another program wrote")
            raise OutputError(f"{location}: is not empty and not a packed set ({other}). Choose another path.")
        if overwrite:
            return cls(location, sizes, unfinished, None)
        if MANIFEST in sizes:
            raise OutputError(f"{location}: exists already. Choose another path, or pass --overwrite to replace it.")
        try:
            begun = orjson.loads(storage().read(join(location, SETTINGS)))
        except ValueError as error:
            raise OutputError(
                f"{join(location, SETTINGS)}: is damaged ({error}). Choose another path, or pass --overwrite to "
                "replace the set."
            ) from error
        return cls(location, sizes, unfinished, begun)

    def begin(self, settings: dict[str, Any], *, overwrite: bool) -> None:
        """Writes the settings into an empty folder, or checks that they are those of the set that is there.

        Args:
            settings: All that decides the bytes of the set.
            overwrite: Whether all files of the set that is there are deleted first.

        Raises:
            OutputError: The set was begun with other corpora or settings.
            StorageError: The folder cannot be written.
        """
        self._delete(self.unfinished)
        if self.begun_settings is not None:
            if other := [name for name, value in settings.items() if self.begun_settings.get(name) != value]:
                raise OutputError(
                    f"{self.location}: holds a part of a set that was begun with other {', '.join(other)}. Run the "
                    "command that began it, choose another path, or pass --overwrite to replace it."
                )
            return
        if not is_url(self.location):
            Path(self.location, FOLDER).mkdir(exist_ok=True)
        if overwrite and self.sizes:
            # Empty settings come first: if this run is killed while it deletes, the rest is an unfinished set with
            # other settings, which no later run continues.
            storage().write(join(self.location, SETTINGS), settings_content({}))
            storage().delete(join(self.location, MANIFEST))
            self._delete(self.sizes.keys() - {SETTINGS, MANIFEST})
            self.sizes.clear()
        storage().write(join(self.location, SETTINGS), settings_content(settings))

    def finished_shards(self, num_shards: int) -> dict[int, ShardSummary]:
        """Returns the shards that an earlier run has completed, by their number."""
        if self.begun_settings is None:
            return {}
        numbers = (number for number in range(num_shards) if record_name(number) in self.sizes)
        with ThreadPoolExecutor(_THREADS) as threads:
            found = threads.map(self._finished, numbers)
            return {summary.shard.number: summary for summary in found if summary is not None}

    def finish(
        self,
        settings: dict[str, Any],
        totals: dict[str, Any],
        shards: list[PackedShard],
        left_out: list[dict[str, Any]],
    ) -> None:
        """Writes what was left out and, last, the manifest that makes the set valid."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in left_out)
        storage().write(join(self.location, LEFT_OUT), lines.encode("utf-8", "backslashreplace"))
        storage().write(join(self.location, MANIFEST), manifest_content(settings, totals, shards))

    def _delete(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(lambda name: storage().delete(join(self.location, name)), names):
                pass

    def _finished(self, number: int) -> ShardSummary | None:
        assert self.begun_settings is not None
        try:
            summary = ShardRecord.parse(storage().read(join(self.location, record_name(number)))).summary
        except (ValueError, KeyError, TypeError, IndexError):
            return None
        files = (summary.shard.recording, summary.shard.cuts)
        is_finished = summary.settings_digest == digest_of(self.begun_settings) and all(
            self.sizes.get(file.name) == file.size for file in files
        )
        return summary if is_finished else None


def _sizes(location: str) -> dict[str, int]:
    start = len(location.rstrip("/")) + 1
    try:
        return {found.location[start:]: found.size for found in storage().list_objects(location)}
    except StorageError as error:
        if error.kind != "missing":
            raise
        return {}

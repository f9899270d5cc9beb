"""NeMo's manifests: one JSON object per line."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import MAX_SECONDS, Entry, id_of_name, resolve
from nestdata.prepare.inputs.lines import LineSource, parse_object
from nestdata.prepare.inputs.patterns import names_shards

AUDIO_KEYS = ("audio_filepath", "audio_filename")
_SPAN_KEYS = frozenset({*AUDIO_KEYS, "offset", "duration"})


@dataclass(frozen=True, slots=True)
class NemoManifest(LineSource):
    """Lines with `audio_filepath` or `audio_filename`, and optionally `offset`, `duration` and labels."""

    path: Path | str
    root: str
    directory: str
    """The folder that relative paths start from: that of the manifest."""

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        row = parse_object(item, self.path, number)
        if row is None:
            return
        where = self.where(number)
        name = row.get("audio_filepath") or row.get("audio_filename")
        if not name or not isinstance(name, str) or name.endswith("/") or "\0" in name:
            raise ManifestError(name_problem(row, where))
        if "shard_id" in row or (".." in name and names_shards(name)):
            raise ManifestError(
                f"{where}: a line of a tarred data set ({_shard(row, name)}) in a manifest of files. Begin the "
                "manifest with a line that has a shard_id, or give the archives with --tars PATTERN."
            )
        path = resolve(self.directory, name)
        offset, duration = seconds(row, "offset", where), seconds(row, "duration", where)
        cut_id = id_of_name(path, name, self.root)
        if offset is not None:
            cut_id += span_suffix(offset, duration)
        labels = {key: value for key, value in row.items() if key not in _SPAN_KEYS}
        yield Entry(where, cut_id, File(path), offset or 0.0, duration, labels=labels)


def seconds(row: dict[str, Any], key: str, where: str) -> float | None:
    """Returns a value in seconds, or None if the key is missing or null.

    Raises:
        ManifestError: The value is not a number, is negative, or is too large.
    """
    value = row.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < MAX_SECONDS:
        raise ManifestError(f"{where}: {key} is {value!r}. Give seconds as a number from 0 to {MAX_SECONDS:g}.")
    return float(value)


def span_suffix(offset: float, duration: float | None) -> str:
    """Returns the end of a cut id that distinguishes several spans of one file; both values are in seconds."""
    return f"@{offset:.3f}" if duration is None else f"@{offset:.3f}+{duration:.3f}"


def _shard(row: dict[str, Any], name: str) -> str:
    return f"shard_id {row['shard_id']}" if "shard_id" in row else repr(name)


def name_problem(row: dict[str, Any], where: str) -> str:
    """Returns the message for a line whose audio file has no usable name."""
    if not any(key in row for key in AUDIO_KEYS):
        return f"{where}: the key audio_filepath is missing. Add it, or drop this line."
    name = next(row[key] for key in AUDIO_KEYS if key in row)
    return f"{where}: audio_filepath is {name!r}. Give the path of one file as a string."

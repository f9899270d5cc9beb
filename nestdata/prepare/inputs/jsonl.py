"""Manifests of one JSON object per line: NeMo's, and Lhotse's cuts and recordings."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson

from nestdata.corpus.channels import MIX_FIELD, Channel
from nestdata.errors import ManifestError, in_one_line
from nestdata.prepare.inputs.audio import File, LhotseCut, Member, Unusable
from nestdata.prepare.inputs.entry import (
    MAX_SECONDS,
    Entry,
    check_command,
    count_lines,
    id_of_name,
    open_lines,
    resolve,
)
from nestdata.prepare.inputs.patterns import names_shards
from nestdata.prepare.inputs.pointer import member_at
from nestdata.storage import is_url

AUDIO_KEYS = ("audio_filepath", "audio_filename")
_SPAN_KEYS = frozenset({*AUDIO_KEYS, "offset", "duration"})


class _JsonLines:
    """The methods of `Source` that NeMo and Lhotse manifests share."""

    items_per_task: ClassVar[None] = None
    path: Path | str

    def items(self) -> Iterator[bytes]:
        """Yields the lines."""
        with open_lines(self.path) as file:
            yield from file

    def where(self, number: int) -> str:
        """Returns the path and the line number, counted from 1."""
        return f"{self.path!s}:{number}"

    def count(self) -> int | None:
        """Returns the number of lines."""
        return count_lines(self.path)


@dataclass(frozen=True, slots=True)
class NemoManifest(_JsonLines):
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


@dataclass(frozen=True, slots=True)
class LhotseManifest(_JsonLines):
    """Lhotse MonoCuts or recordings; a recording becomes one cut."""

    path: Path | str
    directory: str
    """The folder that relative paths start from: the current directory, as in Lhotse, or that of a URL."""

    channel: Channel
    """Channel of the cut that a recording becomes."""

    allow_commands: bool

    def entries(self, number: int, item: bytes) -> Iterator[Entry]:
        """Yields the entry of a line; none for a blank one."""
        row = parse_object(item, self.path, number)
        if row is None:
            return
        where = self.where(number)
        try:
            cut = self.parse_cut(row, where)
        except ManifestError:
            raise
        except Exception as error:  # Lhotse's constructors raise errors of many kinds
            raise ManifestError(
                f"{where}: not a Lhotse cut or recording ({in_one_line(error)}). Fix this line."
            ) from error
        for source in cut["recording"]["sources"]:
            self._check_source(source, where)
            if source["type"] == "file":
                source["source"] = resolve(self.directory, source["source"])
                if is_url(source["source"]):
                    source["type"] = "url"
        found = self._located(cut, where)
        yield Entry(where, cut["id"], found if isinstance(found, Unusable) else LhotseCut(cut, found))

    def parse_cut(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns the dict of a MonoCut, completed and checked by Lhotse; modifies `row`."""
        from lhotse import MonoCut

        kind = row.pop("type", "Recording" if "sources" in row else "MonoCut")
        if kind not in ("MonoCut", "Cut", "Recording"):
            raise ManifestError(
                f"{where}: a {kind} where a MonoCut was expected. Reduce it to cuts of one channel in Lhotse first."
            )
        if kind == "Recording":
            channel = 0 if self.channel == "mix" else self.channel
            whole = {"start": 0.0, "duration": row.get("duration"), "channel": channel}
            row = {"id": row.get("id"), **whole, "recording": row}
            if self.channel == "mix":
                row["custom"] = {MIX_FIELD: "mix"}
        _check_cut(row, where)
        cut = dict(MonoCut.from_dict(row).to_dict())
        _check_recording(cut, where)
        cut["start"] = float(cut["start"])  # Lhotse's writers set the integer 0
        for label in cut["supervisions"]:
            label |= {key: str(label[key]) for key in ("language", "speaker") if key in label}
            if "alignment" in label:  # holds named tuples, which orjson does not write
                label["alignment"] = {kind: [*map(list, items)] for kind, items in label["alignment"].items()}
        return cut

    def _located(self, cut: dict[str, Any], where: str) -> Member | Unusable | None:
        """Returns the member that the source of a cut points to; None if it is not a pointer into a tar."""
        source = next((source for source in cut["recording"]["sources"] if cut["channel"] in source["channels"]), None)
        if source is None or source["type"] != "shar_ptr":
            return None
        return member_at(source["source"], self.directory, where)

    def _check_source(self, source: dict[str, Any], where: str) -> None:
        kind, location = source.get("type"), source.get("source")
        if kind == "command":
            check_command(str(location), where, allowed=self.allow_commands)
        elif kind not in ("file", "url", "shar_ptr"):
            raise ManifestError(
                f"{where}: a source of type {kind!r}, which is not supported. Write the audio to files in Lhotse "
                "first, with `CutSet.save_audios`."
            )
        elif not isinstance(location, str):
            raise ManifestError(
                f"{where}: a source of type {kind!r} at {location!r}. Give its path or URL as a string."
            )


def parse_object(line: bytes, path: Path | str, number: int) -> dict[str, Any] | None:
    """Parses one line; returns None for a blank one.

    Raises:
        ManifestError: It is not a JSON object.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            return None
        try:
            row = json.loads(line)  # accepts NaN, which Python writes for missing scores
        except (ValueError, RecursionError):
            raise ManifestError(
                f"{path}:{number}: not JSON ({error.msg}, at character {error.pos + 1}). Every line must be one JSON "
                "object; fix or drop it."
            ) from error
    if not isinstance(row, dict):
        raise ManifestError(f"{path}:{number}: {type(row).__name__} where a JSON object was expected. Fix or drop it.")
    return row


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


def _check_cut(row: dict[str, Any], where: str) -> None:
    if not isinstance(row.get("id"), str) or not row["id"]:
        raise ManifestError(f"{where}: the id is {row.get('id')!r}. Give a string.")
    if not row.get("recording"):
        raise ManifestError(f"{where}: the cut has no recording. Add it, or drop this line.")
    for key in ("start", "duration"):
        if seconds(row, key, where) is None:
            raise ManifestError(f"{where}: the cut has no {key}. Add it, or drop this line.")


def _check_recording(cut: dict[str, Any], where: str) -> None:
    """Checks the values that Lhotse does not validate."""
    from nestdata.corpus.lhotse_audio import check_transforms  # imports numpy

    recording = cut["recording"]
    numbers = {key: recording.get(key) for key in ("sampling_rate", "num_samples")} | {"channel": cut.get("channel")}
    for key, value in numbers.items():
        if type(value) is not int or not (key == "sampling_rate") <= value < 1 << 50:
            raise ManifestError(f"{where}: {key} is {value!r}. Fix this line.")
    if seconds(recording, "duration", where) is None:
        raise ManifestError(f"{where}: the recording has no duration. Add it, or drop this line.")
    try:
        check_transforms(recording.get("transforms") or ())
    except ValueError as error:
        raise ManifestError(
            f"{where}: {error}. Write the audio to files in Lhotse first, with `CutSet.save_audios`."
        ) from None
    for source in recording["sources"]:
        channels = source.get("channels")
        if not isinstance(channels, list) or not all(type(channel) is int for channel in channels):
            raise ManifestError(f"{where}: the channels of a source are {channels!r}. Give a list of numbers.")


def _shard(row: dict[str, Any], name: str) -> str:
    return f"shard_id {row['shard_id']}" if "shard_id" in row else repr(name)


def name_problem(row: dict[str, Any], where: str) -> str:
    """Returns the message for a line whose audio file has no usable name."""
    if not any(key in row for key in AUDIO_KEYS):
        return f"{where}: the key audio_filepath is missing. Add it, or drop this line."
    name = next(row[key] for key in AUDIO_KEYS if key in row)
    return f"{where}: audio_filepath is {name!r}. Give the path of one file as a string."

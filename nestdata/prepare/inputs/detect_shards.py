"""Detects inputs whose audio is in tars: NeMo tarred manifests, Lhotse Shar, WebDataset."""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, open_lines
from nestdata.prepare.inputs.listing import objects_below
from nestdata.prepare.inputs.patterns import (
    check_shards,
    expand,
    is_pattern,
    numbered,
    shard_number,
)
from nestdata.prepare.inputs.shar import SharShard, shar_shards
from nestdata.storage import common_folder, is_url, join, name_of, parent, storage

_TAR = re.compile(r".*\.(?:tar(?:\.\w+)?|tgz)", re.IGNORECASE)
_NUMBERED_TAR = re.compile(r"(.*?)\d+(\D*)")
_SHARDED_MANIFESTS = "sharded_manifests"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInput:
    """An input whose audio is in tars. All locations are absolute paths or URLs."""

    format: InputFormat
    folder: str
    """The folder of the tars, which the names of members are relative to."""

    manifests: tuple[str, ...] = ()
    """The manifests of a NeMo data set."""

    is_sharded: bool = False
    """Whether a NeMo data set has one manifest for each tar, in the same order."""

    tars: tuple[tuple[int, str], ...] = ()
    """Tars with their numbers; those of WebDataset are counted from 0."""

    shar: tuple[SharShard, ...] = ()
    is_packed: bool = False
    """Whether `nestdata pack` wrote the folder of Shar, so that its tars need not be read."""


def detect_by_name(given: str, form: InputFormat | None, tars: str | None = None) -> ShardInput | None:
    """Detects a tar, a list of tars, or a pattern of tars or of NeMo manifests; None for any other name.

    Args:
        given: Path or URL, as the caller gave it.
        form: The format that the caller knows.
        tars: Pattern of the tars of a NeMo data set.

    Raises:
        ManifestError: Files of the pattern do not exist, or the format cannot be the given one.
    """
    location = _absolute(given)
    is_literal = not is_pattern(given) or (not is_url(given) and os.path.exists(given))
    names = [location] if is_literal else expand(location)
    if _TAR.fullmatch(names[0]) and (not is_literal or is_url(given) or os.path.isfile(given)):
        if form not in (None, "webdataset"):
            raise ManifestError(
                f"{given}: a tar, which --format {form} does not read. Give the manifest, and the tars with "
                "--tars, or leave out --format to read it as WebDataset."
            )
        return _webdataset(names, given)
    if form == "webdataset" and is_literal and not is_url(given) and os.path.isfile(given):
        return _webdataset(_listed(location), given)
    if is_literal:
        return None
    if form not in (None, "nemo"):
        raise ManifestError(f"{given}: a pattern of manifests, which is read for NeMo data sets only.")
    check_shards(names, given)
    return _sharded_nemo(names, given, tars)


def detect_nemo(manifest: str, given: str, tars: str | None = None) -> ShardInput:
    """Returns one NeMo manifest, whose lines name their shards, with its tars.

    Args:
        manifest: Absolute path or URL.
        given: The manifest as the caller gave it, for messages.
        tars: Pattern of the tars; None to find them beside the manifest, or in the folder above `sharded_manifests`.

    Raises:
        ManifestError: The tars cannot be found, or some do not exist.
    """
    found = _tars_of(manifest, given, tars)
    return ShardInput(
        format="nemo", folder=_folder_of([*found.values()]), manifests=(manifest,), tars=tuple(sorted(found.items()))
    )


def detect_folder(given: str, names: Sequence[str], form: InputFormat | None) -> ShardInput | None:
    """Detects Lhotse Shar, or a folder of tars; None for any other folder.

    Args:
        given: The folder as the caller gave it.
        names: Absolute paths or URLs of the files and folders in it.
        form: The format that the caller knows.

    Raises:
        ManifestError: The folder is not of the given format, or holds a NeMo data set, of which the manifest is needed.
    """
    from nestdata.corpus.packed_set import FOLDER  # imports numpy, which `--help` can do without

    if form is None and any(name_of(name) == FOLDER for name in names):
        return ShardInput(format="shar", folder=_absolute(given), is_packed=True)
    if form in (None, "shar") and (shards := shar_shards(names, given)):
        return ShardInput(format="shar", folder=_absolute(given), shar=shards)
    if form == "shar":
        raise ManifestError(f"{given}: no cuts.000000.jsonl.gz or the like. Give the folder that holds them.")
    has_tars = any(_TAR.fullmatch(name) for name in names)
    if form is None and (not has_tars or any(name.lower().endswith(AUDIO_SUFFIXES) for name in names)):
        return None
    manifests = [name for name in names if "manifest" in name_of(name)]
    if form is None and manifests:
        raise ManifestError(
            f"{given}: tars beside {name_of(manifests[0])}, as NeMo writes them. Give a manifest, or "
            "--format webdataset to read the tars without one."
        )
    folder = _absolute(given)
    found = objects_below(folder) if is_url(folder) else storage().list_objects(folder)
    tars = [info.location for info in found if _TAR.fullmatch(info.location)]
    if not tars:
        raise ManifestError(f"{given}: no tars in this folder or its subfolders.")
    return _webdataset(tars, given)


def _webdataset(tars: Sequence[str], given: str) -> ShardInput:
    check_shards(tars, given)
    return ShardInput(format="webdataset", folder=_folder_of(tars), tars=tuple(enumerate(tars)))


def _sharded_nemo(manifests: Sequence[str], given: str, tars: str | None) -> ShardInput:
    """Returns manifests of a NeMo data set with their tars, which have the same numbers."""
    by_number = numbered(manifests, given, given)
    found = _tars_of(manifests[0], given, tars)
    missing = [number for number in by_number if number not in found]
    if missing:
        raise ManifestError(
            f"{given}: {by_number[missing[0]]} has no tar with its number among {_range(found)}. "
            "Give all tars with --tars PATTERN, in quotes."
        )
    used = [(number, found[number]) for number in by_number]
    return ShardInput(
        format="nemo",
        folder=_folder_of([*found.values()]),
        manifests=tuple(manifests),
        tars=tuple(used),
        is_sharded=True,
    )


def _tars_of(manifest: str, given: str, tars: str | None) -> dict[int, str]:
    """Returns the tars of a NeMo data set by their numbers."""
    if tars is None:
        return _tars_beside(manifest, given)
    if tars.startswith("pipe:"):
        raise ManifestError(f"{tars}: commands are not run. Give the paths or URLs of the tars.")
    names = expand(_absolute(tars)) if is_url(tars) or not os.path.isfile(tars) else [_absolute(tars)]
    check_shards(names, tars)
    if len(names) == 1:
        return {shard_number(names[0]) or 0: names[0]}
    return numbered(names, tars, tars)


def _tars_beside(manifest: str, given: str) -> dict[int, str]:
    """Finds the only set of numbered tars beside a manifest, or in the folder above `sharded_manifests`."""
    folder = parent(manifest)
    folders = [folder, parent(folder)] if name_of(folder) == _SHARDED_MANIFESTS else [folder]
    for directory in folders:
        sets = defaultdict(list)
        for name in _files_in(directory):
            if _TAR.fullmatch(name):
                match = _NUMBERED_TAR.fullmatch(name_of(name))
                sets[match.groups() if match else name].append(name)
        if len(sets) > 1:
            examples = " and ".join(sorted(name_of(min(names)) for names in sets.values())[:2])
            raise ManifestError(
                f"{given}: several sets of tars in {directory}, such as {examples}. Give one with "
                "--tars PATTERN, in quotes."
            )
        for names in sets.values():
            return {shard_number(names[0]) or 0: names[0]} if len(names) == 1 else numbered(sorted(names), given)
    raise ManifestError(
        f"{given}: a manifest of a tarred data set, and no tars in {folders[-1]}. Give them with "
        "--tars 'PATTERN', such as 's3://bucket/audio_{0..511}.tar'."
    )


def _files_in(folder: str) -> list[str]:
    """Returns the files in a folder, without those in its subfolders."""
    if is_url(folder):
        return [info.location for info in objects_below(folder) if parent(info.location) == folder]
    return [entry.path for entry in os.scandir(folder) if entry.is_file()]


def _listed(location: str) -> list[str]:
    """Returns the tars that a text file lists, relative to its folder."""
    with open_lines(location if is_url(location) else Path(location)) as file:
        names = [line.decode(errors="surrogateescape").strip() for line in file]
    tars = [name for text in names if text for name in expand(join(parent(location), text))]
    wrong = next((name for name in tars if not _TAR.fullmatch(name)), None)
    if not tars or wrong:
        raise ManifestError(f"{location}: not a list of tars, one in a line{f': {wrong!r}' if wrong else ''}. Fix it.")
    return tars


def _folder_of(locations: Sequence[str]) -> str:
    """Returns the deepest folder that holds all locations."""
    return reduce(common_folder, sorted({parent(location) for location in locations}))


def _range(tars: dict[int, str]) -> str:
    first, last = min(tars), max(tars)
    return f"{len(tars)} tars from {tars[first]} to {tars[last]}"


def _absolute(given: str) -> str:
    return given.rstrip("/") if is_url(given) else os.path.abspath(given)

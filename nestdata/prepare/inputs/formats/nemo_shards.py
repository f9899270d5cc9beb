"""Finds the tars of NeMo's tarred data sets."""

import os
import re
from collections import defaultdict

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.format import TAR, GivenInput
from nestdata.prepare.inputs.listing import objects_below
from nestdata.prepare.inputs.patterns import check_shards, expand, folder_of, numbered, shard_number
from nestdata.storage import is_url, name_of, parent

_NUMBERED_TAR = re.compile(r"(.*?)\d+(\D*)")
_SHARDED_MANIFESTS = "sharded_manifests"


def find_tars(given: GivenInput) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Returns the folder of the tars of a NeMo data set, and those that the manifests name, with their numbers.

    Without a pattern of tars, they are looked for beside the manifest, or in the folder above `sharded_manifests`.

    Raises:
        ManifestError: The tars cannot be found, some do not exist, or a manifest of a pattern has no tar.
    """
    manifests = numbered(given.names, str(given.path), str(given.path)) if given.is_pattern else {}
    found = _tars_of(given.names[0], str(given.path), given.tars)
    missing = [number for number in manifests if number not in found]
    if missing:
        raise ManifestError(
            f"{given.path}: {manifests[missing[0]]} has no tar with its number among {_range(found)}. "
            "Give all tars with --tars PATTERN, in quotes."
        )
    used = [(number, found[number]) for number in manifests] if given.is_pattern else sorted(found.items())
    return folder_of(found.values()), tuple(used)


def _tars_of(manifest: str, given: str, tars: str | None) -> dict[int, str]:
    """Returns the tars of a NeMo data set by their numbers."""
    if tars is None:
        return _tars_beside(manifest, given)
    if tars.startswith("pipe:"):
        raise ManifestError(f"{tars}: commands are not run. Give the paths or URLs of the tars.")
    location = tars.rstrip("/") if is_url(tars) else os.path.abspath(tars)
    names = expand(location) if is_url(tars) or not os.path.isfile(tars) else [location]
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
            if TAR.fullmatch(name):
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
        "--tars 'PATTERN', such as 's3://bucket/audio_{0..511}.tar'; give manifests of files one by one."
    )


def _files_in(folder: str) -> list[str]:
    """Returns the files in a folder, without those in its subfolders."""
    if is_url(folder):
        return [info.location for info in objects_below(folder) if parent(info.location) == folder]
    return [entry.path for entry in os.scandir(folder) if entry.is_file()]


def _range(tars: dict[int, str]) -> str:
    first, last = min(tars), max(tars)
    return f"{len(tars)} tars from {tars[first]} to {tars[last]}"

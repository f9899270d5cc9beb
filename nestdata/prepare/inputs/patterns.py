"""Names of shards: patterns such as `audio_{0..511}.tar`, the numbers in names, and listings of folders.

Source: NVIDIA NeMo 3.0, `expand_sharded_filepaths` for the brackets and `LazyNeMoTarredIterator` for the numbers.
Differs: NeMo replaces every bracket in a path; here, only brackets around a range, or braces around a list, are a
pattern.
"""

import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from itertools import product
from pathlib import Path

from nestdata.errors import ManifestError
from nestdata.storage import ObjectInfo, common_folder, is_url, name_of, parent, storage

TAR = re.compile(r".*\.(?:tar(?:\.\w+)?|tgz)", re.IGNORECASE)
"""Names of tars, compressed ones included."""

# `{`, `(`, `[`, `<` and `_OP_` open a range of numbers; braces and `_OP_` also open a list.
_PATTERN = re.compile(
    r"(?:[\[({<]|_OP_)(\d+)\.\.(\d+)(?:\.\.(\d+))?(?:[\])}>]|_CL_)|(?:\{|_OP_)([^{},/]*(?:,[^{},/]*)+)(?:\}|_CL_)"
)
_GLOB = re.compile(r"[*?]+")
# NeMo takes the last number that follows an underscore as the shard_id.
_NUMBER = re.compile(r".*_(\d+)")
_ANY_NUMBER = re.compile(r".*?(\d+)\D*$")
_MAX_NAMES = 1_000_000
# Largest number of folders of a store that are listed to find out which shards exist.
_MAX_LISTED = 16


def is_pattern(text: str) -> bool:
    """Returns whether a path or URL names several shards."""
    return ("{" in text or ".." in text or "_OP_" in text) and _PATTERN.search(text) is not None


def default_output(manifest: str | Path) -> Path:
    """Returns the corpus directory of an input for which none is named: in the current directory, by the input's name.

    `audio_{0..511}.tar` becomes `audio.corpus`, and `{0..511}.tar` is named after its folder.
    """
    location = str(manifest) if is_url(str(manifest)) else str(Path(manifest).resolve())
    for name in reversed(location.split("/")):
        plain = _GLOB.sub("", _PATTERN.sub("", name))
        stem = name.split(".")[0] if plain == name else plain.split(".")[0].strip("-_")
        if stem:
            return Path(f"{stem}.corpus")
    return Path("speech.corpus")


def expand(pattern: str) -> list[str]:
    """Returns the names that a pattern stands for, in order; the pattern itself if it is a plain name.

    `{0..3}` is 0, 1, 2, 3; `{00..10..5}` is 00, 05, 10; `{a,b}` is a, b.

    Raises:
        ManifestError: The pattern stands for more than a million names.
    """
    parts: list[Sequence[str]] = []
    num_names, end = 1, 0
    for match in _PATTERN.finditer(pattern):
        parts += [[pattern[end : match.start()]], _alternatives(match, pattern)]
        num_names *= len(parts[-1])
        end = match.end()
    _check_number(num_names, pattern)
    return ["".join(names) for names in product(*parts, [pattern[end:]])]


def shard_number(location: str) -> int | None:
    """Returns the number of a shard in its name: the last one after an underscore, or else the last one."""
    stem = name_of(location).partition(".")[0]
    match = _NUMBER.match(stem) or _ANY_NUMBER.match(stem)
    return int(match[1]) if match else None


def numbered(locations: Sequence[str], given: str, pattern: str = "") -> dict[int, str]:
    """Returns shards by their numbers.

    Args:
        locations: The shards.
        given: What the caller gave, for messages.
        pattern: The pattern that stands for the shards. If it has one range, the shards have the numbers of the range.

    Raises:
        ManifestError: A name has no number, or two have the same one.
    """
    shards: dict[int, str] = {}
    ranges = [match for match in _PATTERN.finditer(pattern) if match[4] is None]
    in_range = [int(text) for text in _alternatives(ranges[0], pattern)] if len(ranges) == 1 else []
    numbers = in_range if len(in_range) == len(locations) else map(shard_number, locations)
    for location, number in zip(locations, numbers, strict=True):
        if number is None:
            raise ManifestError(
                f"{given}: {name_of(location)!r} has no number, by which lines name their shard. Give a "
                "pattern such as audio_{0..511}.tar."
            )
        if number in shards:
            raise ManifestError(
                f"{given}: {shards[number]} and {location} are both shard {number}. Give each set of shards with its "
                "own manifest."
            )
        shards[number] = location
    return shards


def check_shards(locations: Sequence[str], given: str) -> None:
    """Checks that all shards of a pattern exist; lists those in a store, and does not check those at plain URLs.

    Raises:
        ManifestError: Some do not exist; the message names the first.
        StorageError: The store cannot be listed.
    """
    folders = [*dict.fromkeys(parent(location) for location in locations if is_url(location))][:_MAX_LISTED]
    listed = {folder for folder in folders if not folder.lower().startswith("http")}  # HTTP servers cannot be listed
    there = {info.location for folder in listed for info in objects_below(folder)}
    gone = [
        location
        for location in locations
        if (location not in there if parent(location) in listed else not (is_url(location) or os.path.isfile(location)))
    ]
    if gone:
        raise ManifestError(
            f"{given}: {len(gone)} of {len(locations)} shards do not exist, such as {gone[0]}. Restore them, or check "
            "the pattern, and quote it, so that the shell leaves it alone."
        )


def folder_of(locations: Iterable[str]) -> str:
    """Returns the deepest folder that holds all locations."""
    return reduce(common_folder, sorted({parent(location) for location in locations}))


@lru_cache(maxsize=8)
def objects_below(url: str) -> tuple[ObjectInfo, ...]:
    """Returns the objects below a URL, sorted by location, as of the first call since `forget_answers`.

    Raises:
        StorageError: The folder cannot be listed.
    """
    return tuple(storage().list_objects(url))


@lru_cache(maxsize=4096)
def object_info(url: str) -> ObjectInfo:
    """Returns size and ETag of an object, as of the first call since `forget_answers`.

    Raises:
        StorageError: The object does not exist, or the store does not answer.
    """
    return storage().info(url)


def forget_answers() -> None:
    """Makes the next calls ask again; to be called before inputs are opened."""
    objects_below.cache_clear()
    object_info.cache_clear()


def cannot_be_listed(directory: str, error: OSError) -> ManifestError:
    """Returns the error for a folder that cannot be listed."""
    return ManifestError(
        f"{directory}: cannot be listed ({error.strerror}). Grant read permission, or move the folder away."
    )


def _alternatives(match: "re.Match[str]", pattern: str) -> Sequence[str]:
    first, last, step, names = match.groups()
    if names is not None:
        return names.split(",")
    start, stop = int(first), int(last)
    stride = max(1, int(step or 1))
    _check_number(abs(stop - start), pattern)
    padded = any(text.startswith("0") and len(text) > 1 for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    numbers = range(start, stop + 1, stride) if start <= stop else range(start, stop - 1, -stride)
    return [f"{number:0{width}d}" for number in numbers]


def _check_number(num_names: int, pattern: str) -> None:
    if num_names > _MAX_NAMES:
        raise ManifestError(f"{pattern}: stands for more than {_MAX_NAMES} names. Check the numbers.")

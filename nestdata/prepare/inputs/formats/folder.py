"""Audio files named one by one, and folders: audio files, tars and Parquet files; all other files are counted."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.output import MARK
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, MAIN_SUFFIXES, Entry, File, Member, Source
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.formats.huggingface import PARQUET_SUFFIX, check_splits, data_set, may_hold_audio
from nestdata.prepare.inputs.formats.webdataset import WebDataset, check_not_nemo
from nestdata.prepare.inputs.lines import check_manifest
from nestdata.prepare.inputs.patterns import TAR, cannot_be_listed, folder_of, objects_below
from nestdata.prepare.inputs.rows import cut_id_of
from nestdata.storage import ObjectInfo, name_of, parent
from nestdata.wrong_path import kind_of, wrong_path

_AUDIO, _MAIN = frozenset(AUDIO_SUFFIXES), frozenset(MAIN_SUFFIXES)
_LOSSLESS = frozenset({".wav", ".flac", ".aiff", ".aif", ".sph", ".w64"})
# Suffixes by which other files are counted. They are short, because names come from outside.
_SUFFIX = re.compile(r"\.\w{1,12}")
# The folder of archives in which macOS has copies of the attributes of files; elsewhere, they begin with `._`.
_MACOS_FOLDER = "__MACOSX"
# Files by which the folders of a corpus, a preview and features are known, and the kind that such a folder has.
_OUTPUT_MARKS = ({"meta.json", "cuts.jsonl", "index.npy"}, {"index.html", "batch.json"}, {"meta.json", "index.jsonl"})
_OUTPUT_FILES = frozenset[str]().union(*_OUTPUT_MARKS)
_OUTPUT = "an output"


class _AudioLocations:
    """The methods of `Source` for items that are absolute paths, URLs or objects of a store."""

    items_per_task: ClassVar[None] = None
    path: Path | str
    root: str

    def entries(self, number: int, item: str | ObjectInfo) -> Iterator[Entry]:  # noqa: ARG002, the item is enough
        """Yields the entry of a file or object."""
        audio = File(item) if isinstance(item, str) else Member(item, 0, item.size)
        yield Entry(audio.location, cut_id_of(audio.location, self.root), audio)

    def where(self, number: int) -> str:  # noqa: ARG002, the audio says it
        """Returns nothing: the position of a file is its path."""
        return ""


@dataclass(frozen=True, slots=True)
class AudioFiles(_AudioLocations):
    """Consecutive inputs that are audio files, as one source: a list in Python may hold a million."""

    format: ClassVar[InputFormat] = "audio"
    path: Path | str
    """The first file."""

    root: str
    named: list[Path | str] = field(repr=False)
    """All files: paths, and URLs as `str`. They are not pickled, because items name them."""

    def items(self) -> Iterator[str]:
        """Yields absolute paths and URLs.

        Raises:
            ManifestError: A file does not exist, or is not a regular one.
            StorageError: A store cannot be asked.
        """
        for file in self.named:
            check_manifest(file)
            yield file if isinstance(file, str) else os.path.abspath(file)

    def count(self) -> int | None:
        """Returns the number of files."""
        return len(self.named)

    def __reduce__(self) -> tuple[type["AudioFiles"], tuple[Path | str, str, list[Path | str]]]:
        return AudioFiles, (self.path, self.root, [])


@dataclass(frozen=True, slots=True)
class AudioFolder(_AudioLocations):
    """Audio files or objects sorted by name; the files of a folder come before its subfolders.

    In a folder, files of lossless formats come first, then other files with one of `MAIN_SUFFIXES`, because the first
    of several files with the same id is used. Symbolic links are followed, but no folder is read twice, even if several
    links lead to it.
    """

    format: ClassVar[InputFormat] = "folder"
    path: Path | str
    root: str
    num_files: int = field(default=0, repr=False)
    other_files: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Number of files that are not read, by suffix."""

    outputs: tuple[str, ...] = field(default=(), repr=False)
    """Folders that are outputs of this program, and are not read."""

    def items(self) -> Iterator[str | ObjectInfo]:
        """Yields absolute paths or objects.

        Raises:
            ManifestError: A folder cannot be listed.
            StorageError: The store cannot be listed.
        """
        if isinstance(self.path, str):
            yield from sorted_as_files(info for info, kind in _objects(self.path) if kind == "audio")
        else:
            yield from (path for path, kind in _files(os.path.abspath(self.path), set()) if kind == "audio")

    def count(self) -> int | None:
        """Returns the number of files that were found when the folder was opened."""
        return self.num_files


def joined(sources: Iterable[Source]) -> list[Source]:
    """Returns the sources after joining consecutive audio files to one source."""
    found: list[Source] = []
    for source in sources:
        if isinstance(source, AudioFiles) and found and isinstance(found[-1], AudioFiles):
            found[-1].named.extend(source.named)
        else:
            found.append(source)
    return found


def sorted_as_files(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Sorts objects in the order in which `AudioFolder` yields files of the same names."""

    def key(info: ObjectInfo) -> list[tuple[int, str]]:
        *folders, name = info.location.split("/")
        return [*((2, folder) for folder in folders), _order(name)]

    return sorted(objects, key=key)


def other_files(sources: Iterable[Source]) -> dict[str, int]:
    """Returns the number of files in folders that are not read, by suffix, most frequent first."""
    total: Counter[str] = Counter()
    for source in sources:
        if isinstance(source, AudioFolder):
            total.update(source.other_files)
    return dict(sorted(total.items(), key=lambda pair: (-pair[1], pair[0])))


def outputs_in(sources: Iterable[Source]) -> list[str]:
    """Returns the folders in folders that are outputs of this program, and are not read."""
    return [output for source in sources if isinstance(source, AudioFolder) for output in source.outputs]


def _kind(name: str) -> str:
    """Returns `audio`, `tar` or `parquet`, or what a file that is not read is counted by."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix in _AUDIO:
        return "audio"
    if suffix == PARQUET_SUFFIX:
        return "parquet"
    if TAR.fullmatch(name):
        return "tar"
    return (suffix if _SUFFIX.fullmatch(suffix) else "other") if suffix else "without suffix"


def _is_hidden(name: str) -> bool:
    """Returns whether a file or folder is hidden."""
    return name.startswith(".") or name == _MACOS_FOLDER


def _order(name: str) -> tuple[int, str]:
    suffix = os.path.splitext(name)[1].lower()
    return 0 if suffix in _LOSSLESS else 1 if suffix in _MAIN else 2, name


def _is_output(names: Collection[str]) -> bool:
    """Returns whether a folder, given the names in it, is an output: a corpus, a preview, or features."""
    return any(marks.issubset(names) for marks in _OUTPUT_MARKS)


def _objects(url: str) -> Iterator[tuple[ObjectInfo, str]]:
    """Yields the objects below a URL and their kinds; the folders of outputs come first, without what is in them."""
    marks: dict[str, set[str]] = defaultdict(set)
    for info in objects_below(url):
        if name_of(info.location) in _OUTPUT_FILES:
            marks[parent(info.location)].add(name_of(info.location))
    outputs = [folder for folder, names in marks.items() if folder != url and _is_output(names)]
    yield from ((ObjectInfo(folder, 0, None), _OUTPUT) for folder in outputs)
    left_out = tuple(f"{folder}/" for folder in outputs)
    for info in objects_below(url):
        is_hidden = any(map(_is_hidden, info.location.removeprefix(url).split("/")))
        if not (is_hidden or info.location.startswith(left_out)):
            yield info, _kind(name_of(info.location))


def _files(directory: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Yields the paths of files and their kinds, in an order that does not depend on the file system.

    Holds the names of one folder at a time. Skips outputs that are being written, and folders whose device and inode
    are in `seen`; adds those that it reads.
    """
    try:
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(directory) as entries:
            listed = [(_is_folder(entry), entry.name) for entry in entries if not _is_hidden(entry.name)]
        if directory.endswith(".partial") and os.path.exists(os.path.join(directory, MARK)):
            return  # an output that is being written
        if len(seen) > 1 and _is_output({name for _, name in listed}):
            yield directory, _OUTPUT
            return
    except OSError as error:
        raise cannot_be_listed(directory, error) from error
    for name in sorted((name for is_folder, name in listed if not is_folder), key=_order):
        yield os.path.join(directory, name), _kind(name)
    for name in sorted(name for is_folder, name in listed if is_folder):
        yield from _files(os.path.join(directory, name), seen)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link that leads to itself
        return False


def open_file(given: GivenInput) -> Opened:
    """Opens an audio file."""
    check_manifest(given.path)
    return given.parent, lambda root: AudioFiles(given.path, root, [given.path])


def open_folder(given: GivenInput) -> Opened:
    """Opens a folder of audio files, tars and Parquet files."""
    given.check_folder()
    others: Counter[str] = Counter()
    shards: dict[str, list[str]] = {"tar": [], "parquet": []}
    listed: Iterator[tuple[str, str]]
    outputs: list[str] = []
    if isinstance(given.path, str):
        listed = ((info.location, kind) for info, kind in _objects(given.location))
    else:
        listed = _files(given.location, set())
    for location, kind in listed:
        if kind == _OUTPUT:
            outputs.append(location)
        elif kind in shards:
            shards[kind].append(location)
        else:
            others[kind] += 1
    num_audio, tars, parquet = others.pop("audio", 0), sorted(shards["tar"]), sorted(shards["parquet"])
    if given.format is None and tars:
        check_not_nemo(given)
    if num_audio and parquet:
        parquet = [name for name in parquet if may_hold_audio(name)]
        others += Counter({PARQUET_SUFFIX: len(shards["parquet"]) - len(parquet)})

    def sources(root: str) -> list[Source]:
        if not (num_audio or tars or parquet):
            what = "audio in this folder or its subfolders"
            if isinstance(given.path, str):
                what = "object of this name, and no audio below it"
            found = ", ".join(f"{number} {kind}" for kind, number in others.most_common(10))
            if isinstance(given.path, Path) and kind_of(given.path) != "a folder":
                raise ManifestError(f"{given.path}: {wrong_path(given.path, 'audio')}")
            kinds = f"; of other kinds: {found}" if found else ""
            raise ManifestError(f"{given.folder}: no {what}{kinds}. docs/formats.md lists what is read.")
        opened: list[Source] = []
        if num_audio or others or outputs:
            opened.append(AudioFolder(given.folder, root, num_audio, dict(others), tuple(outputs)))
        if tars:
            opened.append(WebDataset.of(given.folder, tars, root, given.options.columns))
        if parquet:
            check_splits(given.location, parquet)
            opened.append(data_set(given, given.location, root, parquet))
        return opened

    has_tars_only = tars and not num_audio and not parquet
    return folder_of(tars) if has_tars_only else given.location, sources

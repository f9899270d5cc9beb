"""Hugging Face data sets that were saved to disk. Needs `pip install 'nest-pretrain[huggingface]'`.

Audio that is embedded in the data set is written to files in the corpus directory, because cuts name audio files.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.errors import ConfigError, ManifestError, in_one_line
from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import Entry, resolve
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.formats.parquet import audio_suffix
from nestdata.prepare.inputs.labels import row_labels

_FILES_PER_FOLDER = 1000


@dataclass(frozen=True, slots=True)
class HuggingFaceDataset:
    """Rows of one split, with all columns of plain values as labels.

    Ids are row numbers: a column `id` may be the id of a sentence or a speaker, which several rows share.
    """

    items_per_task: ClassVar[None] = None
    path: Path
    folder: str
    """Absolute path of the data set."""

    version: int
    """Modification time of the data set in ns, which distinguishes it from an earlier one at the same path."""

    directory: str
    """The folder that relative paths start from: the current directory, as in the library."""

    prefix: str
    """First part of the ids: the path of the data set relative to the common root."""

    extract_to: str
    """Folder that embedded audio is written to."""

    stored_in: str
    """Path of the same folder once the corpus is in place."""

    def items(self) -> Iterator[int]:
        """Yields the numbers of the rows, from 0."""
        yield from range(len(_open(self.folder, self.version).rows))

    def entries(self, number: int, item: int) -> Iterator[Entry]:
        """Yields the entry of a row, and writes its audio to a file if it is embedded in the data set."""
        split = _open(self.folder, self.version)
        try:
            row = split.rows[item]
        except Exception as error:  # the readers of the library raise errors of many kinds
            raise ManifestError(
                f"{self.where(number)}: cannot be read ({in_one_line(error)}). Check the files and copy them again."
            ) from error
        file = self._locate(row.pop(split.audio), item)
        yield Entry(self.where(number), f"{self.prefix}/{item}", file, labels=row_labels(row, split.classes))

    def where(self, number: int) -> str:
        """Returns the path and the row number, counted from 0 as in the library."""
        return f"{self.path} (row {number - 1})"

    def count(self) -> int | None:
        """Returns the number of rows."""
        return len(_open(self.folder, self.version).rows)

    def _locate(self, audio: dict[str, Any] | None, row: int) -> File:
        """Returns the audio of a row, which is written to a file if it is embedded."""
        if not audio or (audio["bytes"] is None and not audio["path"]):
            return File(f"{self.folder}/no audio in row {row}")
        if audio["bytes"] is None:
            return File(resolve(self.directory, audio["path"]))
        name = f"{row // _FILES_PER_FOLDER:06d}/{row:09d}{audio_suffix(audio['path'])}"
        file = Path(self.extract_to, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(audio["bytes"])
        return File(str(file), f"{self.stored_in}/{name}")


class _Split(NamedTuple):
    """A data set that is open in this process, reduced to the audio column and the columns of plain values."""

    rows: Any
    audio: str
    """Name of the audio column."""

    classes: dict[str, list[str]]
    """Class names of each column that stores classes as numbers."""


def _detect(given: GivenInput) -> bool:
    if given.kind != "folder":
        return False
    return given.has_file("dataset_dict.json") or (given.has_file("state.json") and given.has_file("dataset_info.json"))


def _open_saved(given: GivenInput) -> Opened:
    path = given.path
    if isinstance(path, str):
        raise ManifestError(
            f"{path if given.format else given.folder}: a data set that `save_to_disk` wrote is not read from a URL. "
            "Copy it to a local folder, or give its Parquet files."
        )
    given.check_folder()
    if given.has_file("dataset_dict.json"):
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise ManifestError(
            f"{path}: several splits of a data set. Give the folders of one or more: {', '.join(splits)}."
        )
    if not _detect(given):
        raise ManifestError(f"{path}: not one split of a data set that `save_to_disk` wrote. Save it again.")
    folder, version, directory = given.location, (path / "state.json").stat().st_mtime_ns, os.getcwd()

    def opened(root: str) -> HuggingFaceDataset:
        _open(folder, version)  # raises an error now if it cannot be read
        prefix = os.path.relpath(folder, root) if folder != root else os.path.basename(folder)
        return HuggingFaceDataset(path, folder, version, directory, prefix, *given.folders("audio"))

    return folder, opened


FORMAT = Format("huggingface", _detect, _open_saved)


@lru_cache(maxsize=2)
def _open(folder: str, version: int) -> _Split:  # noqa: ARG001, the version is part of the cache's key
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{folder}: a Hugging Face data set, for which the package `datasets` is missing. "
            "Install it with `pip install 'nest-pretrain[huggingface]'`."
        ) from None
    # The library's progress bars would be drawn over those of `prepare`.
    shows_progress = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_from_disk(folder)
        features = rows.features
        audio = [name for name, feature in features.items() if isinstance(feature, datasets.Audio)]
        if not audio:
            raise ManifestError(f"{folder}: no audio column among {', '.join(features)}. Cast one to `Audio` and save.")
        column = "audio" if "audio" in audio else audio[0]
        classes = {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
        plain = [name for name, kind in features.items() if isinstance(kind, datasets.Value | datasets.ClassLabel)]
        # A data set can be saved with a format such as torch's; without one, values are Python's own.
        rows = rows.with_format(None).select_columns([column, *plain])
        return _Split(rows.cast_column(column, datasets.Audio(decode=False)), column, classes)
    except ManifestError:
        raise
    except Exception as error:  # the readers of the library raise errors of many kinds
        raise ManifestError(
            f"{folder}: not a Hugging Face data set that can be opened ({in_one_line(error)}). Save it again."
        ) from error
    finally:
        if shows_progress:
            datasets.enable_progress_bars()

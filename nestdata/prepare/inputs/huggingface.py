"""Hugging Face data sets that were saved to disk. Needs `pip install 'nest-pretrain[huggingface]'`.

Audio that lies inside the data set's own files is written out beside the corpus, since a corpus names files.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nestdata.errors import ConfigError, ManifestError
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, resolve

_FILES_PER_FOLDER = 1000


@dataclass(frozen=True, slots=True)
class HuggingFaceDataset:
    """Rows of one split, with all plain columns as labels.

    Ids are made of row numbers, since a column `id` may name sentences or speakers, of which several rows are.
    """

    path: Path
    folder: str
    """The same, absolute."""

    version: int
    """When it was saved: another data set may have been read from the same place before."""

    directory: str
    """What relative paths are relative to: the current directory, as in the library."""

    prefix: str
    """What ids begin with."""

    extract_to: str
    """Folder that audio from inside the data set is written to."""

    stored_in: str
    """The same folder as it will be called when the corpus is in place."""

    @classmethod
    def open(cls, path: Path, root: str, extract_to: str, stored_in: str) -> "HuggingFaceDataset":
        """Opens a folder that `save_to_disk` left, with ids relative to the root.

        Raises:
            ManifestError: It is no such folder, cannot be read, or has no column of audio.
            ConfigError: The package `datasets` is not installed.
        """
        if not is_saved_dataset(path):
            raise ManifestError(f"{path}: not one split of a data set, as `save_to_disk` leaves it. Save it again.")
        folder = os.path.abspath(path)
        prefix = os.path.relpath(folder, root) if folder != root else os.path.basename(folder)
        version = os.stat(os.path.join(folder, "state.json")).st_mtime_ns
        _open(folder, version)
        return cls(path, folder, version, os.getcwd(), prefix, extract_to, stored_in)

    def items(self) -> Iterator[int]:
        """Yields the numbers of the rows, from 0."""
        yield from range(len(_open(self.folder, self.version).rows))

    def entry(self, number: int, item: int) -> Entry | None:
        """Makes an entry of a row; writes its audio to a file where it lies inside the data set."""
        split = _open(self.folder, self.version)
        try:
            row = split.rows[item]
            audio, labels = row.pop(split.audio), split.labels(row)
        except Exception as error:  # its readers raise what they like
            raise ManifestError(
                f"{self.where(number)}: cannot be read ({_words(error)}). Check the files and copy them again."
            ) from error
        found, stored = self._locate(audio, item)
        return Entry(self.where(number), f"{self.prefix}/{item}", found, labels=labels, stored_path=stored)

    def where(self, number: int) -> str:
        """Names the row as the library counts it, from 0."""
        return f"{self.path} (row {number - 1})"

    def count(self) -> int | None:
        """Returns the number of rows."""
        return len(_open(self.folder, self.version).rows)

    def _locate(self, audio: dict[str, Any] | None, row: int) -> tuple[str, str]:
        """Returns where the audio lies now, and where it will lie."""
        if not audio or (audio["bytes"] is None and not audio["path"]):
            return f"{self.folder}/no audio in row {row}", ""
        if audio["bytes"] is None:
            return resolve(self.directory, audio["path"]), ""
        suffix = os.path.splitext(audio["path"] or "")[1].lower()
        name = f"{row // _FILES_PER_FOLDER:06d}/{row:09d}{suffix if suffix in AUDIO_SUFFIXES else '.wav'}"
        file = Path(self.extract_to, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(audio["bytes"])
        return str(file), f"{self.stored_in}/{name}"


class _Split(NamedTuple):
    """A data set that is open in this process, without the columns that a label cannot hold."""

    rows: Any
    audio: str
    """The column that holds the audio."""

    classes: dict[str, list[str]]
    """Names of the classes that a column holds as numbers."""

    def labels(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns what a row says, but for dates, bytes, and classes that it does not know, which are negative."""
        labels = {}
        for name, value in row.items():
            if name in self.classes:
                if value is not None and value >= 0:
                    labels[name] = self.classes[name][value]
            elif isinstance(value, str | int | float):
                labels[name] = value
        return labels


def is_saved_dataset(path: Path) -> bool:
    """Tells whether a folder is one split as `save_to_disk` leaves it.

    Raises:
        ManifestError: It holds several splits.
    """
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise ManifestError(
            f"{path}: several splits of a data set. Give the folders of one or more: {', '.join(splits)}."
        )
    return (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


@lru_cache(maxsize=2)
def _open(folder: str, version: int) -> _Split:  # noqa: ARG001, another version is opened anew
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{folder}: a Hugging Face data set, for which the package `datasets` is missing. "
            "Install it with `pip install 'nest-pretrain[huggingface]'`."
        ) from None
    # Its progress bars would be drawn over ours.
    shows_progress = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return _split_of(datasets.load_from_disk(folder), datasets, folder)
    except ManifestError:
        raise
    except Exception as error:  # its readers raise what they like
        raise ManifestError(
            f"{folder}: not a Hugging Face data set that can be opened ({_words(error)}). Save it again."
        ) from error
    finally:
        if shows_progress:
            datasets.enable_progress_bars()


def _split_of(rows: Any, datasets: Any, folder: str) -> _Split:
    kinds = rows.features
    audio = [name for name, kind in kinds.items() if isinstance(kind, datasets.Audio)]
    if not audio:
        raise ManifestError(f"{folder}: no audio column among {', '.join(kinds)}. Cast one to `Audio` and save.")
    column = "audio" if "audio" in audio else audio[0]
    plain = [name for name, kind in kinds.items() if isinstance(kind, datasets.Value | datasets.ClassLabel)]
    # A format such as torch's is saved along; without one, values are plain.
    rows = rows.with_format(None).select_columns([column, *plain])
    classes = {name: kinds[name].names for name in plain if isinstance(kinds[name], datasets.ClassLabel)}
    return _Split(rows.cast_column(column, datasets.Audio(decode=False)), column, classes)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

"""Hugging Face data sets with the audio inside: as Parquet files, and as `save_to_disk` writes one split.

Both need `pip install 'nest-pretrain[huggingface]'`. The bytes of a row cannot be read without the rest of its row
group or batch. The audio of each file is therefore copied once to an uncompressed tar in the corpus directory, where
it has addresses.
"""

import io
import json
import os
import posixpath
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

from nestdata.errors import ConfigError, ManifestError, StorageError, in_one_line
from nestdata.output import flush_to_disk
from nestdata.prepare.inputs.audio import File, Member, Unusable
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, cut_id_of, resolve
from nestdata.prepare.inputs.format import Format, GivenInput, Opened
from nestdata.prepare.inputs.patterns import objects_below
from nestdata.storage import ObjectInfo, is_url, join, name_of, parent, storage

PARQUET_SUFFIX = ".parquet"
# Rows that are decoded at a time. The memory is that of a row group, whose columns the reader decompresses as a whole.
_ROWS_PER_BATCH = 64
# Bits of an entry's number that count rows.
_ROW_BITS = 40
_NO_AUDIO = Unusable("missing", "the row has neither bytes nor a path of audio")
# Words by which `datasets` recognises the splits of a data set in the names of files and folders.
_SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLITS, key=len, reverse=True))})(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DataSetFiles:
    """The rows of the files of a data set, with all columns of plain values as labels.

    A column `id` is a label: several rows may share the id of a sentence or a speaker.
    """

    items_per_task: ClassVar[int] = 1
    path: Path | str
    """A file, a folder, or a pattern of files: a local path, or a URL as a `str`."""

    folder: str
    """Absolute path or URL of the folder that relative paths in the rows start from."""

    root: str
    write_to: str
    """Folder that the tars are written to."""

    stored_in: str
    """Path of the same folder once the corpus is in place."""

    names: tuple[str, ...] = field(repr=False)
    """Locations of the files, sorted. They are not pickled, because items name them."""

    prefix: str = ""
    """First part of the ids, if rows are numbered over all files; otherwise, it is the path of each file."""

    def items(self) -> Iterator[tuple[str, int]]:
        """Yields the locations of the files, and the number of the first row of each.

        Raises:
            ManifestError: A saved data set cannot be read.
            ConfigError: The package `pyarrow` is not installed.
        """
        first = 0
        for name in self.names:
            yield name, first
            if self.prefix:
                first += _num_rows(name)

    def files(self, item: tuple[str, int]) -> list[str]:
        """Returns the file."""
        return [item[0]]

    def entries(self, number: int, item: tuple[str, int]) -> Iterator[Entry]:
        """Writes the audio of a file to tars, and yields the entries of its rows; a reject for what cannot be read.

        Raises:
            ConfigError: The package `pyarrow` is not installed.
            StorageError: The store cannot be read.
        """
        location, row = item
        prefix = self.prefix or cut_id_of(location, self.root)
        # The folder is part of the name, so that names are unique in the corpus.
        tar_path = Path(self.write_to, f"{Path(self.write_to).name}-{number:06d}.tar")
        found: list[tuple[Entry, tuple[int, int, int] | None]] = []
        with _new_tar(tar_path) as tar:
            try:
                for values, labels in _rows(location):
                    where = f"{self.path if self.prefix else location} (row {row})"
                    content, name = values.get("bytes"), values.get("path")
                    audio = File(resolve(self.folder, name)) if name else _NO_AUDIO
                    entry = Entry(where, f"{prefix}/{row}", audio, labels=labels, number=number << _ROW_BITS | row)
                    found.append((entry, None if content is None else _add(tar, content, _suffix_of(name))))
                    row += 1
            except ManifestError as error:
                unusable = Unusable("unreadable", str(error))
                found.append((Entry(location, prefix, unusable, number=number << _ROW_BITS | row), None))
        shard = ObjectInfo(f"{self.stored_in}/{tar_path.name}", tar_path.stat().st_size, None)
        for entry, place in found:
            yield entry._replace(audio=Member(shard, *place, written_to=str(tar_path))) if place else entry

    def where(self, number: int) -> str:
        """Returns the path, the number of the file, counted from 1, and the number of the row, counted from 0."""
        return f"{self.path} (file {number >> _ROW_BITS}, row {number & ((1 << _ROW_BITS) - 1)})"

    def count(self) -> int | None:
        """Returns the number of files."""
        return len(self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self.path, self.folder, self.root, self.write_to, self.stored_in, (), self.prefix)
        return DataSetFiles, values


@contextmanager
def _new_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Yields a tar that appears at its path when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tar.tmp")
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        yield tar
    flush_to_disk(temporary)  # the corpus is flushed at the end, but not what is in its folders
    temporary.replace(path)


def _add(tar: tarfile.TarFile, content: bytes, suffix: str) -> tuple[int, int, int]:
    """Adds an audio file to a tar, and returns its offset, its length and its checksum."""
    header = tarfile.TarInfo(f"{len(tar.getmembers()):09d}{suffix}")
    header.size = len(content)
    place = tar.offset + tarfile.BLOCKSIZE, len(content), crc32(content)
    tar.addfile(header, io.BytesIO(content))
    return place


def _open_parquet(given: GivenInput) -> Opened:
    folder, names = parquet_folder(given.path), _parquet_files(given.path)
    if folder == given.location:
        _check_splits(folder, names)
    return folder, lambda root: DataSetFiles(given.path, folder, root, *given.folders("shards"), tuple(names))


# `formats.folder` reads a folder of Parquet files, unless the format is given.
PARQUET_FORMAT = Format("parquet", lambda given: str(given.path).lower().endswith(PARQUET_SUFFIX), _open_parquet)


def parquet_in_folder(given: GivenInput, names: list[str], root: str) -> DataSetFiles:
    """Returns the source of the Parquet files in a folder, given their sorted locations.

    Raises:
        ManifestError: The files are of several splits of a data set.
    """
    _check_splits(given.location, names)
    return DataSetFiles(given.path, given.location, root, *given.folders("shards"), tuple(names))


def may_hold_audio(name: str) -> bool:
    """Returns whether a Parquet file has a column of audio, or cannot be read, in which case its entries say why.

    A folder of audio often has a table of labels, such as `metadata.parquet`.
    """
    try:
        from pyarrow import parquet

        with _opened(name) as file:
            return bool(_audio_columns(parquet.ParquetFile(file).schema_arrow))
    except Exception:  # the reader raises errors of many kinds
        return True


def _check_splits(folder: str, names: list[str]) -> None:
    """Raises ManifestError if the files in a folder are for training and for validation or tests.

    Training on the test set of a data set must be a decision.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        # The last word decides: that of the name of the file, rather than of a folder.
        if words := _SPLIT.findall(name.removeprefix(folder)):
            found[_SPLITS[words[-1].lower()]].append(name)
    if len(found) > 1:
        counts = ", ".join(f"{len(files)} of {split}" for split, files in sorted(found.items()))
        example = min(found.get("train") or next(iter(found.values())))
        pattern = join(parent(example), re.sub(r"\d+", "*", name_of(example)))
        raise ManifestError(
            f"{folder}: Parquet files of several splits ({counts}). Give those of one split, such as {pattern!r}, or "
            "several patterns to take them together."
        )


def parquet_folder(path: Path | str) -> str:
    """Returns the absolute path or URL of the folder of an input: itself, or that of the file or pattern."""
    folder = path.rstrip("/") if isinstance(path, str) else os.path.abspath(path)
    while has_magic(folder) or folder.lower().endswith(PARQUET_SUFFIX) or os.path.isfile(folder):
        folder = parent(folder)
    return folder


def _parquet_files(path: Path | str) -> list[str]:
    """Returns the sorted locations of the files of an input."""
    if isinstance(path, str):
        if path.lower().endswith(PARQUET_SUFFIX) and not has_magic(path):
            return [path]
        pattern = path if has_magic(path) else f"{path.rstrip('/')}/*{PARQUET_SUFFIX}"
        names = (info.location for info in objects_below(parquet_folder(path)))
        found = [name for name in names if fnmatchcase(name, pattern)]
    elif path.is_dir():
        found = [os.path.abspath(file) for file in path.rglob(f"*{PARQUET_SUFFIX}") if file.is_file()]
    else:
        found = [os.path.abspath(file) for file in ([path] if path.is_file() else glob(str(path), recursive=True))]
    if not found:
        raise ManifestError(f"{path}: no such Parquet file. Check the path or the pattern.")
    return sorted(found)


def _detect_saved(given: GivenInput) -> bool:
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
    _pyarrow(str(path))
    if given.has_file("dataset_dict.json"):
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise ManifestError(
            f"{path}: several splits of a data set. Give the folders of one or more: {', '.join(splits)}."
        )
    try:
        state = json.loads((path / "state.json").read_bytes())
        names = tuple(f"{given.location}/{name_of(str(file['filename']))}" for file in state["_data_files"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ManifestError(
            f"{path}: not one split of a data set that `save_to_disk` wrote ({in_one_line(error)}). Save it again."
        ) from error
    folder, directory = given.location, os.getcwd()  # relative paths start from the current one, as in the library

    def opened(root: str) -> DataSetFiles:
        prefix = os.path.relpath(folder, root) if folder != root else os.path.basename(folder)
        return DataSetFiles(path, directory, root, *given.folders("shards"), names, prefix)

    return folder, opened


FORMAT = Format("huggingface", _detect_saved, _open_saved)


def _opened(location: str) -> io.BufferedIOBase:
    return storage().open_stream(location) if is_url(location) else open(location, "rb")


def _num_rows(location: str) -> int:
    """Returns the number of rows of a file of a saved data set."""
    arrow = _pyarrow(location)
    with _reading(location), arrow.memory_map(location) as file:
        return sum(batch.num_rows for batch in arrow.ipc.open_stream(file))


def _rows(location: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the audio and the labels of each row of a file.

    Raises:
        ManifestError: The file cannot be read, or has no audio column.
        StorageError: The store cannot be read.
    """
    arrow = _pyarrow(location)
    is_parquet = location.lower().endswith(PARQUET_SUFFIX)
    with _reading(location), _opened(location) if is_parquet else arrow.memory_map(location) as stream:
        if is_parquet:
            file = arrow.parquet.ParquetFile(stream)
            column, plain, classes = _columns_of(file.schema_arrow, location)
            batches = file.iter_batches(_ROWS_PER_BATCH, columns=[column, *plain], use_threads=False)
        else:
            file = arrow.ipc.open_stream(stream)
            column, plain, classes = _columns_of(file.schema, location)
            batches = (
                batch.select([column, *plain]).slice(start, _ROWS_PER_BATCH)
                for batch in file
                for start in range(0, batch.num_rows, _ROWS_PER_BATCH)
            )
        for batch in batches:
            for row in batch.to_pylist():
                yield row.pop(column) or {}, _labels(row, classes)


@contextmanager
def _reading(location: str) -> Iterator[None]:
    """Turns the errors of the reader, which are of many kinds, into ManifestError."""
    try:
        yield
    except (ManifestError, ConfigError, StorageError, GeneratorExit):
        raise
    except Exception as error:
        raise ManifestError(
            f"{location}: not a file of a data set that can be read ({in_one_line(error)}). Copy it again."
        ) from error


def _pyarrow(location: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{location}: a Hugging Face data set, for which the package `pyarrow` is missing. "
            "Install it with `pip install 'nest-pretrain[huggingface]'`."
        ) from None
    return pyarrow


def _columns_of(schema: Any, location: str) -> tuple[str, list[str], dict[str, list[str]]]:
    """Returns the column of audio, those of plain values, and the class names of those that store numbers of classes.

    Raises:
        ManifestError: There is no column of audio, or it has other types than `datasets` writes: bytes, and text.
    """
    from pyarrow import types

    audio = _audio_columns(schema)
    if not audio:
        raise ManifestError(
            f"{location}: no column with audio, which is a struct of bytes and path, among {', '.join(schema.names)}."
        )
    column = "audio" if "audio" in audio else audio[0]
    is_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    is_text = (types.is_string, types.is_large_string, types.is_string_view)
    for part in schema.field(column).type:
        expected = {"bytes": (types.is_null, *is_bytes), "path": (types.is_null, *is_text)}.get(part.name, ())
        if expected and not any(check(part.type) for check in expected):
            raise ManifestError(
                f"{location}: the column {column!r} has a field {part.name!r} of type {part.type}, where "
                f"{'binary' if part.name == 'bytes' else 'string'} was expected. Cast the column."
            )
    is_plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    plain = [part.name for part in schema if any(check(part.type) for check in is_plain)]
    classes = {
        name: feature["names"]
        for name, feature in _features_of(schema).items()
        if name in plain and isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
    return column, plain, classes


def _audio_columns(schema: Any) -> list[str]:
    """Returns the names of the columns that are a struct with bytes."""
    from pyarrow import types

    return [part.name for part in schema if types.is_struct(part.type) and part.type.get_field_index("bytes") >= 0]


def _features_of(schema: Any) -> dict[str, Any]:
    """Returns the descriptions of columns that the library `datasets` writes; empty if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _labels(row: dict[str, Any], classes: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the strings, numbers and class names of a row; a negative class is unknown."""
    labels = {name: value for name, value in row.items() if value is not None and name not in classes}
    for name, names in classes.items():
        if row[name] is not None and 0 <= row[name] < len(names):
            labels[name] = names[int(row[name])]  # a float in a column with gaps
    return labels


def _suffix_of(name: str | None) -> str:
    suffix = posixpath.splitext(name or "")[1].lower()
    return suffix if suffix in AUDIO_SUFFIXES else ".wav"

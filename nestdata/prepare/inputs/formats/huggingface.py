"""Hugging Face data sets: Parquet files, and splits written by `save_to_disk`, which hold audio or name its files.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

from nestdata.columns import Column, given_name, key_of
from nestdata.errors import ConfigError, ManifestError, StorageError, in_one_line, shortened
from nestdata.input_format import InputFormat
from nestdata.output import flush_to_disk
from nestdata.prepare.inputs.entry import AUDIO_SUFFIXES, Entry, File, Member, Unusable
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.patterns import objects_below
from nestdata.prepare.inputs.rows import (
    AUDIO_NAMES,
    FileNames,
    Meaning,
    check_columns,
    cut_id_of,
    entry_of_row,
    meaning_in,
    names_audio,
    placed,
    resolve,
)
from nestdata.storage import ObjectInfo, join, name_of, parent, storage

PARQUET_SUFFIX = ".parquet"
# Rows that are decoded at a time. Memory holds a row group, because the reader decompresses its columns as a whole.
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
    """The rows of the files of a data set; all other columns are labels, except columns of bytes and signals.

    A column `id` is a label: several rows may share the id of a sentence or a speaker.
    """

    items_per_task: ClassVar[int] = 1
    format: ClassVar[InputFormat] = "parquet"
    path: Path | str
    """A file, a folder, or a pattern of files: a local path, or a URL as a `str`."""

    names: FileNames
    """Relative paths in the rows start from one folder."""

    write_to: str
    """Folder that the tars are written to."""

    stored_in: str
    """Path of the same folder once the corpus is in place."""

    locations: tuple[str, ...] = field(repr=False)
    """The files, sorted. They are not pickled, because items name them."""

    prefix: str = ""
    """First part of the ids, if rows are numbered over all files; otherwise, it is the path of each file."""

    columns: tuple[Column, ...] = ()
    """What the caller says of the columns."""

    def items(self) -> Iterator[tuple[str, int]]:
        """Yields the locations of the files, and the number of the first row of each.

        Raises:
            ManifestError: A saved data set cannot be read.
            ConfigError: The package `pyarrow` is not installed.
        """
        first = 0
        for location in self.locations:
            yield location, first
            if self.prefix:
                first += _num_rows(location)

    def files(self, item: tuple[str, int]) -> list[str]:
        """Returns the file."""
        return [item[0]]

    def entries(self, number: int, item: tuple[str, int]) -> Iterator[Entry]:
        """Writes the audio of a file to a tar, and yields the entries of its rows; a reject for what cannot be read.

        Raises:
            ConfigError: The package `pyarrow` is not installed, or `columns` does not fit the file.
            ManifestError: A time or the channel in a row cannot be one, or a row names no file.
            StorageError: The store cannot be read.
        """
        location, first = item
        prefix = self.prefix or cut_id_of(location, self.names.root)
        # The folder is part of the name, so that names are unique in the corpus.
        tar_path = Path(self.write_to, f"{Path(self.write_to).name}-{number:06d}.tar")
        found: list[tuple[Entry, tuple[int, int, int] | None]] = []
        with ExitStack() as stack:
            tar: tarfile.TarFile | None = None
            for index, row in enumerate(_rows(location, self.columns), start=first):
                where, position = f"{self.path if self.prefix else location} (row {index})", number << _ROW_BITS | index
                if isinstance(row, Unusable):
                    found.append((Entry(location, prefix, row, number=position), None))
                    continue
                values, columns = row
                meaning, labels = columns.meaning, columns.labels_of(values)
                if columns.audio is None:
                    found.append((entry_of_row(where, values, meaning, self.names, labels, position), None))
                    continue
                content, path = columns.audio_in(values, where)
                audio = File(resolve(self.names.base, path)) if path else _NO_AUDIO
                entry, place = placed(where, f"{prefix}/{index}", audio, values, meaning, labels, position), None
                if content is not None:
                    tar = tar or stack.enter_context(_new_tar(tar_path))
                    place = _add(tar, content, _suffix_of(path))
                found.append((entry, place))
        shard = ObjectInfo(f"{self.stored_in}/{tar_path.name}", tar_path.stat().st_size if tar else 0, None)
        for entry, place in found:
            yield entry._replace(audio=Member(shard, *place, written_to=str(tar_path))) if place else entry

    def where(self, number: int) -> str:
        """Returns the path, the number of the file, counted from 1, and the number of the row, counted from 0."""
        return f"{self.path} (file {number >> _ROW_BITS}, row {number & ((1 << _ROW_BITS) - 1)})"

    def count(self) -> int | None:
        """Returns the number of files."""
        return len(self.locations)

    def __reduce__(self) -> tuple[Any, ...]:
        return DataSetFiles, (self.path, self.names, self.write_to, self.stored_in, (), self.prefix, self.columns)


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


def open_parquet(given: GivenInput) -> Opened | None:
    """Opens Parquet files; a folder of them only if the caller knows the format; otherwise, `folder` reads it."""
    if given.format is None and not str(given.path).lower().endswith(PARQUET_SUFFIX):
        return None
    folder = given.location
    while has_magic(folder) or folder.lower().endswith(PARQUET_SUFFIX) or os.path.isfile(folder):
        folder = parent(folder)
    names = _parquet_files(given.path, folder)
    if folder == given.location:
        check_splits(folder, names)
    return folder, lambda root: data_set(given, folder, root, names)


def data_set(given: GivenInput, folder: str, root: str, locations: Sequence[str], prefix: str = "") -> DataSetFiles:
    """Returns the source of the files of a data set, in which relative paths start from a folder."""
    names, below, options = FileNames((folder,), folder, root=root), f"shards/{given.number}", given.options
    write_to, stored_in = str(options.write_to / below), str(options.stored_in / below)
    return DataSetFiles(given.path, names, write_to, stored_in, tuple(locations), prefix, options.columns)


def may_hold_audio(name: str) -> bool:
    """Returns whether a Parquet file has a column of audio, or cannot be read, in which case its entries say why.

    A folder of audio often has a table of labels, such as `metadata.parquet`.
    """
    try:
        from pyarrow import parquet

        with storage().open_stream(name) as file:
            return _audio_column(parquet.ParquetFile(file).schema_arrow, name, ()) is not None
    except Exception:  # the reader raises errors of many kinds
        return True


def check_splits(folder: str, names: list[str]) -> None:
    """Raises ManifestError if the files in a folder are for training and for validation or tests.

    Training on the test set of a data set must be a decision.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        # The last word decides: the name of the file counts more than a folder.
        if words := _SPLIT.findall(name.removeprefix(folder)):
            found[_SPLITS[words[-1].lower()]].append(name)
    if len(found) > 1:
        counts = ", ".join(f"{len(files)} of {split}" for split, files in sorted(found.items()))
        example = min(found.get("train") or next(iter(found.values())))
        pattern = join(parent(example), re.sub(r"\d+", "*", name_of(example)))
        raise ManifestError(
            f"{folder}: Parquet files of several splits ({counts}). Give the files of one split, such as {pattern!r}, "
            "or several patterns to take them together."
        )


def _parquet_files(path: Path | str, folder: str) -> list[str]:
    """Returns the sorted locations of the files of an input, which are in a folder or its subfolders."""
    if isinstance(path, str):
        if path.lower().endswith(PARQUET_SUFFIX) and not has_magic(path):
            return [path]
        pattern = path if has_magic(path) else f"{path.rstrip('/')}/*{PARQUET_SUFFIX}"
        names = (info.location for info in objects_below(folder))
        found = [name for name in names if fnmatchcase(name, pattern)]
    elif path.is_dir():
        found = [os.path.abspath(file) for file in path.rglob(f"*{PARQUET_SUFFIX}") if file.is_file()]
    else:
        named = [str(path)] if path.is_file() else glob(str(path), recursive=True)
        found = [os.path.abspath(file) for file in named if os.path.isfile(file)]
    if not found:
        raise ManifestError(f"{path}: no such Parquet file. Check the path or the pattern.")
    return sorted(found)


def open_saved(given: GivenInput) -> Opened | None:
    """Opens one split of a data set that `save_to_disk` wrote."""
    if given.format is None and not given.has_file("dataset_dict.json"):
        if not (given.has_file("state.json") and given.has_file("dataset_info.json")):
            return None
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
        return data_set(given, directory, root, names, prefix)

    return folder, opened


def _num_rows(location: str) -> int:
    """Returns the number of rows of a file of a saved data set."""
    arrow = _pyarrow(location)
    with _reading(location), arrow.memory_map(location) as file:
        return sum(batch.num_rows for batch in arrow.ipc.open_stream(file))


class _Columns(NamedTuple):
    """What the columns of a file are."""

    audio: str | None
    """The column that holds the audio, as bytes or as a struct of bytes and path; None if rows name files."""

    meaning: Meaning
    classes: dict[str, list[str]]
    """The names of classes, for columns that store their numbers."""

    def audio_in(self, row: dict[str, Any], where: str) -> tuple[bytes | None, str | None]:
        """Returns the bytes and the name of the audio in a row, which is at `where` for messages."""
        value = row[self.audio or ""] or {}
        content, path = (value, None) if isinstance(value, bytes) else (value.get("bytes"), value.get("path"))
        if not (content is None or isinstance(content, bytes)):
            raise ManifestError(
                f"{where}: the column {self.audio!r} holds {type(content).__name__} where bytes were expected. "
                "Cast the column."
            )
        return content, path if isinstance(path, str) else None

    def labels_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of the other columns, with names of classes; a negative class is unknown."""
        values = {**row}
        for name in self.classes.keys() & values.keys():
            names, number = self.classes[name], values[name]  # a float in a column with gaps
            values[name] = names[int(number)] if number is not None and 0 <= number < len(names) else None
        labels = self.meaning.labels_of(values)
        return {name: _plain(value) for name, value in labels.items() if value is not None}


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; those that it does not have, such as times of day and decimals, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, NoneType)) else str(value)


def _rows(location: str, given: tuple[Column, ...]) -> Iterator[tuple[dict[str, Any], _Columns] | Unusable]:
    """Yields the rows of a file with what its columns are; last, why the others cannot be read.

    Raises:
        StorageError: The store cannot be read.
    """
    arrow = _pyarrow(location)
    is_parquet = location.lower().endswith(PARQUET_SUFFIX)
    try:
        with (
            _reading(location),
            storage().open_stream(location) if is_parquet else arrow.memory_map(location) as stream,
        ):
            file = arrow.parquet.ParquetFile(stream) if is_parquet else arrow.ipc.open_stream(stream)
            schema = file.schema_arrow if is_parquet else file.schema
            columns = _columns_of(schema, location, given)
            names = [name for name in schema.names if name not in columns.meaning.unread]
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=names, use_threads=False) if is_parquet else file:
                batch.validate(full=True)  # pyarrow does not check what it reads: wrong offsets would end the process
                for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
                    for values in batch.select(names).slice(start, _ROWS_PER_BATCH).to_pylist():
                        yield values, columns
    except ManifestError as error:
        yield Unusable("unreadable", str(error))


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


def _columns_of(schema: Any, location: str, given: tuple[Column, ...]) -> _Columns:
    """Returns what the columns of a file are.

    Raises:
        ManifestError: There is no column of audio.
        ConfigError: There are several columns of audio, or none of a name that the caller gives.
    """
    check_columns(schema.names, given, location)
    audio = _audio_column(schema, location, given)
    names = tuple(name for name in schema.names if name != audio and _is_read(schema.field(name).type))
    if audio is None and not names_audio(names, given):
        found = shortened(", ".join(f"{part.name} ({part.type})" for part in schema), 400)
        raise ManifestError(
            f"{location}: no audio among the columns {found}. Bytes of audio files are read, lists of samples are not. "
            "If a column names the files, say which: --columns audio=NAME."
        )
    meaning = meaning_in(names, location, given, is_embedded=audio is not None)
    unread = (name for name in schema.names if name != audio and name not in names)
    meaning = meaning._replace(unread=(*meaning.unread, *unread))
    features = _features_of(schema).items()
    classes = {name: feature["names"] for name, feature in features if feature.get("_type") == "ClassLabel"}
    return _Columns(audio, meaning, classes)


def _audio_column(schema: Any, location: str, given: tuple[Column, ...]) -> str | None:
    """Returns the column that holds the audio; None if there is none, so that rows name files.

    Raises:
        ConfigError: It may be one of several.
    """
    from pyarrow import types

    named, features = given_name("audio", given), _features_of(schema)
    structs = [part.name for part in schema if types.is_struct(part.type) and part.type.get_field_index("bytes") >= 0]
    held = [name for name in schema.names if name in structs or _is_bytes(schema.field(name).type)]
    if named is not None:
        return named if named in held else None
    described = [name for name in held if features.get(name, {}).get("_type") == "Audio"]
    found = described or structs or [name for name in held if key_of(name) in AUDIO_NAMES]
    if "audio" in found:
        return "audio"
    if len(found) > 1 and not described:
        raise ConfigError(f"{location}: audio may be in {', '.join(found)}. Choose with --columns audio={found[0]}.")
    return found[0] if found else None


def _is_bytes(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(test(kind) for test in tests)


def _is_read(kind: Any) -> bool:
    """Returns whether values of a type are labels: not bytes, and not lists of numbers as long as a signal."""
    from pyarrow import types

    parts = [kind.field(index).type for index in range(kind.num_fields)]
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_signal = is_list and any(map(types.is_floating, parts))
    return not (is_signal or _is_bytes(kind)) and all(map(_is_read, parts))


def _features_of(schema: Any) -> dict[str, dict[str, Any]]:
    """Returns the descriptions of columns that the library `datasets` writes; empty if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"].items()
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    return {name: feature for name, feature in features if isinstance(feature, dict)}


def _suffix_of(name: str | None) -> str:
    suffix = posixpath.splitext(name or "")[1].lower()
    return suffix if suffix in AUDIO_SUFFIXES else ".wav"

"""Tables of audio files: CSV with a header, as spreadsheets and data frames write it, and Common Voice's TSV."""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nestdata.columns import TIMES, Column, key_of
from nestdata.errors import ManifestError
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import Entry, File, Unusable
from nestdata.prepare.inputs.format import GivenInput, Opened
from nestdata.prepare.inputs.lines import LineSource, Manifest
from nestdata.prepare.inputs.rows import (
    LABELS,
    FileNames,
    Meaning,
    audio_name,
    check_columns,
    cut_id_of,
    entry_of_row,
    meaning_in,
    names_audio,
    placed,
)
from nestdata.storage import join

_DELIMITERS = ("\t", ",", ";", "|")
_SUFFIXES = (".csv", ".csv.gz")
# Common Voice, scripted and spontaneous speech: names in a table that begins with these columns are relative to a
# folder beside it. Source: the folders and columns in https://github.com/common-voice/cv-dataset.
_COMMON_VOICE = {("client_id", "path"): "clips", ("client_id", "audio_id", "audio_file"): "audios"}
# How pandas and Python write a missing value into a table, and a whole number of a column with missing values.
_NOT_A_NUMBER = frozenset({"nan", "NaN"})
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
# The language code of Min Nan Chinese (ISO 639-3).
_MIN_NAN = "nan"
# A span of a file in samples, as fairseq names it.
_SLICE = re.compile(r"(.+):(\d{1,15}):(\d{1,15})")


class Header(NamedTuple):
    """The first row of a table."""

    delimiter: str
    names: tuple[str, ...]
    """Names as the table has them, without spaces around them."""

    meaning: Meaning


@dataclass(frozen=True, slots=True)
class Table(LineSource):
    """Rows with a column for the audio file, and optionally its span, channel and labels; see `rows`."""

    format: ClassVar[InputFormat] = "csv"
    num_header_lines: ClassVar[int] = 1
    manifest: Manifest
    names: FileNames
    header: Header

    def items(self) -> Iterator[tuple[int, list[str]]]:
        """Yields rows with the number of their last line.

        Raises:
            ManifestError: A quoted field is too long, because a quotation mark is missing.
        """
        for number, row in _rows(self.manifest, self.header.delimiter):
            # The header of a table may be repeated, where tables were joined.
            if any(row) and _stripped(row) != self.header.names:
                yield number, row
        self.manifest.close()

    def entries(self, number: int, item: tuple[int, list[str]]) -> Iterator[Entry]:  # noqa: ARG002, the row has its own
        """Yields the entry of a row, numbered by its line."""
        line, row = item
        where, header = self.where(line), self.header
        num_columns = len(header.names)
        if len(row) > num_columns and not any(row[num_columns:]):
            row = row[:num_columns]  # delimiters at the end of a line, as spreadsheets write them
        if len(row) != num_columns:
            yield Entry(where, where, self._malformed(row, where), number=line)
            return
        values, meaning = dict(zip(header.names, row, strict=True)), header.meaning
        name = audio_name(values, meaning, where)
        labels = _labels_of(meaning.labels_of(values))
        has_start = any(time.role == "start" for time in meaning.times)
        if not has_start and (found := slice_of(name, self.names)):
            cut_id, file, first, num_frames = found
            suspects = tuple(suspect for suspect in meaning.suspects if suspect[1] not in TIMES)
            without_times = meaning._replace(times=(), suspects=suspects)
            entry = placed(where, cut_id, file, values, without_times, labels, line)
            yield entry._replace(first_frame=first, num_frames=num_frames, meaning=meaning)
        else:
            yield entry_of_row(where, values, meaning, self.names, labels, line)

    def where(self, number: int) -> str:
        """Returns the path with the number of the line, which rows have themselves."""
        return f"{self.manifest.path!s}:{number}"

    def _malformed(self, row: list[str], where: str) -> Unusable:
        """Returns why a row has another number of fields than the header.

        Raises:
            ManifestError: It has several lines, most likely because of a quotation mark that hides many rows.
        """
        problem = f"{len(row)} fields, but the header has {len(self.header.names)}"
        if any("\n" in field for field in row):
            raise ManifestError(
                f"{where}: {problem}, in a row of several lines that ends here. Check whether a quotation mark is "
                "missing before this line."
            )
        quote = f"quote fields that contain {self.header.delimiter!r}"
        advice = "remove the tab, or drop this line" if self.header.delimiter == "\t" else quote
        return Unusable("malformed_row", f"{problem}; {advice}")


def slice_of(name: str, names: FileNames) -> tuple[str, File, int, int] | None:
    """Returns what a name FILE:OFFSET:FRAMES of fairseq is, which counts samples at the rate of the file.

    Args:
        name: The name in the manifest: a path or a URL.
        names: Finds the file.

    Returns:
        The id of the cut, its file, its first sample and its number of samples; None for other names, and if there is a
        file of that name.
    """
    match = _SLICE.fullmatch(name) if name[-1:].isdigit() else None
    if match is None or os.path.isfile(names.file(name).location):
        return None
    file, start, num_frames = names.file(match[1]), int(match[2]), int(match[3])
    return f"{cut_id_of(file.location, names.root)}:{start}:{num_frames}", file, start, num_frames


def is_table(path: Path | str, first_line: bytes, columns: tuple[Column, ...] = ()) -> bool:
    """Returns whether a file is a table: its name ends in `.csv`, or its first line has a column of audio files.

    Such a column has one of the usual names, or the name that the caller gives.
    """
    if str(path).lower().endswith(_SUFFIXES):
        return True
    names = _divided(first_line)[1]
    return len(names) > 1 and names_audio(names, columns)


def _header_of(given: GivenInput) -> Header:
    """Returns the first row of a table.

    Raises:
        ManifestError: It has no column with audio files, two columns have the same name, or there are too many or too
            few columns for a span.
        ConfigError: It has no column of a name that the caller gives.
    """
    path, line, columns = given.path, given.lines.text, given.options.columns
    if not line:
        raise ManifestError(f"{path}: the table is empty. Check the command that wrote it.")
    delimiter, names = _divided(line)
    keys = Counter(map(key_of, names))
    repeated = [key for key, number in keys.items() if key and number > 1]
    if repeated:
        raise ManifestError(f"{path}:1: two columns are called {repeated[0][:80]!r}. Rename or remove one of them.")
    check_columns(names, columns, f"{path}:1")
    return Header(delimiter, names, meaning_in(names, f"{path}:1, the header of a table", columns))


def open_table(given: GivenInput) -> Opened | None:
    """Opens a table with a header."""
    if given.format is None and not is_table(given.path, given.lines.text, given.options.columns):
        return None
    header = _header_of(given)
    names = _names(given, header)
    return names.base, lambda root: Table(given.manifest, replace(names, root=root), header)


def _names(given: GivenInput, header: Header) -> FileNames:
    """Returns how a table names its files: in Common Voice, relative to a folder beside it."""
    path = given.path
    clips = [name for first, name in _COMMON_VOICE.items() if header.names[: len(first)] == first]
    folders = [join(given.parent, name) for name in clips]
    if isinstance(path, str):
        return FileNames.beside([*folders, given.parent][0], ())
    if folders and os.path.isdir(folders[0]):
        return FileNames.of((), (*folders, given.parent, os.getcwd()), folders[0])
    rows = (row for _, row in islice(_rows(given.manifest, header.delimiter), 1, None))
    index = header.names.index(header.meaning.audio)
    names = (row[index] for row in rows if len(row) > index and "\0" not in row[index])
    return FileNames.beside(given.parent, names)


def _rows(manifest: Manifest, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields all rows, the header included, with the number of their last line."""
    lines = (line.decode(errors="surrogateescape") for line in manifest.lines())
    reader = csv.reader(lines, **_dialect(delimiter))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:  # a field of more than 128 KiB
        raise ManifestError(
            f"{manifest.path}:{reader.line_num}: {error}. Check whether a quotation mark is missing before this line."
        ) from None


def _dialect(delimiter: str) -> dict[str, Any]:
    # In tab-separated tables, quotation marks belong to the text, as in Common Voice.
    return {"delimiter": delimiter, "quoting": csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL}


def _divided(line: bytes) -> tuple[str, tuple[str, ...]]:
    """Returns the delimiter that divides a header into most fields, and the fields."""
    text = line.decode(errors="surrogateescape").rstrip("\r\n")
    delimiter = max(_DELIMITERS, key=text.count)
    delimiter = delimiter if delimiter in text else ","
    try:
        return delimiter, _stripped(next(csv.reader([text], **_dialect(delimiter)), []))
    except csv.Error:  # a field of more than 128 KiB
        return delimiter, ()


def _stripped(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(field.strip() for field in row)


def _labels_of(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels among the fields of a table, which are all text: without empty ones and `nan`.

    Numbers of speakers lose `.0`, as by `label_text`. A text that is a number is kept as it is written, and so is the
    language `nan`, which is Min Nan.
    """
    labels = {}
    for name, value in fields.items():
        kind = LABELS.get(name)
        if not value or (value in _NOT_A_NUMBER and not (kind == "language" and value == _MIN_NAN)):
            continue
        labels[name] = value[:-2] if kind == "speaker" and _WHOLE_FLOAT.fullmatch(value) else value
    return labels
